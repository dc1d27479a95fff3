"""Attention over parts of the keys, merged, equals attention over all keys within 1e-5."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.backend import AttentionMath
from quire.kernels.dense import Partial, attend_dense, attend_partial, merge

BATCH, HEADS, KV_HEADS, QUERIES, HEAD_DIM, VALUE_DIM = 2, 6, 2, 3, 8, 5


def drawn(tokens: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    query = normal(BATCH, HEADS, QUERIES, HEAD_DIM) * 3
    key, value = (normal(BATCH, KV_HEADS, tokens, dim) for dim in (HEAD_DIM, VALUE_DIM))
    seen = torch.rand(BATCH, 1, QUERIES, tokens, generator=generator) < 0.7
    seen[..., 0] = True  # every query attends to a key
    return query, key, value, seen


def parts_of(query, key, value, seen, math, borders):
    edges = [0, *sorted(borders), key.shape[2]]
    return [
        attend_partial(query, key[:, :, a:b], value[:, :, a:b], math=math, seen=seen[..., a:b])
        for a, b in pairwise(edges)
    ]


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1000),
    borders=st.lists(st.integers(0, 40), max_size=4),
    softcap=st.sampled_from([None, 2.0]),
    has_sinks=st.booleans(),
)
def test_merged_parts_equal_full_attention_for_any_split(seed, borders, softcap, has_sinks):
    """Includes empty parts and parts that are fully masked for some query."""
    query, key, value, seen = drawn(40, seed)
    sinks = torch.linspace(-2, 3, HEADS) if has_sinks else None
    math = AttentionMath(0.4, softcap, sinks)
    parts = parts_of(query, key, value, seen, math, borders)

    found = merge(parts, sinks)
    together = merge([merge(parts[:1]), merge(parts[1:])] if parts[1:] else parts, sinks)

    expected = attend_dense(query, key, value, math=math, seen=seen)
    torch.testing.assert_close(found.out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(together.out, expected, atol=1e-5, rtol=1e-5)


def test_fully_masked_query_has_zero_output():
    query, key, value, seen = drawn(5)
    none = torch.zeros_like(seen)
    math = AttentionMath(1.0)

    empty = attend_partial(query, key, value, math=math, seen=none)
    both = merge([empty, attend_partial(query, key, value, math=math, seen=seen)])

    assert (empty.out == 0).all()
    assert (empty.lse == -torch.inf).all()
    assert (merge([empty, empty]).out == 0).all()
    torch.testing.assert_close(
        both.out, attend_dense(query, key, value, math=math, seen=seen), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("shift", [-300.0, 300.0])
def test_large_logits_neither_overflow_nor_underflow(shift):
    """Two parts of one token each, logits that differ by log 3: the weights are 1 to 3."""
    low, high = (
        torch.full((1, 1, 1), shift),
        torch.full((1, 1, 1), shift) + torch.log(torch.tensor(3.0)),
    )
    found = merge(
        [Partial(torch.full((1, 1, 1, 1), 8.0), low), Partial(torch.zeros(1, 1, 1, 1), high)]
    )

    assert float(found.out) == pytest.approx(2.0, rel=1e-4)
    assert float(found.lse) == pytest.approx(shift + 1.3863, abs=1e-3)
