"""Measured components of a step: the counted steps, and the sum of their times."""

import pytest
import torch

from benchmarks.common.models import llama_tiny, random_model
from benchmarks.common.workload import QUICK_WORKLOAD
from benchmarks.throughput.measured import ENGINE, PARTS, StepMeasure
from benchmarks.throughput.step_parts import TimedDecoder, measure_parts
from quire.models.adapter import TransformersDecoder
from quire.plan.roofline import RowTokens, step_parts


@pytest.fixture(scope="module")
def measures() -> dict[str, StepMeasure]:
    return {m.kind: m for m in measure_parts(QUICK_WORKLOAD, repeats=1)}


def test_prefill_and_decode_steps_are_measured(measures: dict[str, StepMeasure]):
    """4 prompts of 40 tokens fit in one step; the last of the 7 decode steps ends all requests."""
    assert list(measures) == ["prefill", "decode"]
    assert (measures["prefill"].tokens, measures["prefill"].steps) == (160, 1)
    assert (measures["decode"].tokens, measures["decode"].steps) == (4, 6)


def test_every_part_takes_time(measures: dict[str, StepMeasure]):
    for measure in measures.values():
        assert set(measure.seconds) == {*PARTS, ENGINE}
        assert all(taken_s > 0 for taken_s in measure.seconds.values())


def test_costs_match_the_steps_that_ran(measures: dict[str, StepMeasure]):
    """Prefill: 4 rows of 40 new tokens. Decode: 40 to 45 tokens before, 42.5 on average."""
    spec = random_model(llama_tiny(), dtype=torch.bfloat16).spec
    prefill = step_parts(spec, [RowTokens(new=40, before=0)] * 4, sampled_rows=4)
    decode = [
        step_parts(spec, [RowTokens(new=1, before=before)] * 4, sampled_rows=4)
        for before in range(40, 46)
    ]

    assert measures["prefill"].costs == prefill
    for i, cost in enumerate(measures["decode"].costs):
        assert cost.kv_bytes == sum(parts[i].kv_bytes for parts in decode) // 6
        assert cost.weight_bytes == decode[0][i].weight_bytes
        assert cost.flops == sum(parts[i].flops for parts in decode) // 6


def test_timed_decoder_forwards_all_properties():
    model = random_model(llama_tiny(), dtype=torch.float32)
    assert isinstance(model.decoder, TransformersDecoder)
    timed = TimedDecoder(model.decoder)

    assert (timed.spec, timed.dtype) == (model.decoder.spec, torch.float32)
    assert timed.device == model.decoder.device
    assert (timed.num_rope_variants, timed.rope_variant(10)) == (1, 0)
