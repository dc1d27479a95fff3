import json
from dataclasses import asdict, replace

import pytest

from benchmarks.roofline import measured
from benchmarks.roofline.cell import QUICK_CELL, CellBench
from benchmarks.roofline.command import show_claims
from benchmarks.roofline.page import PART_COLUMNS, part_cells, reached, roofline_from, step_rows
from quire.errors import ConfigError
from quire.kernels.native.library import NativeLibrary, load_library
from quire.kernels.native.linear import has_products
from quire.plan.roofline import RowTokens, step_parts
from support.roofline_cells import CELL, MEASURE, RATES, run_object


def test_part_rows_contain_floors_of_their_arithmetic():
    """100 B/s; 4,000 int8 and 1,000 float32 FLOP/s. mlp: 1 s of reading, 4 s of products.

    Attention: 3 s of reading, 1 s of products. Together 400 B take 4 s, and the products of both
    take 4 + 1 = 5 s. Taken: 6 + 3 + 0.5 + 0.5 = 10 s.
    """
    rows = {row.cost.name: row for row in measured.part_rows(MEASURE, RATES)}
    assert list(rows) == ["mlp", "attention", measured.SAMPLING, measured.ENGINE, "total"]
    assert [row.floor_s for row in rows.values()] == [4.0, 3.0, 0.0, 0.0, 5.0]
    assert [row.measured_s for row in rows.values()] == [6.0, 3.0, 0.5, 0.5, 10.0]
    assert [row.share for row in rows.values()] == [0.6, 0.3, 0.05, 0.05, 1.0]
    assert [row.over_floor for row in rows.values()] == [1.5, 1.0, None, None, 2.0]
    assert [row.arithmetic for row in rows.values()] == ["int8", "float32", "", "", ""]


def test_cell_round_trips_through_json():
    assert measured.Cell.from_json(json.loads(json.dumps(asdict(CELL)))) == CELL
    assert CELL.name == "125m avx2 native int8 none"


def step(kind: str, rows: int, over_floor: float):
    return replace(MEASURE, kind=kind, rows=rows, over_floor=over_floor)


STEPS = (step("prefill", 4, 2.0), step("decode", 1, 1.2), step("decode", 16, 1.4))


def test_claims_of_cells_name_what_differs():
    """Products of a step take 5 s at the rates of MEASURE, and the step takes 10 s."""
    cell = replace(CELL, steps=(*STEPS, step("decode", 32, 1.3)))

    found = measured.claims_of([cell])
    noisy = replace(CELL, steps=(step("decode", 1, measured.MIN_RATIO), step("decode", 32, 0.98)))

    assert found.refused == measured.claims_of([noisy]).refused == ()
    assert found.values == {
        "prefill_over_product_rate": 0.5,
        "decode_step_over_floor": 1.3,
        "small_batch_step_over_floor": 1.4,
        "read_bytes_per_s": 100.0,
        "product_flops_per_s_float32": 1_000.0,
        "product_flops_per_s_int8": 4_000.0,
    }

    other = replace(CELL, instruction_set="avx512", weight_codec="int4", steps=STEPS)

    found = measured.claims_of([replace(CELL, steps=STEPS), other]).values

    assert found["small_batch_step_over_floor_avx512_int4"] == 1.4
    assert "decode_step_over_floor" not in found  # no step of 32 rows


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_step_below_its_floor_is_refused_with_the_figures(kind, capsys):
    wrong = replace(CELL, steps=(step(kind, 1, 0.6), step("decode", 32, 1.3)))

    found = measured.claims_of([wrong])
    show_claims(found)

    [refused] = found.refused
    assert refused.claim not in found.values
    assert found.values["decode_step_over_floor"] == 1.3
    printed = capsys.readouterr()
    assert refused.claim not in printed.out
    assert f"{refused.claim}: refused" in printed.err
    for figure in ("0.60 of its floor", "10,000.000 ms", "0.0 MB", "float32", "GFLOP/s"):
        assert figure in printed.err


def test_table_row_matches_hand_computation():
    """1 MB at 1 GB/s is 1 ms, 2 GFLOP at 1 TFLOP/s is 2 ms; measured 10 ms of 90."""
    found = roofline_from(run_object())
    cell = found.cells[1]
    [first, *_] = part_cells(cell.steps[0], cell)

    columns = "part arithmetic MB GFLOP floor_ms measured_ms over_floor share"
    assert [name.replace(" ", "_") for name in PART_COLUMNS] == columns.split()
    assert [*first] == ["qkv", "bfloat16", "1.0", "2.00", "2.00", "10.00", "5.0", "11%"]
    lacking = next(step_rows(found.cells))[1:]
    assert lacking == ("90.0 (6.43)", "90.0 (6.43)", "", "")
    claims = reached(found.claims)  # those of other cells have the same target
    assert ("decode_step_over_floor_avx2_int8", "6.43", "at most 1.5") in claims
    for missing in ("claims", "arms", "config", "hardware", "versions", "commit"):
        with pytest.raises(ConfigError, match="benchmarks roofline --json"):
            roofline_from({key: value for key, value in run_object().items() if key != missing})


LIBRARY = load_library()
HAS_PRODUCTS = isinstance(LIBRARY, NativeLibrary) and has_products(LIBRARY)
CONFIG = replace(QUICK_CELL, rounds=1)


@pytest.fixture(scope="module", params=["native", "transformers"])
def bench(request: pytest.FixtureRequest) -> CellBench:
    if request.param == "native" and not HAS_PRODUCTS:
        pytest.skip("no C extension with vector instructions")
    return CellBench(replace(CONFIG, implementation=request.param))


@pytest.fixture(scope="module")
def steps(bench: CellBench) -> dict[tuple[str, int], measured.StepMeasure]:
    return {(step.kind, step.rows): step for step in bench.run().steps}


def test_steps_and_their_components_are_measured(
    steps: dict[tuple[str, int], measured.StepMeasure],
):
    """4 prompts of 40 tokens fill a step; of 5 decode steps the last one ends all requests."""
    assert list(steps) == [("prefill", 4), ("decode", 1), ("decode", 4)]
    assert [step.tokens for step in steps.values()] == [160, 1, 4]
    assert [step.steps for step in steps.values()] == [1, 4, 4]
    for step in steps.values():
        assert set(step.seconds) == {*measured.PARTS, measured.SAMPLING, measured.ENGINE}
        assert all(taken_s > 0 for taken_s in step.seconds.values()), step
        assert step.over_floor > 1


def test_costs_are_the_bytes_that_are_stored(bench, steps):
    """Packed bfloat16 weights have the bytes of plain ones; a part starts a panel of 64 columns.

    Of 128 joint columns of queries (64), keys (32) and values (32), panels hold 192.
    """
    plain = step_parts(bench._model.spec, [RowTokens(new=40, before=0)] * 4, sampled_rows=4)
    expected = {part.name: part for part in plain}
    found = {part.name: part for part in steps["prefill", 4].costs}

    assert [*found] == [*measured.PARTS]
    for name in ("attention", "mlp", "output projection"):
        assert found[name] == expected[name]
    flops = [{name: p.flops for name, p in of.items() if p.flops} for of in (found, expected)]
    assert flops[0] == flops[1]
    qkv_bytes = 2 * 64 * 2  # layers, inputs, bytes
    assert found["qkv"].weight_bytes in (qkv_bytes * 128, qkv_bytes * 192)
    assert found["head"].weight_bytes in (500 * 64 * 2, 512 * 64 * 2)


@pytest.mark.skipif(not HAS_PRODUCTS, reason="no C extension with vector instructions")
@pytest.mark.parametrize(("codec", "bits"), [("int8", 8), ("int4", 4)])
def test_coded_weights_and_kv_count_their_stored_bytes(codec: str, bits: int):
    bench = CellBench(replace(CONFIG, weight_codec=codec, kv_codec="int8"))
    mlp_weights = 3 * 64 * 128 * 2

    assert bench.storage.arithmetic["mlp"] == "int8"
    assert bench.storage.weight_bytes["mlp"] >= mlp_weights * bits // 8  # and scales
    assert bench.storage.weight_bytes["mlp"] < mlp_weights * bits // 8 * 1.3
    plain_bytes = bench._model.spec.kv_bytes_per_token(2)
    assert 0.5 * plain_bytes < bench.storage.kv_bytes_per_token < 0.8 * plain_bytes
