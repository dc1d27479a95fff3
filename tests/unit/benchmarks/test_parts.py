"""Measured components of a step on both model implementations: steps, times, bytes."""

from dataclasses import replace

import pytest
import torch

from benchmarks.common.models import SHAPES, random_model
from benchmarks.roofline.cell import QUICK_CELL, CellBench
from benchmarks.roofline.measured import ENGINE, PARTS, SAMPLING, StepMeasure
from benchmarks.roofline.parts import TimedDecoder
from quire.kernels.native.library import NativeLibrary, load_library
from quire.kernels.native.linear import has_products
from quire.models.adapter import TransformersDecoder
from quire.plan.roofline import RowTokens, step_parts

LIBRARY = load_library()
HAS_PRODUCTS = isinstance(LIBRARY, NativeLibrary) and has_products(LIBRARY)
CONFIG = replace(QUICK_CELL, rounds=1)


@pytest.fixture(scope="module", params=["native", "transformers"])
def bench(request: pytest.FixtureRequest) -> CellBench:
    if request.param == "native" and not HAS_PRODUCTS:
        pytest.skip("no C extension with vector instructions")
    return CellBench(replace(CONFIG, implementation=request.param))


@pytest.fixture(scope="module")
def steps(bench: CellBench) -> dict[tuple[str, int], StepMeasure]:
    return {(step.kind, step.rows): step for step in bench.run().steps}


def test_prefill_and_decode_steps_are_measured(steps: dict[tuple[str, int], StepMeasure]):
    """4 prompts of 40 tokens fill a step; of 5 decode steps the last one ends all requests."""
    assert list(steps) == [("prefill", 4), ("decode", 1), ("decode", 4)]
    assert [step.tokens for step in steps.values()] == [160, 1, 4]
    assert [step.steps for step in steps.values()] == [1, 4, 4]


def test_every_component_takes_time(steps: dict[tuple[str, int], StepMeasure]):
    for step in steps.values():
        assert set(step.seconds) == {*PARTS, SAMPLING, ENGINE}
        assert all(taken_s > 0 for taken_s in step.seconds.values()), step
        assert step.over_floor > 1


def test_costs_are_the_bytes_that_are_stored(
    bench: CellBench, steps: dict[tuple[str, int], StepMeasure]
):
    """Packed bfloat16 weights have the bytes of plain ones; a part starts a panel of 64 columns.

    Of 128 joint columns of queries (64), keys (32) and values (32), panels hold 192.
    """
    plain = step_parts(bench._model.spec, [RowTokens(new=40, before=0)] * 4, sampled_rows=4)
    expected = {part.name: part for part in plain}
    found = {part.name: part for part in steps["prefill", 4].costs}

    assert [*found] == [*PARTS]
    for name in ("attention", "mlp", "output projection"):
        assert found[name] == expected[name]
    assert {name: part.flops for name, part in found.items() if part.flops} == {
        name: part.flops for name, part in expected.items() if part.flops
    }
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


def test_timed_decoder_forwards_all_properties():
    model = random_model(SHAPES["tiny"](), dtype=torch.float32)
    assert isinstance(model.decoder, TransformersDecoder)
    timed = TimedDecoder(model.decoder)

    assert (timed.spec, timed.dtype) == (model.decoder.spec, torch.float32)
    assert timed.device == model.decoder.device
    assert (timed.num_rope_variants, timed.rope_variant(10)) == (1, 0)
