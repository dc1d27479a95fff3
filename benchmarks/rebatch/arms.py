"""Runs of the arms with equal weights in both models, one clock and one KV memory limit."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.common.models import random_model, random_weights
from benchmarks.common.workload import SHAPES
from benchmarks.rebatch.config import CONTINUOUS, EMBEDDING, SHAPING, RebatchConfig
from benchmarks.rebatch.load import Load
from benchmarks.rebatch.run import RebatchRun, check, run_dense, run_paged
from quire.models.loader import LoadedModel

_CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
_WARMUP_QUERIES = 4


@dataclass(frozen=True, slots=True)
class Models:
    """The same weights in both models.

    Attributes:
        dense: Transformers model with sdpa attention.
        paged: model in Quire's adapter.
    """

    dense: Any
    paged: LoadedModel

    @classmethod
    def of(cls, shape: str) -> "Models":
        """Random weights in float32."""
        config = SHAPES[shape]()
        dense = random_weights(config, dtype=torch.float32)
        return cls(dense, random_model(SHAPES[shape](), dtype=torch.float32))


def run_arm(
    models: Models,
    load: Load,
    arm: str,
    batch: int,
    config: RebatchConfig,
    *,
    memory_bytes: int | None = None,
) -> RebatchRun:
    """Run one arm on the whole load.

    Args:
        models: dense and paged model.
        load: the queries.
        arm: name of the batcher.
        batch: number of rows.
        config: clock, and the limit of vector shaping.
        memory_bytes: KV bytes above which rows are preempted; None: no limit.
    """
    seconds = _CLOCKS[config.clock]
    longest = max(query.prompt_tokens for query in load) + max(query.new_tokens for query in load)
    if arm == CONTINUOUS:
        spec = models.paged.spec
        whole = spec.kv_bytes(longest + 2 * 16, 4) * batch  # 32 tokens for partly filled pages
        run = run_paged(
            models.paged, load, batch, seconds=seconds, memory_bytes=memory_bytes or whole
        )
    else:
        columns = longest * (config.shaping_columns if arm == SHAPING else 1)
        run = run_dense(
            models.dense,
            load,
            arm,
            batch,
            seconds=seconds,
            capacity_tokens=columns,
            scale_at=memory_bytes,
        )
    check(run, load)
    return run


def warm_up(models: Models, load: Load, config: RebatchConfig) -> None:
    """Run a few queries on both models without counting them."""
    few = tuple(load[:_WARMUP_QUERIES])
    for arm in (EMBEDDING, CONTINUOUS):
        run_arm(models, few, arm, 2, config)
