"""Parts `speed` and `equal_quality`: tokens per second of the arms in equal KV bytes.

Prefill is part of the time. Part `speed` runs the paper's static batches, and continuous batching.
Part `equal_quality` compares Batch-Max with decode-only eviction of its quality in the default
engine, which admits each request by the moving peak of its prompt: the same rule, with the cap at
which part `quality` measured the quality of Batch-Max. The model has random weights.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from benchmarks.batch_max.arms import ED, FKV, EvictionArm, bm_name
from benchmarks.batch_max.config import SpeedConfig
from benchmarks.batch_max.floor import floor_claims, measure_limits
from benchmarks.batch_max.running import batch_sizes, largest_of, rows_that_fit
from benchmarks.common.decoding import generate_all
from benchmarks.common.models import SHAPES, random_model
from benchmarks.common.result import Chart, Numbers, PartResult, Table
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.engine.core import Engine
from quire.errors import ConfigError
from quire.layout.config import dtype_bytes
from quire.models.loader import LoadedModel
from quire.profile.ceilings import random_prompt
from quire.profile.step_rates import static_schedule
from quire.scheduler.schedule_config import ScheduleConfig

STATIC, CONTINUOUS = "static", "continuous"
MIB = 1 << 20


# ---- measurement ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmTime:
    """Measurements of one arm in one round.

    Attributes:
        mode: STATIC or CONTINUOUS.
        arm: name of the arm.
        kv_bytes: bytes of the KV memory.
        peak_bytes: peak bytes in use.
        batch: rows that start together; with continuous batching, most running rows.
        prefill_s, decode_s: time until the last prompt is prefilled, and time after that.
        tokens_per_s: generated tokens per second, with prefill in the time.
        preemptions: number of preempted rows.
    """

    mode: str
    arm: str
    kv_bytes: int
    peak_bytes: int
    batch: int
    prefill_s: float
    decode_s: float
    tokens_per_s: float
    preemptions: int


Round = Sequence[ArmTime]


class ArmTimer:
    """Runs arms on random weights, each in a new KV memory of equal bytes.

    Args:
        model: model with random weights.
        config: lengths, caps and KV memory.
    """

    def __init__(self, model: LoadedModel, config: SpeedConfig) -> None:
        self._model, self._config = model, config
        self._batches: dict[str, int] = {}

    @property
    def pool_bytes(self) -> int:
        """KV bytes of the configured number of rows of full KV."""
        config = self._config
        token_bytes = self._model.spec.kv_bytes_per_token(dtype_bytes(config.dtype))
        return config.pool * config.final_tokens * token_bytes

    def warm_up(self) -> None:
        """Run every arm once on short rows, so that no measured run is the first."""
        tokens = max(self._config.prompt_tokens // 8, 1)
        for arm in self._config.arms:
            engine = self._engine(arm, static_schedule(2, tokens))
            generate_all(engine, self._prompts(2, tokens), 4)

    def static(self, arm: EvictionArm) -> ArmTime:
        """Run one batch, as large as the paper's set and the KV memory allow.

        Pages of several sizes can fragment the memory. If a row of the batch is preempted, the next
        smaller batch replaces it, in this and all later rounds.
        """
        batch, tokens = self.batch(arm), self._config.prompt_tokens
        found = self._timed(STATIC, arm, static_schedule(batch, tokens), batch)
        if found.preemptions and batch > 1:
            self._batches[arm.name] = largest_of(batch_sizes(), batch - 1)
            return self.static(arm)
        return found

    def continuous(self, arm: EvictionArm, num_prompts: int) -> ArmTime:
        """Run many requests at once with continuous batching and chunked prefill."""
        return self._timed(CONTINUOUS, arm, ScheduleConfig(low_watermark=1.0), num_prompts)

    def batch(self, arm: EvictionArm) -> int:
        """Number of rows of a static batch.

        Raises:
            ConfigError: the KV memory cannot hold one row.
        """
        if arm.name not in self._batches:
            config = self._config
            kv = self._kv(arm)
            rows = rows_that_fit(self._model, kv, config.prompt_tokens, config.new_tokens)
            self._batches[arm.name] = largest_of(batch_sizes(), rows)
            if not self._batches[arm.name]:
                raise ConfigError(
                    f"expected {self.pool_bytes:,} B of KV memory to hold a row of arm {arm.name}; "
                    "use a larger pool"
                )
        return self._batches[arm.name]

    def _timed(
        self, mode: str, arm: EvictionArm, schedule: ScheduleConfig, num_prompts: int
    ) -> ArmTime:
        engine = self._engine(arm, schedule)
        prompts = self._prompts(num_prompts, self._config.prompt_tokens)
        done = generate_all(engine, prompts, self._config.new_tokens)
        engine.check()
        stats = engine.stats()
        return ArmTime(
            mode=mode,
            arm=arm.name,
            kv_bytes=stats.kv_total_bytes,
            peak_bytes=stats.kv_peak_bytes,
            batch=done.rows_peak,
            prefill_s=done.prefill_s,
            decode_s=done.decode_s,
            tokens_per_s=done.tokens_per_s,
            preemptions=done.preemptions,
        )

    def _kv(self, arm: EvictionArm) -> KVConfig:
        no_prefixes = PrefixCacheConfig(enabled=False)
        return KVConfig(memory=self.pool_bytes, evict=arm.evict, prefix_cache=no_prefixes)

    def _engine(self, arm: EvictionArm, schedule: ScheduleConfig) -> Engine:
        return Engine(self._model, self._kv(arm), schedule)

    def _prompts(self, rows: int, tokens: int) -> list[list[int]]:
        return [random_prompt(self._model, tokens, row) for row in range(rows)]


def _timer(config: SpeedConfig) -> ArmTimer:
    model = random_model(SHAPES[config.model](), dtype=getattr(torch, config.dtype))
    timer = ArmTimer(model, config)
    timer.warm_up()
    return timer


def _raw(rounds: Sequence[Round]) -> dict[str, object]:
    return {"rounds": [[asdict(time) for time in found] for found in rounds]}


def times_of(rounds: Sequence[Round], mode: str, arm: str) -> list[ArmTime]:
    """Times of one arm, one per round in which it ran."""
    return [t for found in rounds for t in found if (t.mode, t.arm) == (mode, arm)]


def ratio(rounds: Sequence[Round], mode: str, arm: str, other: str) -> float:
    """Ratio of two arms' tokens per second: median over rounds with both."""
    pairs = ((times_of([one], mode, arm), times_of([one], mode, other)) for one in rounds)
    return statistics.median(a[0].tokens_per_s / b[0].tokens_per_s for a, b in pairs if a and b)


def arm_claims(config: SpeedConfig, times: Sequence[ArmTime]) -> Numbers:
    """Median tokens per second, batch and peak bytes of an arm."""
    first = times[0]
    prefix = CONTINUOUS if first.mode == CONTINUOUS else f"b{config.pool}"
    name = f"{prefix}_{first.arm}"
    return {
        f"{name}_tokens_per_s": statistics.median(t.tokens_per_s for t in times),
        f"{name}_batch": first.batch,
        f"{name}_peak_bytes": max(t.peak_bytes for t in times),
    }


# ---- part speed ----------------------------------------------------------------------------------


def run_speed(config: SpeedConfig) -> PartResult:
    """Run the part: rounds of all arms, static and continuous; later only the claimed arms."""
    timer = _timer(config)
    rounds = [[timer.static(arm) for arm in config.arms_of_round(i)] for i in range(config.repeats)]
    rounds[0] += [timer.continuous(arm, config.continuous_prompts) for arm in config.arms]
    batches = {arm.name: timer.batch(arm) for arm in config.arms}
    limits = measure_limits(config, batches[bm_name(config.caps[0])] * config.every)
    return PartResult(
        claims=claims(config, rounds) | floor_claims(config, limits, batches),
        tables=(_table(config, rounds, STATIC), _table(config, rounds, CONTINUOUS)),
        charts=(_chart(config, rounds),),
        raw=_raw(rounds),
    )


def claims(config: SpeedConfig, rounds: Sequence[Round]) -> Numbers:
    """Ratios of Batch-Max at its first cap; tokens per second, batches and peak bytes of all arms.

    Names that begin with `continuous_` are those of continuous batching.
    """
    bm = bm_name(config.caps[0])
    made: Numbers = {
        "bm_over_ed_throughput": ratio(rounds, STATIC, bm, ED),
        "bm_over_fkv_throughput": ratio(rounds, STATIC, bm, FKV),
    }
    for mode, name in dict.fromkeys((t.mode, t.arm) for found in rounds for t in found):
        made |= arm_claims(config, times_of(rounds, mode, name))
    for arm in config.arms[1:]:
        made[f"continuous_{arm.name}_over_fkv"] = ratio(rounds, CONTINUOUS, arm.name, FKV)
    return made


def _table(config: SpeedConfig, rounds: Sequence[Round], mode: str) -> Table:
    words = (
        "All rows of a batch start together and run to their end; batches from the paper's set D."
        if mode == STATIC
        else f"{config.continuous_prompts} requests at once with continuous batching and chunked "
        "prefill; batch is the largest number of running rows, prefill the time until the last "
        "prompt is prefilled."
    )
    rows = []
    for arm in config.arms:
        times = times_of(rounds, mode, arm.name)
        rows.append(
            (
                f"{config.pool} x {config.final_tokens:,} tokens, {arm.label}",
                len(times),
                times[0].batch,
                statistics.median(t.prefill_s for t in times),
                statistics.median(t.decode_s for t in times),
                statistics.median(t.tokens_per_s for t in times),
                ratio(rounds, mode, arm.name, ED),
                ratio(rounds, mode, arm.name, FKV),
                max(t.peak_bytes for t in times) / MIB,
            )
        )
    return Table(
        name=f"batch-max-{mode}",
        caption=(
            f"Prompts of {config.prompt_tokens:,} tokens, {config.new_tokens} new, random-weight "
            f"Llama ({config.model}), {config.dtype}, one KV memory of equal bytes for every arm. "
            f"{words} Medians over rounds, arms in turn; prefill included."
        ),
        columns=(
            *("KV, variant", "rounds", "batch", "prefill s", "decode s", "tokens/s"),
            *("over ED", "over FKV", "peak KV MiB"),
        ),
        rows=tuple(rows),
    )


def _chart(config: SpeedConfig, rounds: Sequence[Round]) -> Chart:
    pool = f"{config.pool} x {config.final_tokens:,}"
    lines = {}
    for arm in config.arms:
        if arm.name in (FKV, ED, bm_name(config.caps[0])):
            times = times_of(rounds, STATIC, arm.name)
            lines[arm.label] = ((pool, statistics.median(t.tokens_per_s for t in times)),)
    return Chart(
        name="batch-max",
        title="Generated tokens/s in equal KV memory, static batches",
        x_label="KV memory, rows x tokens of full KV",
        y_label="tokens/s, prefill included",
        lines=lines,
    )


# ---- part equal_quality --------------------------------------------------------------------------


def run_equal(config: SpeedConfig) -> PartResult:
    """Run the part."""
    timer = _timer(config)
    rounds = [
        [timer.continuous(arm, config.equal_prompts) for arm in config.equal_arms(i)]
        for i in range(config.repeats)
    ]
    return PartResult(
        claims=equal_claims(config, rounds),
        tables=(_equal_table(config, rounds),),
        raw=_raw(rounds),
    )


def equal_claims(config: SpeedConfig, rounds: Sequence[Round]) -> Numbers:
    """Throughput of Batch-Max over that of decode-only eviction of one quality, and of each."""
    bm, equal = bm_name(config.caps[0]), config.equal_arm.name
    made: Numbers = {"bm_over_ed_equal_quality": ratio(rounds, CONTINUOUS, bm, equal)}
    for name in (FKV, ED, bm, equal):
        made |= arm_claims(config, times_of(rounds, CONTINUOUS, name))
    return made


def _equal_table(config: SpeedConfig, rounds: Sequence[Round]) -> Table:
    rows = []
    for arm in config.equal_arms(0):
        times = times_of(rounds, CONTINUOUS, arm.name)
        rows.append(
            (
                arm.label,
                len(times),
                times[0].batch,
                statistics.median(time.prefill_s for time in times),
                statistics.median(time.tokens_per_s for time in times),
                min(time.tokens_per_s for time in times),
                max(time.tokens_per_s for time in times),
                max(time.peak_bytes for time in times) / MIB,
            )
        )
    return Table(
        name="batch-max-equal-quality",
        caption=(
            f"{config.equal_prompts} requests at once, {config.prompt_tokens:,} tokens and "
            f"{config.new_tokens} new, continuous batching in the KV memory of "
            f"{config.pool} x {config.final_tokens:,} tokens, random-weight Llama "
            f"({config.model}), {config.dtype}. Batch: most running rows; prefill: until the last "
            "prompt is prefilled. Decode-only eviction has the cap of equal quality."
        ),
        columns=(
            *("variant", "rounds", "batch", "prefill s"),
            *("tokens/s", "least", "most", "peak KV MiB"),
        ),
        rows=tuple(rows),
    )
