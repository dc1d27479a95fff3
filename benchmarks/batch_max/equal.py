"""Part `equal_quality`: Batch-Max and decode-only eviction at one quality, in the default engine.

Requests are submitted at once; the engine admits each by the moving peak of its prompt. Decode-only
eviction uses Batch-Max's own rule, with the cap at which part `quality` measured the quality of
Batch-Max. The model has random weights.
"""

import statistics
from collections.abc import Sequence

import torch

from benchmarks.batch_max.arms import ED, FKV, bm_name
from benchmarks.batch_max.config import SpeedConfig
from benchmarks.batch_max.speed import arm_claims, ratio, times_of
from benchmarks.batch_max.timed import CONTINUOUS, ArmTime, ArmTimer
from benchmarks.common.models import random_model
from benchmarks.common.result import Numbers, PartResult, Table
from benchmarks.common.workload import SHAPES

MIB = 1 << 20


def run_equal(config: SpeedConfig) -> PartResult:
    """Run the part."""
    model = random_model(SHAPES[config.model](), dtype=getattr(torch, config.dtype))
    timer = ArmTimer(model, config)
    timer.warm_up()
    rounds = [
        [timer.continuous(arm, config.equal_prompts) for arm in config.equal_arms(i)]
        for i in range(config.repeats)
    ]
    return PartResult(
        claims=claims(config, rounds),
        tables=(_table(config, rounds),),
        raw={"rounds": [[time.to_json() for time in found] for found in rounds]},
    )


def claims(config: SpeedConfig, rounds: Sequence[Sequence[ArmTime]]) -> Numbers:
    """Throughput of Batch-Max over that of decode-only eviction of one quality, and of each."""
    bm, equal, pool = bm_name(config.caps[0]), config.equal_arm.name, config.claimed_pool
    made: Numbers = {"bm_over_ed_equal_quality": ratio(rounds, CONTINUOUS, pool, bm, equal)}
    for name in (FKV, ED, bm, equal):
        made |= arm_claims(times_of(rounds, CONTINUOUS, pool, name))
    return made


def _table(config: SpeedConfig, rounds: Sequence[Sequence[ArmTime]]) -> Table:
    rows = []
    for arm in config.equal_arms(0):
        times = times_of(rounds, CONTINUOUS, config.claimed_pool, arm.name)
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
            f"{config.claimed_pool} x {config.final_tokens:,} tokens, random-weight Llama "
            f"({config.model}), {config.dtype}. Batch: most running rows; prefill: until the last "
            "prompt is prefilled. Decode-only eviction has the cap of equal quality."
        ),
        columns=(
            *("variant", "rounds", "batch", "prefill s"),
            *("tokens/s", "least", "most", "peak KV MiB"),
        ),
        rows=tuple(rows),
    )
