"""Part `ready`: time that enabled eviction adds to a decode step without evicting.

In part `cost` the step times of two equal arms differ by more than this. Here the layers are small,
so that the time added per layer is measurable. It is the same for layers of any size: it records
the position of each slot's token and checks the lengths of lanes.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict

from benchmarks.common.result import Numbers, PartResult, Table
from benchmarks.common.workload import SHAPES
from benchmarks.eviction.cells import FULL
from benchmarks.eviction.config import CostConfig
from benchmarks.eviction.cost import AGAIN, PRESSURE_RECENT, Round, measure_cost

ARMS = (FULL, AGAIN, PRESSURE_RECENT)


def run_ready(config: CostConfig) -> PartResult:
    """Run the part."""
    rounds = measure_cost(config, ARMS)
    num_layers = SHAPES[config.model]().num_hidden_layers
    return PartResult(
        claims=claims(rounds, num_layers),
        tables=(_table(config, rounds, num_layers),),
        raw={"rounds": [{arm: asdict(cost) for arm, cost in r.items()} for r in rounds]},
    )


def claims(rounds: Sequence[Round], num_layers: int) -> Numbers:
    """Medians over rounds of differences within rounds.

    ready_layer_us: microseconds per layer that `recent` under pressure adds to a step.
    ready_equal_layer_us: the same for a second arm of full KV, which adds nothing.
    """
    return {
        "ready_layer_us": 1e6 * _added_s(rounds, PRESSURE_RECENT) / num_layers,
        "ready_equal_layer_us": 1e6 * _added_s(rounds, AGAIN) / num_layers,
    }


def _added_s(rounds: Sequence[Round], arm: str) -> float:
    return statistics.median(r[arm].step_s - r[FULL].step_s for r in rounds)


def _table(config: CostConfig, rounds: Sequence[Round], num_layers: int) -> Table:
    rows = tuple(
        (
            arm,
            1e3 * statistics.median(r[arm].step_s for r in rounds),
            1e6 * _added_s(rounds, arm) / num_layers,
        )
        for arm in ARMS
    )
    return Table(
        name="eviction-ready",
        caption=(
            f"{config.rows} decoding rows of {config.cap} tokens, random-weight Llama "
            f"({config.model}, {num_layers} layers), bfloat16; no token is evicted. Medians of "
            f"{config.repeats} rounds of {config.every} steps, arms in turn step by step."
        ),
        columns=("arm", "step ms", "added us per layer"),
        rows=rows,
    )
