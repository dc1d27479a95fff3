"""Attention over pre-RoPE keys: slots in any order are rotated to their positions."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.kernels.backend import AttentionMath, LaneSlots, StepShape
from quire.kernels.pre_rope import PreRopeAttention
from quire.kernels.reference_backend import attend_reference
from support.lanes import Lanes

CPU = torch.device("cpu")
ROTARY_DIM = 6  # rotated elements of a head; neighbours form a complex number


class ComplexRotary:
    """RoPE in complex arithmetic, unlike the models: neighbouring elements form a number."""

    def rotate_pre_rope(self, key, positions):
        pairs = torch.view_as_complex(key[..., :ROTARY_DIM].float().unflatten(-1, (-1, 2)))
        angle = positions[:, None, None] * torch.tensor([1.0, 0.3, 0.01])
        rotated = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle))
        return torch.cat([rotated.flatten(-2), key[..., ROTARY_DIM:].float()], dim=-1)


def shuffle(lanes: Lanes, seed: int) -> None:
    """Assign positions: old slots in any order with gaps, new slots after them."""
    rng = np.random.default_rng(seed)
    num_pages, _, page_tokens, _ = lanes.pages.key.shape
    positions = torch.from_numpy(rng.integers(-9, 1000, (num_pages, page_tokens)).astype(np.int32))
    for row, lane in np.ndindex(lanes.slots.shape):
        num_slots, new = int(lanes.slots[row, lane]), int(lanes.tokens[row])
        old = rng.permutation(2 * num_slots)[: num_slots - new]
        assigned = np.concatenate([old, 2 * num_slots + np.arange(new)]).astype(np.int32)
        slot = torch.arange(num_slots)
        page = lanes.table[row, lane][slot // page_tokens].long()
        positions[page, slot % page_tokens] = torch.from_numpy(assigned)
    lanes.pages = replace(lanes.pages, positions=positions)


def expected_of(lanes: Lanes, query, math):
    """Expected output and column sums, computed row by row and lane by lane."""
    out = query.new_empty(*query.shape[:2], lanes.pages.value.shape[3])
    sums = torch.zeros(len(lanes.tokens), query.shape[1], int(lanes.slots.max()))
    heads = query.shape[1] // lanes.pages.num_lanes
    start = 0
    for row, tokens in enumerate(lanes.tokens.tolist()):
        for lane in range(lanes.pages.num_lanes):
            part = (slice(start, start + tokens), slice(lane * heads, (lane + 1) * heads))
            out[part], found, slot = one_lane(lanes, query[part], math, row, lane)
            sums[row, part[1], slot] = found
        start += tokens
    return out, sums


def one_lane(lanes: Lanes, query, math, row, lane):
    slot = lanes._seen(row, lane)
    page = lanes.table[row, lane][slot // lanes.pages.page_tokens].long()
    offset = slot % lanes.pages.page_tokens
    if lanes.pages.positions is not None:
        order = lanes.pages.positions[page, offset].argsort()
        slot, page, offset = slot[order], page[order], offset[order]
    key_positions = torch.arange(len(slot))
    query_positions = key_positions[len(slot) - len(query) :]
    heads = slice(lane * query.shape[1], (lane + 1) * query.shape[1])
    attended, sums = attend_reference(
        math.rotary.rotate_pre_rope(query, query_positions),
        math.rotary.rotate_pre_rope(lanes.pages.key[page, :, offset], key_positions),
        lanes.pages.value[page, :, offset],
        math=replace(math, sinks=None if math.sinks is None else math.sinks[heads]),
        query_positions=query_positions,
        key_positions=key_positions,
        window=lanes.window,
    )
    return attended, sums, slot


@st.composite
def steps(draw):
    """Decoding rows and chunks; slots are in order only in lanes with windows."""
    tokens = [1] * draw(st.integers(0, 4)) + draw(st.lists(st.integers(2, 30), max_size=3)) or [1]
    num_lanes = draw(st.sampled_from([1, 2]))
    window = draw(st.sampled_from([None, None, 1, 9]))
    slots = []
    for new in tokens:
        row = [draw(st.integers(0, 60)) + new for _ in range(num_lanes)]
        slots.append(row if window is None else row[:1] * num_lanes)
    lanes = Lanes(
        tokens=tokens,
        slots=slots,
        heads=draw(st.sampled_from([1, 3])),
        head_dim=draw(st.sampled_from([6, 10])),
        value_dim=draw(st.sampled_from([4, 10])),
        page_tokens=draw(st.sampled_from([1, 3, 16])),
        dtype=torch.float32,
        window=window,
        seed=draw(st.integers(0, 1000)),
    )
    if window is None:
        shuffle(lanes, draw(st.integers(0, 1000)))
    return lanes


@given(
    lanes=steps(),
    group=st.sampled_from([1, 2, 3]),
    softcap=st.sampled_from([None, 2.0]),
    with_sinks=st.booleans(),
    scratch_bytes=st.sampled_from([1, 20_000, 1 << 26]),
)
def test_keys_are_rotated_by_their_rank_in_the_lane(
    lanes, group, softcap, with_sinks, scratch_bytes
):
    query = lanes.query(group)
    sinks = torch.linspace(-2, 2, query.shape[1]) if with_sinks else None
    math = AttentionMath(scale=0.4, softcap=softcap, sinks=sinks, rotary=ComplexRotary())
    expected, expected_sums = expected_of(lanes, query, math)
    backend = PreRopeAttention(CPU, scratch_bytes=scratch_bytes)
    got, sums = lanes.attend_with_sums(backend, query, math)

    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    for row, lane in np.ndindex(lanes.slots.shape):
        slot = lanes._seen(row, lane)
        heads = torch.arange(query.shape[1]).view(lanes.pages.num_lanes, -1)[lane]
        torch.testing.assert_close(
            sums[row, heads][:, slot], expected_sums[row, heads][:, slot], atol=1e-5, rtol=1e-4
        )
    assert torch.equal(lanes.attend(backend, query, math), got)  # the same without sums


def test_half_precision_keys_are_rotated_in_float32():
    lanes = Lanes(
        tokens=[1, 20],
        slots=[[300], [128]],
        heads=2,
        head_dim=10,
        page_tokens=16,
        dtype=torch.bfloat16,
    )
    shuffle(lanes, 0)
    query, math = lanes.query(2), AttentionMath(scale=0.4, rotary=ComplexRotary())
    expected, _ = expected_of(lanes, query, math)
    got = lanes.attend(PreRopeAttention(CPU), query, math)

    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, expected, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("tokens", [[1] * 32, [64] * 4])
def test_scratch_memory_is_bounded_over_many_rows(tokens):
    lanes = Lanes(
        tokens=tokens,
        slots=[[200]] * len(tokens),
        heads=2,
        head_dim=8,
        page_tokens=16,
        dtype=torch.float32,
    )
    one_row = 5 * 200 * (2 * 2 * 8 * 4)
    backend = PreRopeAttention(CPU, scratch_bytes=2 * one_row)
    lanes.attend(backend, lanes.query(1), AttentionMath(scale=0.4, rotary=ComplexRotary()))

    assert one_row // 3 < backend.peak_scratch_bytes <= 2 * one_row


def test_rows_alone_equal_rows_in_a_batch():
    lanes = Lanes(
        tokens=[1, 1, 7],
        slots=[[40], [41], [30]],
        heads=2,
        head_dim=8,
        page_tokens=4,
        dtype=torch.float32,
    )
    shuffle(lanes, 3)
    query, math = lanes.query(2), AttentionMath(scale=0.4, rotary=ComplexRotary())
    backend = PreRopeAttention(CPU)
    together = lanes.attend(backend, query, math)
    start = 0
    for row, tokens in enumerate(lanes.tokens.tolist()):
        part = slice(start, start + tokens)
        step = StepShape.of(lanes.tokens[row : row + 1])
        plan = backend.plan(step, LaneSlots(lanes.slots[row : row + 1], None), 4, 128)
        pages = replace(lanes.pages, rows=torch.tensor([row]))
        alone = backend.attend(plan, pages, math, query[part], (query[:0], query[:0]))
        start += tokens

        torch.testing.assert_close(alone, together[part], atol=1e-6, rtol=1e-6)
