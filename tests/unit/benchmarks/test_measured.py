"""Measured steps and their floors."""

import json
from dataclasses import asdict, replace

import pytest

from benchmarks.roofline.measured import ENGINE, SAMPLING, Cell, part_rows
from benchmarks.roofline.rates import Rates, median_rates
from support.roofline_cells import CELL, MEASURE, RATES


def test_part_rows_contain_floors_of_their_arithmetic():
    """100 B/s; 4,000 int8 and 1,000 float32 FLOP/s. mlp: 1 s of reading, 4 s of products.

    Attention: 3 s of reading, 1 s of products. Together 400 B take 4 s, and the products of both
    take 4 + 1 = 5 s. Taken: 6 + 3 + 0.5 + 0.5 = 10 s.
    """
    rows = {row.cost.name: row for row in part_rows(MEASURE, RATES)}

    assert list(rows) == ["mlp", "attention", SAMPLING, ENGINE, "total"]
    assert [row.floor_s for row in rows.values()] == [4.0, 3.0, 0.0, 0.0, 5.0]
    assert [row.measured_s for row in rows.values()] == [6.0, 3.0, 0.5, 0.5, 10.0]
    assert [row.share for row in rows.values()] == [0.6, 0.3, 0.05, 0.05, 1.0]
    assert [row.over_floor for row in rows.values()] == [1.5, 1.0, None, None, 2.0]
    assert [row.arithmetic for row in rows.values()] == ["int8", "float32", "", "", ""]


def test_a_step_bound_by_reading():
    slow = replace(RATES, read_bytes_per_s=10.0)
    *_, total = part_rows(MEASURE, slow)

    assert total.floor_s == 40.0


def test_cell_round_trips_through_json():
    assert Cell.from_json(json.loads(json.dumps(asdict(CELL)))) == CELL
    assert CELL.name == "125m avx2 native int8 none"


@pytest.mark.parametrize("missing", ["steps", "rates", "model"])
def test_cell_without_a_field_raises(missing: str):
    stored = {key: value for key, value in asdict(CELL).items() if key != missing}

    with pytest.raises((KeyError, TypeError)):
        Cell.from_json(stored)


def test_median_rates():
    found = [
        Rates(read_bytes_per_s=read, flops_per_s={"float32": rate})
        for read, rate in ((1.0, 30.0), (2.0, 10.0), (9.0, 20.0))
    ]

    assert median_rates(found) == Rates(read_bytes_per_s=2.0, flops_per_s={"float32": 20.0})
