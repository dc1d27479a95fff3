"""Measured steps and their floors."""

import json
from dataclasses import asdict

import pytest

from benchmarks.throughput.measured import ENGINE, StepMeasure, part_rows
from quire.plan.roofline import PartCost

MEASURE = StepMeasure(
    kind="decode",
    tokens=32.0,
    steps=62,
    costs=(
        PartCost(name="mlp", weight_bytes=100, kv_bytes=0, flops=4_000),
        PartCost(name="attention", weight_bytes=0, kv_bytes=300, flops=1_000),
    ),
    seconds={"mlp": 6.0, "attention": 3.0, ENGINE: 1.0},
)


def test_part_rows_contain_floors():
    """At 100 B/s and 1,000 FLOP/s: mlp 1 s of reading, 4 s of products; attention 3 s, 1 s.

    Together 400 B and 5,000 FLOPs: 5 s. Taken: 6 + 3 + 1 = 10 s.
    """
    rows = {row.cost.name: row for row in part_rows(MEASURE, 100.0, 1_000.0)}

    assert list(rows) == ["mlp", "attention", ENGINE, "total"]
    assert [row.floor_s for row in rows.values()] == [4.0, 3.0, 0.0, 5.0]
    assert [row.measured_s for row in rows.values()] == [6.0, 3.0, 1.0, 10.0]
    assert [row.share for row in rows.values()] == [0.6, 0.3, 0.1, 1.0]
    assert [row.over_floor for row in rows.values()] == [1.5, 1.0, None, 2.0]
    assert rows["mlp"].flops_per_s == pytest.approx(4_000 / 6)


def test_step_measure_round_trips_through_json():
    assert StepMeasure.from_json(json.loads(json.dumps(asdict(MEASURE)))) == MEASURE


@pytest.mark.parametrize("missing", ["costs", "seconds"])
def test_step_measure_without_a_field_raises(missing: str):
    stored = {key: value for key, value in asdict(MEASURE).items() if key != missing}

    with pytest.raises((KeyError, TypeError)):
        StepMeasure.from_json(stored)
