"""Hashes of blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.scale.routing.blocks import block_hashes

BLOCK = 4
tokens = st.lists(st.integers(0, 3), max_size=14)


def common(first, second):
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )


@given(first=tokens, second=tokens)
def test_equal_hashes_are_equal_prefixes(first, second):
    hashes = [block_hashes(each, BLOCK) for each in (first, second)]

    assert [len(each) for each in hashes] == [len(first) // BLOCK, len(second) // BLOCK]
    assert common(*hashes) == common(first, second) // BLOCK


def test_salts_separate_tenants():
    assert not set(block_hashes(range(8), BLOCK, salt="a")) & set(block_hashes(range(8), BLOCK))


def test_a_block_has_a_token_or_more():
    with pytest.raises(ConfigError, match="block_tokens of 1 or more, got 0"):
        block_hashes([1], 0)
