"""Forms of attention: in parts, to the tokens that an index selects, over pre-RoPE keys."""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from quire.kernels.backend import AttentionMath, LaneSlots, StepShape, TokenIndex
from quire.kernels.dense import Partial, attend_dense, attend_partial, merge
from quire.kernels.gathered import GatheredAttention
from quire.kernels.latent import LatentHeads, LatentPlan, attend_pages
from quire.kernels.native.backend import NativeAttention
from quire.kernels.native.library import NativeLibrary, load_library
from quire.kernels.pre_rope import PreRopeAttention
from quire.kernels.reference_backend import ReferenceAttention, attend_reference
from support.coded_lanes import coded_twin
from support.lanes import Lanes

BATCH, QUERY_HEADS, KV_HEADS, QUERIES, KEY_DIM, OWN_VALUE_DIM = 2, 6, 2, 3, 8, 5


def drawn_parts(tokens: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    query = normal(BATCH, QUERY_HEADS, QUERIES, KEY_DIM) * 3
    key, value = (normal(BATCH, KV_HEADS, tokens, dim) for dim in (KEY_DIM, OWN_VALUE_DIM))
    seen = torch.rand(BATCH, 1, QUERIES, tokens, generator=generator) < 0.7
    seen[..., 0] = True  # every query attends to a key
    return query, key, value, seen


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1000),
    borders=st.lists(st.integers(0, 40), max_size=4),
    softcap=st.sampled_from([None, 2.0]),
    has_sinks=st.booleans(),
)
def test_merged_parts_equal_full_attention_for_any_split(seed, borders, softcap, has_sinks):
    """Includes empty parts and parts that are fully masked for some query."""
    query, key, value, seen = drawn_parts(40, seed)
    sinks = torch.linspace(-2, 3, QUERY_HEADS) if has_sinks else None
    math = AttentionMath(0.4, softcap, sinks)
    parts = [
        attend_partial(query, key[:, :, a:b], value[:, :, a:b], math=math, seen=seen[..., a:b])
        for a, b in pairwise([0, *sorted(borders), 40])
    ]

    found = merge(parts, sinks)
    together = merge([merge(parts[:1]), merge(parts[1:])] if parts[1:] else parts, sinks)

    expected = attend_dense(query, key, value, math=math, seen=seen)
    torch.testing.assert_close(found.out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(together.out, expected, atol=1e-5, rtol=1e-5)


def test_fully_masked_query_has_zero_output():
    query, key, value, seen = drawn_parts(5)
    math = AttentionMath(1.0)
    empty = attend_partial(query, key, value, math=math, seen=torch.zeros_like(seen))
    both = merge([empty, attend_partial(query, key, value, math=math, seen=seen)])

    assert (empty.out == 0).all()
    assert (empty.lse == -torch.inf).all()
    assert (merge([empty, empty]).out == 0).all()
    expected = attend_dense(query, key, value, math=math, seen=seen)
    torch.testing.assert_close(both.out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shift", [-300.0, 300.0])
def test_large_logits_neither_overflow_nor_underflow(shift):
    """Two parts of one token each, logits that differ by log 3: the weights are 1 to 3."""
    low = torch.full((1, 1, 1), shift)
    values, high = torch.tensor([8.0, 0.0]).view(2, 1, 1, 1, 1), low + torch.tensor(3.0).log()
    found = merge([Partial(values[0], low), Partial(values[1], high)])

    assert float(found.out) == pytest.approx(2.0, rel=1e-4)
    assert float(found.lse) == pytest.approx(shift + 1.3863, abs=1e-3)


HEADS, NOPE, ROPE, RANK, VALUE_DIM = 4, 12, 8, 32, 16
INDEX_HEADS, INDEX_DIM, TOPK = 8, 16, 12
CPU = torch.device("cpu")
BACKENDS = {"gathered": GatheredAttention(CPU), "reference": ReferenceAttention()}
if isinstance(library := load_library(), NativeLibrary):
    BACKENDS["native"] = NativeAttention(library, GatheredAttention(CPU))
any_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)

TOKENS = [1, 1, 1, 1, 5, 40, 3]
NUM_TOKENS = sum(TOKENS)
SLOTS = [1, 12, 13, 70, 65, 40, 9]
"""Rows 2 to 5 have more slots than `TOPK`."""
SELECTING = [2, 3, 4, 5]


@dataclass
class Layer:
    """Lanes of latents, and their index keys of each slot by page; None: it has no index."""

    lanes: Lanes
    index: torch.Tensor | None

    @classmethod
    def of(cls, *, seed=3, evicted=True, indexed=True):
        slots = [[count] for count in SLOTS]
        lanes = Lanes(TOKENS, slots, (ROPE, RANK), seed=seed, evicted=evicted)
        planes, generator = lanes.pages.key, torch.Generator().manual_seed(seed)
        index = torch.randn(len(planes), 1, 16, INDEX_DIM, generator=generator)
        index[planes[:, 0, :, 0].isnan()[:, None]] = float("nan")
        return cls(lanes, index if indexed else None)

    @property
    def pages(self):
        return replace(self.lanes.pages, index=self.index)

    def attend(self, backend, index, latent, query, pages=None):
        math = AttentionMath(0.3, index=index, latent=latent, sinks=torch.linspace(-1, 1, HEADS))
        step = StepShape.of(self.lanes.tokens)
        plan = LatentPlan(backend, step, LaneSlots(self.lanes.slots, None), 16, 4 * (ROPE + RANK))
        sums = torch.zeros(len(TOKENS), HEADS, int(self.lanes.slots.max()))
        pages = self.pages if pages is None else replace(pages, index=self.index)
        out = attend_pages(backend, plan, pages, math, query, self.lanes.fresh(), column_sums=sums)
        return out, sums

    def row(self, row):
        """Positions and vectors of a row's live slots: keys, values and index keys."""
        slot = torch.arange(int(self.lanes.slots[row, 0]))
        at = self.lanes.table[row, 0][slot // 16].long(), slot % 16
        positions = self.lanes.pages.positions
        planes = (self.lanes.pages.key, self.lanes.pages.value, self.index)
        vectors = (None if plane is None else plane[at[0], 0, at[1]] for plane in planes)
        return slot if positions is None else positions[at].long(), *vectors


def any_query(tokens=NUM_TOKENS):
    generator = torch.Generator().manual_seed(9)
    return torch.randn(tokens, HEADS, NOPE + ROPE, generator=generator)


def projections(seed=0):
    """Latent projections of heads with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        linear = nn.Linear(RANK, HEADS * (NOPE + VALUE_DIM), bias=False)

    def expand(latents, rotated):
        both = linear(latents).unflatten(-1, (HEADS, -1)).squeeze(1).transpose(1, 2)
        keys, values = both.split([NOPE, VALUE_DIM], dim=-1)
        return torch.cat([keys, rotated.expand(-1, HEADS, -1, -1)], dim=-1), values

    return LatentHeads(lambda: linear.weight, HEADS, NOPE, expand)


def token_index(topk=TOPK):
    generator, count = torch.Generator().manual_seed(1), NUM_TOKENS
    made = (torch.randn(s, generator=generator) for s in ((INDEX_HEADS, INDEX_DIM), (INDEX_HEADS,)))
    query, weights = (torch.randn(count, *x.shape, generator=generator) for x in made)
    return TokenIndex(query, weights, torch.zeros(count, INDEX_DIM), INDEX_DIM**-0.5, topk)


def selected_positions(layer, index):
    """By token of the batch, the positions that it selects; None in rows of few slots: all."""
    found, token = [], 0
    for row, count in enumerate(TOKENS):
        positions, _, _, keys = layer.row(row)
        for new in range(count):
            held = len(positions) - count + new + 1
            products = (index.query[token] @ keys[:held].T * index.scale).relu()
            scores = (index.weights[token][:, None] * products).sum(dim=0)
            top = scores.topk(min(index.topk, held)).indices
            found.append(set(positions[top].tolist()) if row in SELECTING else None)
            token += 1
    return found


def plain(layer, selected, latent, query, sinks):
    """Attention of each token in a loop, and the sums of weights."""
    outs, sums, token = [], torch.zeros(len(TOKENS), HEADS, int(layer.lanes.slots.max())), 0
    for row, count in enumerate(TOKENS):
        positions, rotated, latents, _ = layer.row(row)
        keys, values = (x[0] for x in latent.expand(rotated[None, None], latents[None, None]))
        for new in range(count):
            own = len(positions) - count + new
            wanted = selected[token]
            slots = [s for s in range(own + 1) if wanted is None or int(positions[s]) in wanted]
            slots = slots or [own]
            logits = torch.einsum("hd,hsd->hs", query[token], keys[:, slots]) * 0.3
            weights = torch.cat([logits, sinks[:, None]], dim=1).softmax(dim=1)[:, :-1]
            outs.append(torch.einsum("hs,hsd->hd", weights, values[:, slots]))
            sums[row][:, slots] += weights
            token += 1
    return torch.stack(outs), sums


def assert_sums(found, expected, atol, rtol):
    """Compare the sums of live slots."""
    for row, count in enumerate(SLOTS):
        own = found[row, :, :count], expected[row, :, :count]
        torch.testing.assert_close(*own, atol=atol, rtol=rtol)


@any_backend
@pytest.mark.parametrize("evicted", [False, True])
@torch.inference_mode()
def test_selected_tokens_are_attended_to_also_by_layers_without_an_index(backend, evicted):
    """Outputs and sums of two layers; the second has evicted other tokens."""
    first = Layer.of(evicted=evicted)
    second = Layer.of(seed=4, evicted=evicted, indexed=False)
    latent, index, sinks = projections(), token_index(), torch.linspace(-1, 1, HEADS)
    query = any_query()
    selected = selected_positions(first, index)

    for layer in (first, second):
        out, sums = layer.attend(backend, index, latent, query)
        expected, expected_sums = plain(layer, selected, latent, query, sinks)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        assert_sums(sums, expected_sums, 1e-5, 1e-4)
        for row, (count, tokens) in enumerate(zip(SLOTS, TOKENS, strict=True)):
            if tokens == 1:  # slots that are not selected have no weight at all
                assert int((sums[row, 0, :count] != 0).sum()) <= TOPK
    assert index.rows.tolist() == SELECTING


@any_backend
@torch.inference_mode()
def test_a_selection_of_all_tokens_is_full_attention(backend):
    layer, latent = Layer.of(), projections()
    query = any_query()
    every, few = token_index(max(SLOTS)), token_index()

    full, _ = layer.attend(backend, None, latent, query)
    torch.testing.assert_close(layer.attend(backend, every, latent, query)[0], full)
    restricted, _ = layer.attend(backend, few, latent, query)

    changed = (restricted - full).abs().amax(dim=(1, 2)) > 1e-3
    starts = StepShape.of(layer.lanes.tokens).starts
    by_row = [changed[start : start + n].any() for start, n in zip(starts, TOKENS, strict=True)]
    assert [row for row, any_changed in enumerate(by_row) if any_changed] == SELECTING


@pytest.mark.parametrize("codec", ["int8", "float32/int4"])
@any_backend
@torch.inference_mode()
def test_selected_codes_are_decoded(backend, codec):
    """Of decode rows single slots; of chunks whole pages."""
    layer, latent = Layer.of(), projections()
    pages = coded_twin(layer.lanes, codec)  # the plain pages then hold what these decode to
    query = any_query()

    coded, coded_sums = layer.attend(backend, token_index(), latent, query, pages)
    expected, sums = layer.attend(BACKENDS["reference"], token_index(), latent, query)

    torch.testing.assert_close(coded, expected, atol=2e-2, rtol=2e-2)
    assert_sums(coded_sums, sums, 2e-2, 2e-2)


@any_backend
@torch.inference_mode()
def test_one_decode_row_of_one_page_of_selected_slots(backend):
    lanes, latent = Layer.of(evicted=False), projections()
    row = StepShape.of(lanes.lanes.tokens[3:4])
    query = any_query(1)
    whole = token_index()
    index = replace(whole, **{x: getattr(whole, x)[3:4] for x in ("query", "weights", "key")})
    pages = replace(lanes.pages, rows=lanes.pages.rows[3:4])
    plan = LatentPlan(backend, row, LaneSlots(lanes.lanes.slots[3:4], None), 16, 160)
    math = AttentionMath(0.3, index=index, latent=latent, sinks=torch.linspace(-1, 1, HEADS))
    fresh = tuple(x[3:4] for x in lanes.lanes.fresh())

    alone = attend_pages(backend, plan, pages, math, query, fresh)
    together, _ = lanes.attend(backend, whole, latent, query.expand(NUM_TOKENS, -1, -1))

    torch.testing.assert_close(alone[0], together[3], atol=1e-5, rtol=1e-5)


ROTARY_DIM = 6  # rotated elements of a head; neighbours form a complex number


class ComplexRotary:
    """RoPE in complex arithmetic, unlike the models: neighbouring elements form a number."""

    def rotate_pre_rope(self, key, positions):
        pairs = torch.view_as_complex(key[..., :ROTARY_DIM].float().unflatten(-1, (-1, 2)))
        angle = positions[:, None, None] * torch.tensor([1.0, 0.3, 0.01])
        rotated = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle))
        return torch.cat([rotated.flatten(-2), key[..., ROTARY_DIM:].float()], dim=-1)


PRE_ROPE = AttentionMath(scale=0.4, rotary=ComplexRotary())


def shuffle(lanes, seed):
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


def expected_of(lanes, query, math):
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


def one_lane(lanes, query, math, row, lane):
    slot = lanes._seen(row, lane)
    page = lanes.table[row, lane][slot // lanes.pages.page_tokens].long()
    offset = slot % lanes.pages.page_tokens
    if lanes.pages.positions is not None:
        order = lanes.pages.positions[page, offset].argsort()
        slot, page, offset = slot[order], page[order], offset[order]
    key_positions = torch.arange(len(slot))
    query_positions = key_positions[len(slot) - len(query) :]
    heads = slice(lane * query.shape[1], (lane + 1) * query.shape[1])
    math = replace(math, sinks=None if math.sinks is None else math.sinks[heads])
    query = math.rotary.rotate_pre_rope(query, query_positions)
    key = math.rotary.rotate_pre_rope(lanes.pages.key[page, :, offset], key_positions)
    places = {"query_positions": query_positions, "key_positions": key_positions}
    value, places["window"] = lanes.pages.value[page, :, offset], lanes.window
    return *attend_reference(query, key, value, math=math, **places), slot


@st.composite
def pre_rope_steps(draw):
    """Decoding rows and chunks; slots are in order only in lanes with windows."""
    tokens = [1] * draw(st.integers(0, 4)) + draw(st.lists(st.integers(2, 30), max_size=3)) or [1]
    num_lanes = draw(st.sampled_from([1, 2]))
    window = draw(st.sampled_from([None, None, 1, 9]))
    slots = []
    for new in tokens:
        row = [draw(st.integers(0, 60)) + new for _ in range(num_lanes)]
        slots.append(row if window is None else row[:1] * num_lanes)
    dims = draw(st.sampled_from([6, 10])), draw(st.sampled_from([4, 10]))
    shape = {
        "heads": draw(st.sampled_from([1, 3])),
        "page_tokens": draw(st.sampled_from([1, 3, 16])),
    }
    lanes = Lanes(tokens, slots, dims, **shape, window=window, seed=draw(st.integers(0, 1000)))
    if window is None:
        shuffle(lanes, draw(st.integers(0, 1000)))
    return lanes


@given(
    lanes=pre_rope_steps(),
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
    math = replace(PRE_ROPE, softcap=softcap, sinks=sinks)
    expected, expected_sums = expected_of(lanes, query, math)
    backend = PreRopeAttention(CPU, scratch_bytes=scratch_bytes)
    got, sums = lanes.attend_with_sums(backend, query, math)

    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    for row, lane in np.ndindex(lanes.slots.shape):
        slot = lanes._seen(row, lane)
        heads = torch.arange(query.shape[1]).view(lanes.pages.num_lanes, -1)[lane]
        own = (one[row, heads][:, slot] for one in (sums, expected_sums))
        torch.testing.assert_close(*own, atol=1e-5, rtol=1e-4)
    assert torch.equal(lanes.attend(backend, query, math), got)  # the same without sums


def test_half_precision_keys_are_rotated_in_float32():
    lanes = Lanes([1, 20], [[300], [128]], 10, heads=2, dtype=torch.bfloat16)
    shuffle(lanes, 0)
    query = lanes.query(2)
    expected, _ = expected_of(lanes, query, PRE_ROPE)
    got = lanes.attend(PreRopeAttention(CPU), query, PRE_ROPE)

    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, expected, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("tokens", [[1] * 32, [64] * 4])
def test_scratch_memory_is_bounded_over_many_rows(tokens):
    lanes = Lanes(tokens, [[200]] * len(tokens), 8, heads=2)
    one_row = 5 * 200 * (2 * 2 * 8 * 4)
    backend = PreRopeAttention(CPU, scratch_bytes=2 * one_row)
    lanes.attend(backend, lanes.query(1), PRE_ROPE)

    assert one_row // 3 < backend.peak_scratch_bytes <= 2 * one_row


def test_rows_alone_equal_rows_in_a_batch():
    lanes = Lanes([1, 1, 7], [[40], [41], [30]], 8, heads=2, page_tokens=4)
    shuffle(lanes, 3)
    query = lanes.query(2)
    backend = PreRopeAttention(CPU)
    together, start = lanes.attend(backend, query, PRE_ROPE), 0
    for row, tokens in enumerate(lanes.tokens.tolist()):
        part = slice(start, start + tokens)
        step = StepShape.of(lanes.tokens[row : row + 1])
        plan = backend.plan(step, LaneSlots(lanes.slots[row : row + 1], None), 4, 128)
        pages = replace(lanes.pages, rows=torch.tensor([row]))
        alone = backend.attend(plan, pages, PRE_ROPE, query[part], (query[:0], query[:0]))
        start += tokens

        torch.testing.assert_close(alone, together[part], atol=1e-6, rtol=1e-6)
