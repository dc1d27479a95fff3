"""Pairs that gave other outputs, broke an account or were refused before they were mended."""

import pytest

from composition.cell import REFUSED, WORKS, run_cell
from composition.command import chosen

MENDED = (
    "tova + prefixes on disk",  # the attention scale was unknown before the first step
    "snapkv + prefixes in Redis",
    "expected_attention + prefixes on disk",
    "mixed precision + prefixes on disk",  # records of promoted tokens did not begin
    "hybrid + prompt_logprobs",  # scores of a swapped tail were lost
    "hybrid + n=2",
    "hybrid + beam search",
    "rules of requests + batch-invariant",
    "snapkv + CPU attention",
    "squeeze budget + KV recompute",  # the prompt's activations were not kept
)


@pytest.mark.parametrize("pair", MENDED)
def test_mended_pair_works(pair):
    cell = run_cell(chosen(pair.split(" + ")))

    assert cell.result == WORKS, cell.why


def test_offload_that_no_request_uses_is_refused():
    cell = run_cell(chosen(["mixed precision", "KV offload"]))

    assert cell.result == REFUSED, cell.why
    assert "would not be used" in cell.why
