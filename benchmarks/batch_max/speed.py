"""Part `speed`: tokens per second of the arms in equal KV bytes, with prefill in the time.

The model has random weights; the part does not measure quality.
"""

import statistics
from collections.abc import Sequence

import torch

from benchmarks.batch_max.arms import ED, FKV, bm_name
from benchmarks.batch_max.config import SpeedConfig
from benchmarks.batch_max.floor import floor_claims, measure_limits
from benchmarks.batch_max.timed import CONTINUOUS, STATIC, ArmTime, ArmTimer, measure
from benchmarks.common.models import random_model
from benchmarks.common.result import Chart, Numbers, PartResult, Table
from benchmarks.common.workload import SHAPES

Round = Sequence[ArmTime]


def run_speed(config: SpeedConfig) -> PartResult:
    """Run the part."""
    model = random_model(SHAPES[config.model](), dtype=getattr(torch, config.dtype))
    timer = ArmTimer(model, config)
    rounds = list(measure(timer, config))
    modes = [STATIC] + [CONTINUOUS] * any(t.mode == CONTINUOUS for t in rounds[0])
    return PartResult(
        claims=claims(config, rounds) | _floor(config, timer),
        tables=tuple(_table(config, rounds, mode) for mode in modes),
        charts=(_chart(config, rounds),),
        raw={"rounds": [[time.to_json() for time in found] for found in rounds]},
    )


def _floor(config: SpeedConfig, timer: ArmTimer) -> Numbers:
    arms = {arm.name: arm for arm in config.arms(config.claimed_pool)}
    batches = {name: timer.batch(arm, config.claimed_pool) for name, arm in arms.items()}
    block_rows = batches[bm_name(config.caps[0])] * config.every
    return floor_claims(config, measure_limits(config, block_rows), batches)


def times_of(rounds: Sequence[Round], mode: str, pool: int, arm: str) -> list[ArmTime]:
    """Times of one arm in one pool, one per round in which it ran."""
    wanted = mode, pool, arm
    return [t for found in rounds for t in found if (t.mode, t.pool, t.arm) == wanted]


def ratio(rounds: Sequence[Round], mode: str, pool: int, arm: str, other: str) -> float:
    """Ratio of two arms' tokens per second: median over rounds with both."""
    pairs = (
        (times_of([found], mode, pool, arm), times_of([found], mode, pool, other))
        for found in rounds
    )
    return statistics.median(a[0].tokens_per_s / b[0].tokens_per_s for a, b in pairs if a and b)


def claims(config: SpeedConfig, rounds: Sequence[Round]) -> Numbers:
    """Ratios of Batch-Max at its first cap; tokens per second, batches and peak bytes of all arms.

    `bm_over_ed_throughput` and `bm_over_fkv_throughput` are those of the claimed pool. Names with
    `_bN` are those of the pool of N rows, names that begin with `continuous_` those of continuous
    batching.

    """
    bm = bm_name(config.caps[0])
    made: Numbers = {}
    for name, other in (("ed", ED), ("fkv", FKV)):
        by_pool = {pool: ratio(rounds, STATIC, pool, bm, other) for pool in config.pools}
        made[f"bm_over_{name}_throughput"] = by_pool[config.claimed_pool]
        made |= {f"bm_over_{name}_throughput_b{pool}": value for pool, value in by_pool.items()}
    for key in dict.fromkeys((t.mode, t.pool, t.arm) for found in rounds for t in found):
        made |= arm_claims(times_of(rounds, *key))
    if any(t.mode == CONTINUOUS for t in rounds[0]):
        for arm in config.arms(config.claimed_pool)[1:]:
            over = ratio(rounds, CONTINUOUS, config.claimed_pool, arm.name, FKV)
            made[f"continuous_{arm.name}_over_fkv"] = over
    return made


def arm_claims(times: Sequence[ArmTime]) -> Numbers:
    """Median tokens per second, batch and peak bytes of an arm."""
    first = times[0]
    prefix = "continuous" if first.mode == CONTINUOUS else f"b{first.pool}"
    name = f"{prefix}_{first.arm}"
    return {
        f"{name}_tokens_per_s": statistics.median(t.tokens_per_s for t in times),
        f"{name}_batch": first.batch,
        f"{name}_peak_bytes": max(t.peak_bytes for t in times),
    }


def _table(config: SpeedConfig, rounds: Sequence[Round], mode: str) -> Table:
    keys = dict.fromkeys((t.pool, t.arm) for found in rounds for t in found if t.mode == mode)
    rows = tuple(_row(config, rounds, mode, pool, arm) for pool, arm in keys)
    static = mode == STATIC
    words = (
        "All rows of a batch start together and run to their end; batches from the paper's set D."
        if static
        else f"{config.continuous_prompts} requests at once with continuous batching and chunked "
        "prefill; batch is the largest number of running rows, prefill the time until the last "
        "prompt is prefilled."
    )
    return Table(
        name=f"batch-max-{mode}",
        caption=(
            f"Prompts of {config.prompt_tokens:,} tokens, {config.new_tokens} new, random-weight "
            f"Llama ({config.model}), {config.dtype}, one KV memory of equal bytes for every arm. "
            f"{words} Medians over rounds, arms in turn; prefill included."
        ),
        columns=(
            "KV, variant",
            "rounds",
            "batch",
            "prefill s",
            "decode s",
            "tokens/s",
            "over ED",
            "over FKV",
            "peak KV MiB",
        ),
        rows=rows,
    )


def _row(
    config: SpeedConfig, rounds: Sequence[Round], mode: str, pool: int, arm: str
) -> tuple[str | int | float, ...]:
    times = times_of(rounds, mode, pool, arm)
    labels = {found.name: found.label for found in config.arms(pool)}
    return (
        f"{pool} x {config.final_tokens:,} tokens, {labels[arm]}",
        len(times),
        times[0].batch,
        statistics.median(t.prefill_s for t in times),
        statistics.median(t.decode_s for t in times),
        statistics.median(t.tokens_per_s for t in times),
        ratio(rounds, mode, pool, arm, ED),
        ratio(rounds, mode, pool, arm, FKV),
        max(t.peak_bytes for t in times) / (1 << 20),
    )


def _chart(config: SpeedConfig, rounds: Sequence[Round]) -> Chart:
    bm = bm_name(config.caps[0])
    shown = [arm for arm in config.arms(config.claimed_pool) if arm.name in (FKV, ED, bm)]
    lines = {
        arm.label: tuple(
            (
                f"{pool} x {config.final_tokens:,}",
                statistics.median(t.tokens_per_s for t in times_of(rounds, STATIC, pool, arm.name)),
            )
            for pool in config.pools
        )
        for arm in shown
    }
    return Chart(
        name="batch-max",
        title="Generated tokens/s in equal KV memory, static batches",
        x_label="KV memory, rows x tokens of full KV",
        y_label="tokens/s, prefill included",
        lines=lines,
    )
