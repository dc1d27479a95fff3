"""Runs of all arms in turn, and the gain of each: batch, tokens per second, latency.

Every speed is reported with the mean regret of the outputs: with random weights no output is
correct, but each token can be judged by the distance of its logit from the best float32 logit.

"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

import torch

from benchmarks.common.models import random_model, random_weights
from benchmarks.common.regret import RegretJudge
from benchmarks.common.result import Cell, Chart, Numbers, PartResult, Table
from benchmarks.common.workload import SHAPES
from benchmarks.stack.arms import ARMS, StackArm, StackRun, run_arm
from benchmarks.stack.load import StackLoad
from quire.plan.preemption_costs import assumed_prefill
from quire.profile.ceilings import DTYPES, ProductProbe


@dataclass(frozen=True, slots=True, kw_only=True)
class StackConfig:
    """Configuration of the benchmark.

    Attributes:
        load: requests and memory.
        arms: each is compared with the one before it, and the last with the first.
        repeats: rounds of all arms, in turn.
        judged: number of leading outputs whose regret is computed.
        product: [rows, inner, columns] of the matrix product that measures the compute rate.
    """

    load: StackLoad = field(default_factory=StackLoad)
    arms: tuple[StackArm, ...] = ARMS
    repeats: int = 3
    judged: int = 8
    product: tuple[int, int, int] = (2_048, 768, 2_048)


QUICK_STACK = StackConfig(
    load=StackLoad(
        model="tiny",
        requests=12,
        system_tokens=16,
        question_tokens=8,
        answer_tokens=8,
        longest_tokens=64,
        contiguous_rows=2,
    ),
    repeats=1,
    judged=2,
    product=(64, 64, 64),
)

Round = Sequence[StackRun]


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFound:
    """Measurements of all arms.

    Attributes:
        rounds: runs of every arm, in their order, by round.
        regrets: mean regret over the tokens of the judged outputs, by arm.
        computed_s: least time of all products of the load, without sharing.
    """

    rounds: Sequence[Round]
    regrets: Sequence[float]
    computed_s: float


def measure_stack(config: StackConfig) -> StackFound:
    """Run the arms in turn, after a short warm-up of each."""
    load = config.load
    model = random_model(SHAPES[load.model](), dtype=torch.bfloat16)
    few = replace(load, requests=2)
    for arm in config.arms:
        run_arm(model, few, arm)
    rounds = [[run_arm(model, load, arm) for arm in config.arms] for _ in range(config.repeats)]
    weights = random_weights(SHAPES[load.model](), dtype=torch.bfloat16)
    judge = RegretJudge(torch.nn.Module.float(weights))
    prompts = [prompt for prompt, _ in load.drawn()][: config.judged]
    probes = [ProductProbe(dtype, *config.product) for dtype in DTYPES]
    # the engine holds weights in the dtype with the faster products on this CPU
    rate = max(statistics.median(probe.rate() for _ in range(5)) for probe in probes)
    processed = sum(len(prompt) + new for prompt, new in load.drawn())
    return StackFound(
        rounds=rounds,
        regrets=[judge.mean_regret(prompts, run.answers) for run in rounds[0]],
        computed_s=processed * assumed_prefill(model.spec, rate).token_s,
    )


def run_stack(config: StackConfig) -> PartResult:
    """Run the part."""
    found = measure_stack(config)
    return PartResult(
        claims=claims(found),
        tables=(_table(config, found),),
        charts=(_chart(found),),
        raw={
            "rounds": [[run.to_json() for run in runs] for runs in found.rounds],
            "regrets": list(found.regrets),
            "arms": [asdict(arm) for arm in config.arms],
        },
    )


def claims(found: StackFound) -> Numbers:
    """Ratios within rounds, medians over rounds.

    stack_total_ratio: tokens per second of the last arm over the first.
    stack_max_batch_ratio: largest batch of the last arm over the first.
    stack_ARM_ratio: tokens per second over the arm before it.

    """
    numbers: Numbers = {
        "stack_total_ratio": _speedup(found.rounds, -1, 0),
        "stack_max_batch_ratio": statistics.median(
            runs[-1].max_batch / runs[0].max_batch for runs in found.rounds
        ),
    }
    for i, run in enumerate(found.rounds[0]):
        if i:
            numbers[f"stack_{run.arm}_ratio"] = _speedup(found.rounds, i, i - 1)
        speeds = [runs[i].tokens_per_s for runs in found.rounds]
        numbers[f"stack_{run.arm}_tokens_per_s"] = statistics.median(speeds)
        numbers[f"stack_{run.arm}_max_batch"] = run.max_batch
        numbers[f"stack_{run.arm}_utilisation"] = _utilisation(found, i)
        numbers[f"stack_{run.arm}_mean_regret"] = found.regrets[i]
    return numbers


def _speedup(rounds: Sequence[Round], arm: int, over: int) -> float:
    return statistics.median(r[arm].tokens_per_s / r[over].tokens_per_s for r in rounds)


def _utilisation(found: StackFound, arm: int) -> float:
    return statistics.median(found.computed_s / runs[arm].total_s for runs in found.rounds)


def _table(config: StackConfig, found: StackFound) -> Table:
    load = config.load
    return Table(
        name="stack",
        caption=(
            f"{load.requests} requests at once, a system prompt of {load.system_tokens} tokens, "
            f"then {load.question_tokens} in and {load.answer_tokens} out on average, "
            f"random-weight Llama ({load.model}), bfloat16, in KV memory where contiguous lanes of "
            f"{load.longest_tokens:,} tokens hold {load.contiguous_rows}. Utilisation is the time "
            "of all products at the cores' rate, nothing shared, over the measured time. "
            f"Medians of {config.repeats} rounds, arms in turn, prefill included."
        ),
        columns=(
            "KV memory",
            "largest batch",
            "mean batch",
            "tokens/s",
            "over the arm before",
            "token p50 ms",
            "token p99 ms",
            "first token p50 s",
            "memory in use",
            "utilisation",
            "peak KV MiB",
            "preemptions",
            "mean regret",
        ),
        rows=tuple(_row(config.arms, found, i) for i in range(len(config.arms))),
    )


def _row(arms: Sequence[StackArm], found: StackFound, arm: int) -> tuple[Cell, ...]:
    runs = [r[arm].to_json() for r in found.rounds]

    def median(name: str) -> float:
        return statistics.median(float(run[name]) for run in runs)

    return (
        _label(arms[arm]),
        int(median("max_batch")),
        median("mean_batch"),
        statistics.median(r[arm].tokens_per_s for r in found.rounds),
        _speedup(found.rounds, arm, arm - 1) if arm else None,
        1e3 * median("token_p50_s"),
        1e3 * median("token_p99_s"),
        median("first_p50_s"),
        median("used_share"),
        _utilisation(found, arm),
        median("kv_peak_bytes") / 2**20,
        int(median("preemptions")),
        found.regrets[arm],
    )


def _label(arm: StackArm) -> str:
    codec = "bfloat16" if arm.codec == "none" else arm.codec
    store = "contiguous_max" if arm.slab else "paged"
    return f"{store}, {codec}" + (", prefix cache" if arm.enable_prefix_caching else "")


def _chart(found: StackFound) -> Chart:
    bars = tuple(
        (run.arm, statistics.median(runs[i].tokens_per_s for runs in found.rounds))
        for i, run in enumerate(found.rounds[0])
    )
    return Chart(
        name="stack",
        title="Tokens per second in equal KV memory",
        x_label="KV memory",
        y_label="generated tokens/s",
        lines={"": bars},
    )
