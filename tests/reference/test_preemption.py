"""Preemption, prefix hits and other batches move answers by the rounding of products, and only so.

Products that round alike in batches of every shape (`use_exact_products`) leave nothing that may
move, for codecs and rules of every kind. `docs/determinism.md` states how far answers move with the
products that engines use. The fuzz compares the bytes of every swapped sequence.
"""

import itertools
from collections.abc import Iterator

import pytest

from benchmarks.differences import (
    CAUSES,
    PREFIX_HIT,
    RECOMPUTE,
    SWAP,
    DifferencesConfig,
    differences_of,
)
from support.engines import load
from support.exact_products import use_exact_products

KIVI4 = "int4_page/int4"  # its groups of 32 are wider than these heads
CODECS = ("none", "int8", "fp8/int4", "int4_hadamard", KIVI4, "int2_page/int2+sinks=2+residual=12")
RULES = (*DifferencesConfig().rules, "expected_attention:cap=96,every=16")
CONFIG = DifferencesConfig(
    requests=8, max_prompt_tokens=260, max_new_tokens=14, attention="gathered", seeds=(3,)
)
ROUNDING = 1e-5
"""Of log-probabilities; nothing was found above 2e-6."""

PLAIN_BOUND = {"none": 1e-4, "int8": 1e-2, KIVI4: 0.1}
"""Largest differences that docs/determinism.md states, of log-probabilities by codec."""


def cells() -> Iterator[object]:
    """Every codec with every rule; three of four cells of a rule with a cap are slow."""
    for (i, codec), (j, rule) in itertools.product(enumerate(CODECS), enumerate(RULES)):
        marks = [pytest.mark.slow] * (j > 0 and (i + j) % 4 > 0)
        yield pytest.param(codec, rule, marks=marks, id=f"{codec}-{rule.partition(':')[0]}")


@pytest.mark.parametrize(("codec", "rule"), list(cells()))
def test_nothing_moves_with_products_that_round_alike(codec, rule, monkeypatch):
    use_exact_products(monkeypatch)
    found = differences_of(CONFIG, load("llama"), codec, rule)
    assert {cause: one.outputs for cause, one in found.items()} == dict.fromkeys(CAUSES, 0)
    assert max(one.logprob for one in found.values()) <= ROUNDING
    assert min(found[cause].events for cause in (SWAP, RECOMPUTE, PREFIX_HIT)) > 0


@pytest.mark.parametrize("codec", PLAIN_BOUND)
def test_other_products_move_answers_within_the_stated_bounds(codec):
    found = differences_of(CONFIG, load("llama"), codec, "full")
    assert max(one.logprob for one in found.values()) <= PLAIN_BOUND[codec]
