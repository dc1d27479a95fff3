"""Times of the arms in one KV memory: in the paper's static batches, and in continuous batching."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.batch_max.arms import EvictionArm
from benchmarks.batch_max.batches import batch_sizes, largest_of, rows_that_fit
from benchmarks.batch_max.config import SpeedConfig
from benchmarks.batch_max.running import Finished, generate_all
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.engine.core import Engine
from quire.errors import ConfigError
from quire.layout.config import dtype_bytes
from quire.models.loader import LoadedModel
from quire.profile.ceilings import random_prompt
from quire.profile.step_rates import static_schedule
from quire.scheduler.schedule_config import ScheduleConfig

STATIC, CONTINUOUS = "static", "continuous"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmTime:
    """Measurements of one arm in one round.

    Attributes:
        mode: STATIC or CONTINUOUS.
        arm: name of the arm.
        pool: KV memory, in rows of full KV.
        kv_bytes: bytes of that memory.
        peak_bytes: peak bytes in use.
        batch: rows that start together; with continuous batching, most running rows.
        prefill_s, decode_s: time until the last prompt is prefilled, and time after that.
        tokens_per_s: generated tokens per second, with prefill in the time.
        preemptions: number of preempted rows.
    """

    mode: str
    arm: str
    pool: int
    kv_bytes: int
    peak_bytes: int
    batch: int
    prefill_s: float
    decode_s: float
    tokens_per_s: float
    preemptions: int

    @property
    def total_s(self) -> float:
        """Time from the first prompt to the last token."""
        return self.prefill_s + self.decode_s

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values, with `total_s`."""
        return asdict(self) | {"total_s": self.total_s}


class ArmTimer:
    """Runs arms on random weights, each in a new KV memory of equal bytes.

    Args:
        model: model with random weights.
        config: lengths, caps and pools.
    """

    def __init__(self, model: LoadedModel, config: SpeedConfig) -> None:
        self._model, self._config = model, config
        self._batches: dict[tuple[int, str], int] = {}

    def pool_bytes(self, pool: int) -> int:
        """KV bytes of the given number of rows of full KV."""
        number_bytes = dtype_bytes(self._config.dtype)
        return pool * self._config.final_tokens * self._model.spec.kv_bytes_per_token(number_bytes)

    def warm_up(self) -> None:
        """Run every arm once on short rows, so that no measured run is the first."""
        pool, config = self._config.claimed_pool, self._config
        tokens = max(config.prompt_tokens // 8, 1)
        for arm in config.arms(pool):
            engine = self._engine(arm, pool, static_schedule(2, tokens))
            generate_all(engine, self._prompts(2, tokens), 4)

    def static(self, arm: EvictionArm, pool: int) -> ArmTime:
        """Run one batch, as large as the paper's set and the pool allow.

        Pages of several sizes can fragment the pool. If a row of the batch is preempted, the next
        smaller batch replaces it, in this and all later rounds.
        """
        batch = self.batch(arm, pool)
        engine = self._engine(arm, pool, static_schedule(batch, self._config.prompt_tokens))
        prompts = self._prompts(batch, self._config.prompt_tokens)
        done = generate_all(engine, prompts, self._config.new_tokens)
        if done.preemptions and batch > 1:
            self._batches[pool, arm.name] = largest_of(batch_sizes(), batch - 1)
            return self.static(arm, pool)
        return self._time(STATIC, arm, pool, engine, done)

    def continuous(self, arm: EvictionArm, num_prompts: int) -> ArmTime:
        """Run many requests at once with continuous batching and chunked prefill."""
        pool = self._config.claimed_pool
        engine = self._engine(arm, pool, ScheduleConfig(low_watermark=1.0))
        prompts = self._prompts(num_prompts, self._config.prompt_tokens)
        done = generate_all(engine, prompts, self._config.new_tokens)
        return self._time(CONTINUOUS, arm, pool, engine, done)

    def batch(self, arm: EvictionArm, pool: int) -> int:
        """Number of rows of a static batch.

        Raises:
            ConfigError: the pool cannot hold one row.
        """
        key = pool, arm.name
        if key not in self._batches:
            config = self._config
            kv = self._kv(arm, pool)
            rows = rows_that_fit(self._model, kv, config.prompt_tokens, config.new_tokens)
            self._batches[key] = largest_of(batch_sizes(), rows)
            if not self._batches[key]:
                raise ConfigError(
                    f"expected {self.pool_bytes(pool):,} B of KV memory to hold a row of arm "
                    f"{arm.name}; use a larger pool"
                )
        return self._batches[key]

    def _kv(self, arm: EvictionArm, pool: int) -> KVConfig:
        return KVConfig(
            memory=self.pool_bytes(pool),
            evict=arm.evict,
            prefix_cache=PrefixCacheConfig(enabled=False),
        )

    def _engine(self, arm: EvictionArm, pool: int, schedule: ScheduleConfig) -> Engine:
        return Engine(self._model, self._kv(arm, pool), schedule)

    def _prompts(self, rows: int, tokens: int) -> list[list[int]]:
        return [random_prompt(self._model, tokens, row) for row in range(rows)]

    def _time(
        self, mode: str, arm: EvictionArm, pool: int, engine: Engine, done: Finished
    ) -> ArmTime:
        engine.check()
        stats = engine.stats()
        return ArmTime(
            mode=mode,
            arm=arm.name,
            pool=pool,
            kv_bytes=stats.kv_total_bytes,
            peak_bytes=stats.kv_peak_bytes,
            batch=done.rows_peak,
            prefill_s=done.prefill_s,
            decode_s=done.decode_s,
            tokens_per_s=done.tokens_per_s,
            preemptions=done.preemptions,
        )


def measure(timer: ArmTimer, config: SpeedConfig) -> Iterator[list[ArmTime]]:
    """Yield rounds: all arms in all pools and continuous batching; later only claimed arms."""
    timer.warm_up()
    for i in range(config.repeats):
        found = [
            timer.static(arm, pool)
            for pool in config.pools
            for arm in config.arms_of_round(i, pool)
        ]
        if config.continuous_prompts and i < config.other_repeats:
            arms = config.arms(config.claimed_pool)
            found += [timer.continuous(arm, config.continuous_prompts) for arm in arms]
        yield found
