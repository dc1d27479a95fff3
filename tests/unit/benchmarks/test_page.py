"""Tables of the roofline page."""

import pytest

from benchmarks.roofline.page import PART_COLUMNS, part_cells, reached, roofline_from, step_rows
from quire.errors import ConfigError
from support.roofline_cells import run_object


def test_claims_of_other_cells_have_the_same_target():
    rows = reached(roofline_from(run_object()).claims)

    assert ("decode_step_over_floor_avx2_int8", "6.43", "at most 1.5") in rows


def test_table_row_matches_hand_computation():
    """1 MB at 1 GB/s is 1 ms, 2 GFLOP at 1 TFLOP/s is 2 ms; measured 10 ms of 90."""
    cell = roofline_from(run_object()).cells[1]
    [first, *_] = part_cells(cell.steps[0], cell)

    assert dict(zip(PART_COLUMNS, first, strict=True)) == {
        "part": "qkv",
        "arithmetic": "bfloat16",
        "MB": "1.0",
        "GFLOP": "2.00",
        "floor ms": "2.00",
        "measured ms": "10.00",
        "over floor": "5.0",
        "share": "11%",
    }


def test_steps_that_a_cell_lacks_are_empty():
    assert next(step_rows(roofline_from(run_object()).cells))[1:] == (
        *("90.0 (6.43)", "90.0 (6.43)"),
        *("", ""),
    )


@pytest.mark.parametrize("missing", ["claims", "arms", "config", "hardware", "versions", "commit"])
def test_object_without_a_field_raises(missing: str):
    with pytest.raises(ConfigError, match="benchmarks roofline --json"):
        roofline_from({key: value for key, value in run_object().items() if key != missing})
