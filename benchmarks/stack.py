"""`python -m benchmarks stack`: KV memory optimizations on top of each other, in equal bytes.

The first arm is a static slab: every sequence has a row of the longest length for as long as it
runs, and nothing is shared. It is computed with the paged engine, which admits as many sequences as
rows fit into the KV memory; the memory in use is that of the rows. Each further arm adds one
optimization to the arm before and serves the same load.

Every speed is reported with the mean regret of the outputs: with random weights no output is
correct, but each token can be judged by the distance of its logit from the best float32 logit.
"""

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated

import numpy as np
import torch
import typer

from benchmarks.common.command import run_command
from benchmarks.common.flags import AsJson, Out, Threads
from benchmarks.common.models import random_model, random_weights
from benchmarks.common.regret import RegretJudge
from benchmarks.common.result import Chart, Numbers, PartResult, Table
from benchmarks.common.tables import table_of
from benchmarks.common.workload import SHAPES
from quire.cli.common import use_threads
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import ConfigError, InvariantError, UnknownName
from quire.layout.model import ModelSpec
from quire.models.loader import LoadedModel
from quire.plan.preemption_costs import assumed_prefill
from quire.profile.ceilings import DTYPES, ProductProbe
from quire.scheduler.schedule_config import ScheduleConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StackLoad:
    """Requests and the size of the KV memory that they share.

    The article's mixed workload (1,024 tokens in, 512 out, sequences of at most 8,192), with all
    lengths divided by 8. Lengths of questions and outputs are drawn between 0.5 and 1.5 times their
    mean.

    Attributes:
        model: a name in SHAPES; random weights in bfloat16.
        requests: number of requests, all present at the start.
        system_tokens: tokens of the system prompt, the common prefix of all prompts.
        question_tokens: mean tokens of a prompt after the system prompt.
        answer_tokens: mean tokens of an output.
        longest_tokens: tokens of a row of the static slab.
        contiguous_rows: number of these rows that fit in the memory.
    """

    model: str = "125m"
    requests: int = 128
    system_tokens: int = 64
    question_tokens: int = 64
    answer_tokens: int = 64
    longest_tokens: int = 1_024
    contiguous_rows: int = 4

    def __post_init__(self) -> None:
        longest = self.system_tokens + 3 * (self.question_tokens + self.answer_tokens) // 2
        if longest > self.longest_tokens:
            raise ConfigError(
                f"expected requests of at most longest_tokens={self.longest_tokens}, got up to "
                f"{longest} tokens: lower question_tokens or answer_tokens"
            )

    def kv_bytes(self, spec: ModelSpec) -> int:
        """Bytes of the KV memory, equal for every arm."""
        return spec.kv_bytes(self.longest_tokens, 2) * self.contiguous_rows

    def drawn(self) -> list[tuple[list[int], int]]:
        """Prompts and numbers of tokens to generate; equal in every process."""
        rng = random.Random(0)
        vocab_size = SHAPES[self.model]().vocab_size

        def tokens(count: int) -> list[int]:
            return [rng.randrange(vocab_size) for _ in range(count)]

        def length(mean: int) -> int:
            return rng.randint(mean - mean // 2, mean + mean // 2)

        system = tokens(self.system_tokens)
        return [
            ([*system, *tokens(length(self.question_tokens))], length(self.answer_tokens))
            for _ in range(self.requests)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class StackArm:
    """Options of an arm's KV memory.

    Attributes:
        name: name of the added optimization.
        slab: whether every sequence has a row of the longest length, instead of pages.
        codec: codec of keys and values.
        enable_prefix_caching: whether prompts share cached prefixes.
    """

    name: str
    slab: bool = False
    codec: str = "none"
    enable_prefix_caching: bool = False

    def kv_config(self, memory_bytes: int) -> KVConfig:
        """KV config of the arm, with swap space for preempted sequences."""
        return KVConfig(
            memory=memory_bytes,
            swap_space=memory_bytes,
            codec=self.codec,
            prefix_cache=PrefixCacheConfig(enabled=self.enable_prefix_caching),
        )


CONTIGUOUS, PAGED, INT8, INT8_PREFIX, INT4_PREFIX = "contiguous", "paged", "int8", "cache", "int4"
ARMS = (
    StackArm(name=CONTIGUOUS, slab=True),
    StackArm(name=PAGED),
    StackArm(name=INT8, codec="int8"),
    StackArm(name=INT8_PREFIX, codec="int8", enable_prefix_caching=True),
    StackArm(name=INT4_PREFIX, codec="int4", enable_prefix_caching=True),
)
"""In the article's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackRun:
    """Measurements of one run of the whole load with one arm.

    Attributes:
        arm: name of the arm.
        total_s: time until the last token.
        tokens: number of generated tokens.
        max_batch: most sequences with KV at once.
        mean_batch: sequences with KV, mean over steps.
        token_s: times between two tokens of one request, for all requests.
        first_s: time to the first token of each request.
        kv_peak_bytes: peak KV bytes of requests.
        used_share: fraction of KV memory in use, mean over steps, without cached prefixes.
        preemptions: number of preemptions.
        answers: output tokens of each request.
    """

    arm: str
    total_s: float
    tokens: int
    max_batch: int
    mean_batch: float
    token_s: tuple[float, ...]
    first_s: tuple[float, ...]
    kv_peak_bytes: int
    used_share: float
    preemptions: int
    answers: tuple[tuple[int, ...], ...]

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second, with prefill included in the time."""
        return self.tokens / self.total_s

    def to_json(self) -> dict[str, int | float | str]:
        """Values without single tokens."""
        fields = ("arm", "total_s", "tokens", "max_batch", "mean_batch", "kv_peak_bytes")
        found = {name: getattr(self, name) for name in (*fields, "used_share", "preemptions")}
        return found | {
            "token_p50_s": float(np.percentile(self.token_s, 50)),
            "token_p99_s": float(np.percentile(self.token_s, 99)),
            "first_p50_s": float(np.percentile(self.first_s, 50)),
        }


@dataclass(slots=True)
class _Clock:
    """Records the times of each request's tokens."""

    answers: dict[str, list[int]]
    last_s: dict[str, float] = field(default_factory=dict)
    token_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)

    def record(self, request_id: str, token_ids: tuple[int, ...], now_s: float) -> None:
        """Record tokens of one request; the wait is divided equally among tokens of one step."""
        if not token_ids:
            return
        self.answers[request_id] += token_ids
        if request_id in self.last_s:
            self.token_s.append((now_s - self.last_s[request_id]) / len(token_ids))
        else:
            self.first_s.append(now_s)
        self.last_s[request_id] = now_s


def run_arm(model: LoadedModel, load: StackLoad, arm: StackArm) -> StackRun:
    """Serve the load with a new engine and an empty KV memory.

    Args:
        model: model with random weights.
        load: the requests.
        arm: options of the KV memory.
    """
    memory_bytes = load.kv_bytes(model.spec)
    row_bytes = memory_bytes // load.contiguous_rows
    schedule = ScheduleConfig(low_watermark=1.0)
    if arm.slab:
        schedule = replace(schedule, max_num_seqs=load.contiguous_rows)
    engine = Engine(model, arm.kv_config(memory_bytes), schedule)
    started_s = time.perf_counter()
    drawn = load.drawn()
    ids = []
    for prompt, new_tokens in drawn:
        options = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        ids.append(engine.submit(GenerationRequest(prompt, options)))
    clock = _Clock({request_id: [] for request_id in ids})
    batches, used = [], []
    while engine.has_work:
        for delta in engine.step():
            clock.record(delta.request_id, tuple(delta.token_ids), time.perf_counter() - started_s)
        batches.append(len(engine.scheduler.running))
        in_rows = batches[-1] * row_bytes
        used.append(in_rows if arm.slab else engine.pool.kv.memory.used_bytes)
    total_s = time.perf_counter() - started_s
    engine.check()
    stats, answers = engine.stats(), tuple(map(tuple, clock.answers.values()))
    if [*map(len, answers)] != [new_tokens for _, new_tokens in drawn]:
        raise InvariantError("expected all outputs of the stack benchmark to be complete")
    return StackRun(
        arm=arm.name,
        total_s=total_s,
        tokens=sum(map(len, answers)),
        max_batch=max(batches),
        mean_batch=sum(batches) / len(batches),
        token_s=tuple(clock.token_s),
        first_s=tuple(clock.first_s),
        kv_peak_bytes=max(used) if arm.slab else stats.kv_peak_bytes,
        used_share=sum(used) / len(used) / memory_bytes,
        preemptions=stats.num_preemptions,
        answers=answers,
    )


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
        numbers[f"stack_{run.arm}_tokens_per_s"] = _tokens_per_s(found.rounds, i)
        numbers[f"stack_{run.arm}_max_batch"] = run.max_batch
        numbers[f"stack_{run.arm}_utilisation"] = _utilisation(found, i)
        numbers[f"stack_{run.arm}_mean_regret"] = found.regrets[i]
    return numbers


def _tokens_per_s(rounds: Sequence[Round], arm: int) -> float:
    return statistics.median(runs[arm].tokens_per_s for runs in rounds)


def _speedup(rounds: Sequence[Round], arm: int, over: int) -> float:
    return statistics.median(r[arm].tokens_per_s / r[over].tokens_per_s for r in rounds)


def _utilisation(found: StackFound, arm: int) -> float:
    return statistics.median(found.computed_s / runs[arm].total_s for runs in found.rounds)


def _table(config: StackConfig, found: StackFound) -> Table:
    load = config.load

    def median(arm: int, name: str) -> float:
        return statistics.median(float(runs[arm].to_json()[name]) for runs in found.rounds)

    return table_of(
        "stack",
        f"{load.requests} requests at once, a system prompt of {load.system_tokens} tokens, "
        f"then {load.question_tokens} in and {load.answer_tokens} out on average, "
        f"random-weight Llama ({load.model}), bfloat16, in KV memory where contiguous lanes of "
        f"{load.longest_tokens:,} tokens hold {load.contiguous_rows}. Utilisation is the time "
        "of all products at the cores' rate, nothing shared, over the measured time. "
        f"Medians of {config.repeats} rounds, arms in turn, prefill included.",
        range(len(config.arms)),
        {
            "KV memory": lambda arm: _label(config.arms[arm]),
            "largest batch": lambda arm: int(median(arm, "max_batch")),
            "mean batch": lambda arm: median(arm, "mean_batch"),
            "tokens/s": lambda arm: _tokens_per_s(found.rounds, arm),
            "over the arm before": lambda arm: (
                _speedup(found.rounds, arm, arm - 1) if arm else None
            ),
            "token p50 ms": lambda arm: 1e3 * median(arm, "token_p50_s"),
            "token p99 ms": lambda arm: 1e3 * median(arm, "token_p99_s"),
            "first token p50 s": lambda arm: median(arm, "first_p50_s"),
            "memory in use": lambda arm: median(arm, "used_share"),
            "utilisation": lambda arm: _utilisation(found, arm),
            "peak KV MiB": lambda arm: median(arm, "kv_peak_bytes") / 2**20,
            "preemptions": lambda arm: int(median(arm, "preemptions")),
            "mean regret": lambda arm: found.regrets[arm],
        },
    )


def _label(arm: StackArm) -> str:
    codec = "bfloat16" if arm.codec == "none" else arm.codec
    store = "contiguous_max" if arm.slab else "paged"
    return f"{store}, {codec}" + (", prefix cache" if arm.enable_prefix_caching else "")


def _chart(found: StackFound) -> Chart:
    arms = enumerate(run.arm for run in found.rounds[0])
    return Chart(
        name="stack",
        title="Tokens per second in equal KV memory",
        x_label="KV memory",
        y_label="generated tokens/s",
        lines={"": tuple((name, _tokens_per_s(found.rounds, i)) for i, name in arms)},
    )


def stack(
    *,
    model: Annotated[
        str | None, typer.Option(help="Shape: 125m, small or tiny; default: 125m.")
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Number of requests, all present at the start; default: 128."),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Rounds of all arms; default: 3.")
    ] = None,
    out: Out = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Few short requests, a tiny model, one round. No claims."),
    ] = False,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Serve one load with contiguous KV, then add pages, int8, a prefix cache and int4.

    Every arm has the KV memory that holds four contiguous lanes, and all optimizations of the arms
    before it. Tables show the largest batch, tokens per second and latencies.
    """
    if model is not None and model not in SHAPES:
        raise UnknownName("model", model, SHAPES)
    use_threads(threads)
    config = QUICK_STACK if quick else StackConfig()
    load = replace(
        config.load, model=model or config.load.model, requests=requests or config.load.requests
    )
    config = replace(config, load=load, repeats=repeats or config.repeats)
    made = {"stack": run_stack}
    run_command("stack", made, "", config, asdict(config), out, quick=quick, as_json=as_json)
