"""Claims of the roofline benchmark; a step below its floor is a fault of the floor."""

from dataclasses import replace

import pytest

from benchmarks.roofline.command import show_claims
from benchmarks.roofline.measured import MIN_RATIO, claims_of
from support.roofline_cells import CELL, MEASURE


def step(kind: str, rows: int, over_floor: float):
    return replace(MEASURE, kind=kind, rows=rows, over_floor=over_floor)


STEPS = (step("prefill", 4, 2.0), step("decode", 1, 1.2), step("decode", 16, 1.4))


def test_claims_of_one_cell():
    """Products of a step take 5 s at the rates of MEASURE, and the step takes 10 s."""
    cell = replace(CELL, steps=(*STEPS, step("decode", 32, 1.3)))

    found = claims_of([cell])

    assert found.refused == ()
    assert found.values == {
        "prefill_over_product_rate": 0.5,
        "decode_step_over_floor": 1.3,
        "small_batch_step_over_floor": 1.4,
        "read_bytes_per_s": 100.0,
        "product_flops_per_s_float32": 1_000.0,
        "product_flops_per_s_int8": 4_000.0,
    }


def test_claims_of_further_cells_name_what_differs():
    other = replace(CELL, instruction_set="avx512", weight_codec="int4", steps=STEPS)

    found = claims_of([replace(CELL, steps=STEPS), other]).values

    assert found["small_batch_step_over_floor_avx512_int4"] == 1.4
    assert "decode_step_over_floor" not in found  # no step of 32 rows


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_step_below_its_floor_is_refused_with_the_figures(kind, capsys):
    wrong = replace(CELL, steps=(step(kind, 1, 0.6), step("decode", 32, 1.3)))

    found = claims_of([wrong])
    show_claims(found)

    [refused] = found.refused
    assert refused.claim not in found.values
    assert found.values["decode_step_over_floor"] == 1.3
    printed = capsys.readouterr()
    assert refused.claim not in printed.out
    assert f"{refused.claim}: refused" in printed.err
    for figure in ("0.60 of its floor", "10,000.000 ms", "0.0 MB", "float32", "GFLOP/s"):
        assert figure in printed.err


def test_noise_below_the_floor_is_no_fault():
    near = replace(CELL, steps=(step("decode", 1, MIN_RATIO), step("decode", 32, 0.98)))

    assert claims_of([near]).refused == ()
