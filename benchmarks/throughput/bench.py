"""Total time of a batch of prompts: Quire and Transformers, in one run with the machine limits.

Arms are interleaved, so that other load on the machine affects all of them. Each round also
measures the memory bandwidth and the compute rate; a claim is the median, over the rounds, of
ratios of numbers from the same round.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.common.attention import AttentionBench, AttentionShape
from benchmarks.common.models import random_model, random_weights
from benchmarks.common.regret import RegretJudge
from benchmarks.common.workload import QUICK_WORKLOAD, Workload
from benchmarks.roofline.measured import MIN_RATIO, floor_s
from benchmarks.roofline.parts import Storage, step_costs, storage_of
from benchmarks.roofline.rates import PRODUCTS, QUICK_PRODUCTS, RateProbe, Rates, median_rates
from benchmarks.throughput.arms import Arm, ArmResult, ContinuousArm, QuireArm, StaticArm
from quire.config.kv_config import AttentionName
from quire.layout.model import ModelSpec
from quire.plan.roofline import RowTokens
from quire.profile.ceilings import LARGE_BUFFER_BYTES, MemoryProbe, seconds

PEERS = ("hf_static", "hf_one", "hf_cb")
ATTENTION_PASSES = 5  # in each round


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputConfig:
    """Configuration of the benchmark.

    Attributes:
        workload: prompts and model.
        attention_shape: shape of the attention measurement.
        repeats: measured rounds, after one warm-up round.
        attention: Quire's attention backend.
        peers: the other arms, names in PEERS.
        buffer_bytes: bytes of the buffer that measures the memory bandwidth.
        judged_prompts: number of first outputs that are judged; see `RegretJudge`.
        products: (rows, inner, columns) of the products that measure the product rates.
    """

    workload: Workload = field(default_factory=Workload)
    attention_shape: AttentionShape = field(default_factory=AttentionShape)
    repeats: int = 5
    attention: AttentionName = "auto"
    peers: tuple[str, ...] = ("hf_static", "hf_cb")
    buffer_bytes: int = LARGE_BUFFER_BYTES
    judged_prompts: int = 4
    products: tuple[tuple[int, int, int], ...] = PRODUCTS


QUICK_THROUGHPUT = ThroughputConfig(
    workload=QUICK_WORKLOAD,
    attention_shape=AttentionShape(batch=2, tokens=64, num_heads=4, num_kv_heads=2, head_dim=64),
    repeats=2,
    buffer_bytes=16 << 20,
    products=QUICK_PRODUCTS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Measurements of one round.

    Attributes:
        arms: results, Quire's first.
        attention_s: attention time in seconds by backend.
        read_bytes_per_s: memory bandwidth between the attention passes.
        rates: limits for the floor of a step.
    """

    arms: tuple[ArmResult, ...]
    attention_s: Mapping[str, float]
    read_bytes_per_s: float
    rates: Rates


class ThroughputBench:
    """Holds the models, with equal weights, and runs rounds.

    Args:
        config: configuration of the benchmark.
    """

    def __init__(self, config: ThroughputConfig) -> None:
        self.config = config
        workload = config.workload
        model = random_model(workload.shape(), dtype=workload.torch_dtype, impl="auto")
        self.spec: ModelSpec = model.spec
        self._quire = QuireArm(model, workload, attention=config.attention)
        peer_model = random_weights(workload.shape(), dtype=workload.torch_dtype)
        peers: dict[str, Arm] = {
            "hf_static": StaticArm(peer_model, workload, self.spec),
            "hf_one": StaticArm(peer_model, workload, self.spec, together=False),
            "hf_cb": ContinuousArm(peer_model, workload, self.spec),
        }
        self._arms: list[Arm] = [self._quire, *(peers[name] for name in config.peers)]
        self._attention = AttentionBench(config.attention_shape).variants()
        self._memory = MemoryProbe(config.buffer_bytes)
        self.storage: Storage = storage_of(self._quire.engine)
        self._probe = RateProbe(self.storage.arithmetics, config.buffer_bytes, config.products)

    @property
    def attention(self) -> str:
        """Attention backend of Quire's arm."""
        return self._quire.engine.pool.kv.backend.name

    def rounds(self) -> Iterator[Round]:
        """Yield the measured rounds, after one warm-up round that touches all memory."""
        self._round()
        for _ in range(self.config.repeats):
            yield self._round()

    def regrets(self, found: Round) -> dict[str, float]:
        """Mean regret of each arm's outputs for the first prompts; see `RegretJudge`."""
        workload = self.config.workload
        prompts = workload.prompt_ids()[: self.config.judged_prompts]
        weights = random_weights(workload.shape(), dtype=workload.torch_dtype)
        judge = RegretJudge(torch.nn.Module.float(weights))
        return {result.arm: judge.mean_regret(prompts, result.tokens) for result in found.arms}

    def _round(self) -> Round:
        arms = tuple(arm.run() for arm in self._arms)
        times: dict[str, list[float]] = {name: [] for name in self._attention}
        reads = []
        for i in range(ATTENTION_PASSES + 1):
            for name, call in self._attention.items():
                attention_s = seconds(call)
                if i:  # the first pass reloads the caches after the arms
                    times[name].append(attention_s)
                    reads.append(self._memory.read_rate())
        return Round(
            arms=arms,
            attention_s={name: statistics.median(times_s) for name, times_s in times.items()},
            read_bytes_per_s=statistics.median(reads),
            rates=self._probe.measure(),
        )


def decode_floor_s(spec: ModelSpec, storage: Storage, workload: Workload, rates: Rates) -> float:
    """Least time of a decode step halfway through the outputs; see `roofline.measured`."""
    before = workload.prompt_tokens + workload.new_tokens // 2
    rows = [RowTokens(new=1, before=before)] * workload.prompts
    costs = step_costs(spec, storage, rows, sampled_rows=workload.prompts)
    return floor_s(costs, storage.arithmetic, rates)


def summarise(
    config: ThroughputConfig,
    spec: ModelSpec,
    storage: Storage,
    rounds: Sequence[Round],
    regrets: Mapping[str, float],
) -> dict[str, int | float]:
    """Compute the claims; `decode_step_over_floor` only if no step is faster than its floor.

    Args:
        config: configuration of the run.
        spec: shape of the model.
        storage: storage of Quire's weights and KV.
        rounds: one or more rounds.
        regrets: mean regrets by arm.
    """
    generated = config.workload.prompts * config.workload.new_tokens
    claims: dict[str, int | float] = {}
    for i, result in enumerate(rounds[0].arms):
        if i:
            ratios = [found.arms[0].total_s / found.arms[i].total_s for found in rounds]
            claims[f"total_ratio_vs_{result.arm}"] = statistics.median(ratios)
            if result.decode_step_s:
                ratios = [f.arms[0].decode_step_s / f.arms[i].decode_step_s for f in rounds]
                claims[f"decode_ratio_vs_{result.arm}"] = statistics.median(ratios)
        times_s = [found.arms[i].total_s for found in rounds]
        claims[f"{result.arm}_total_s"] = statistics.median(times_s)
        claims[f"{result.arm}_tokens_per_s"] = generated / statistics.median(times_s)
        claims[f"{result.arm}_prefill_s"] = statistics.median(f.arms[i].prefill_s for f in rounds)
        claims[f"{result.arm}_decode_step_s"] = statistics.median(
            found.arms[i].decode_step_s for found in rounds
        )
        claims[f"{result.arm}_kv_bytes"] = max(found.arms[i].kv_bytes for found in rounds)
        claims[f"{result.arm}_mean_regret"] = regrets[result.arm]
    ratio = decode_over_floor(config, spec, storage, rounds)
    if ratio is not None and ratio >= MIN_RATIO:
        claims["decode_step_over_floor"] = ratio
    claims["read_bytes_per_s"] = statistics.median(found.read_bytes_per_s for found in rounds)
    for name, rate in median_rates(found.rates for found in rounds).flops_per_s.items():
        claims[f"product_flops_per_s_{name}"] = rate
    return claims | attention_claims(config.attention_shape, rounds)


def decode_over_floor(
    config: ThroughputConfig, spec: ModelSpec, storage: Storage, rounds: Sequence[Round]
) -> float | None:
    """Quire's decode step over its floor, median of the rounds; None without decode steps."""
    if not all(found.arms[0].decode_step_s for found in rounds):
        return None
    return statistics.median(
        found.arms[0].decode_step_s / decode_floor_s(spec, storage, config.workload, found.rates)
        for found in rounds
    )


def attention_claims(shape: AttentionShape, rounds: Sequence[Round]) -> dict[str, float]:
    """Claims about C attention; without the C extension, about gathered attention."""
    backend = "native" if "native" in rounds[0].attention_s else "gathered"
    claims = {
        "attention_over_read_ceiling": statistics.median(
            shape.kv_bytes / found.attention_s[backend] / found.read_bytes_per_s for found in rounds
        )
    }
    if backend == "native":
        claims["statistics_overhead"] = statistics.median(
            found.attention_s["native sums"] / found.attention_s["native"] - 1 for found in rounds
        )
        claims["gathered_over_native"] = statistics.median(
            found.attention_s["gathered"] / found.attention_s["native"] for found in rounds
        )
    return claims
