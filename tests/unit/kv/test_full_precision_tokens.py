"""Full-precision windows and sinks, compared with `full_precision_account` token by token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.kernels.gathered import GatheredAttention
from quire.kernels.reference_backend import ReferenceAttention
from support.full_precision_account import CPU, CheckedMemory, play

FORMATS = [
    "int4+residual=5",
    "int4+sinks=3",
    "int8/int4+sinks=2+residual=6",
    "int4_page/int4",
    "int4_page/int8+sinks=1",
    "int2_page+residual=2",
    "int4_page/int4+sinks=2+residual=7",
]


def by_turns(formats: list[str], others: tuple) -> list:
    """Every format with every one of the others; fast with one of them, by turns."""
    return [
        pytest.param(text, other, marks=[] if i % len(others) == j else [pytest.mark.slow])
        for i, text in enumerate(formats)
        for j, other in enumerate(others)
    ]


@pytest.mark.parametrize(("text", "backend"), by_turns(FORMATS, ("gathered", "reference")))
@settings(max_examples=2)
@given(seed=st.integers(0, 10_000))
def test_attention_equals_the_account_for_all_chunk_lengths(text, backend, seed):
    attention = GatheredAttention(CPU) if backend == "gathered" else ReferenceAttention()
    play(CheckedMemory(f"{text}+plain=float32", attention, seed))


@pytest.mark.parametrize("heads_apart", [False, True])
@pytest.mark.parametrize("text", [text for text in FORMATS if "page" not in text])
@settings(max_examples=2)
@given(seed=st.integers(0, 10_000))
def test_attention_equals_the_account_after_token_evictions(text, heads_apart, seed):
    checked = CheckedMemory(
        f"{text}+plain=float32",
        GatheredAttention(CPU),
        seed,
        evicting=True,
        heads_apart=heads_apart,
    )
    play(checked, checked.evict_tokens)


@pytest.mark.parametrize(("text", "heads_apart"), by_turns(FORMATS, (False, True)))
@settings(max_examples=2)
@given(seed=st.integers(0, 10_000))
def test_attention_equals_the_account_after_page_evictions(text, heads_apart, seed):
    checked = CheckedMemory(
        f"{text}+plain=float32",
        GatheredAttention(CPU),
        seed,
        evicting=True,
        heads_apart=heads_apart,
    )
    play(checked, checked.evict_pages)


def test_row_with_a_residual_window_can_be_truncated_to_zero_only():
    """The newest tokens of an earlier length are no longer in full precision."""
    checked = CheckedMemory("int4_page/int4+plain=float32", GatheredAttention(CPU))
    row = checked.start()
    checked.step({row: 7})

    with pytest.raises(ConfigError, match=r"newest 3 tokens .* truncated from 7 to 6"):
        checked.memory.truncate(row, 6)
    checked.memory.truncate(row, 7)
    checked.memory.truncate(row, 0)

    checked.memory.check()
    assert not checked.memory.row_bytes(row)


def test_row_with_full_precision_sinks_can_be_truncated():
    checked = CheckedMemory("int4+sinks=3+plain=float32", GatheredAttention(CPU))
    row = checked.start()
    checked.step({row: 7})

    checked.memory.truncate(row, 5)

    _, lanes = checked.account.rows[row]
    for lane in lanes:
        del lane.pages[1][1:]
    checked.account.rows[row] = (5, lanes)
    checked.step({row: 1})
    checked.step({row: 3})
