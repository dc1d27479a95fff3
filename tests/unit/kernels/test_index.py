"""Attention to the tokens that an index selects equals plain loops, in every backend."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from quire.kernels.backend import AttentionMath, LaneSlots, StepShape, TokenIndex
from quire.kernels.gathered import GatheredAttention
from quire.kernels.latent import LatentHeads, LatentPlan, attend_pages
from quire.kernels.native.backend import NativeAttention
from quire.kernels.native.library import NativeLibrary, load_library
from quire.kernels.reference_backend import ReferenceAttention
from support.coded_lanes import coded_twin
from support.lanes import Lanes

HEADS, NOPE, ROPE, RANK, VALUE_DIM = 4, 12, 8, 32, 16
INDEX_HEADS, INDEX_DIM, TOPK = 8, 16, 12
CPU = torch.device("cpu")
BACKENDS = {"gathered": GatheredAttention(CPU), "reference": ReferenceAttention()}
if isinstance(library := load_library(), NativeLibrary):
    BACKENDS["native"] = NativeAttention(library, GatheredAttention(CPU))
any_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)

TOKENS = [1, 1, 1, 1, 5, 40, 3]
SLOTS = [1, 12, 13, 70, 65, 40, 9]
"""Rows 2 to 5 have more slots than `TOPK`."""
SELECTING = [2, 3, 4, 5]


@dataclass
class Layer:
    """Lanes of latents, and their index keys of each slot by page; None: it has no index."""

    lanes: Lanes
    index: torch.Tensor | None

    @classmethod
    def of(cls, *, seed, evicted, indexed, slots=SLOTS):
        lanes = Lanes(
            tokens=TOKENS,
            slots=[[count] for count in slots],
            heads=1,
            head_dim=ROPE,
            value_dim=RANK,
            page_tokens=16,
            dtype=torch.float32,
            seed=seed,
            evicted=evicted,
        )
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
    generator, count = torch.Generator().manual_seed(1), sum(TOKENS)
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


@any_backend
@pytest.mark.parametrize("evicted", [False, True])
@torch.inference_mode()
def test_selected_tokens_are_attended_to_also_by_layers_without_an_index(backend, evicted):
    """Outputs and sums of two layers; the second has evicted other tokens."""
    first = Layer.of(seed=3, evicted=evicted, indexed=True)
    second = Layer.of(seed=4, evicted=evicted, indexed=False)
    latent, index, sinks = projections(), token_index(), torch.linspace(-1, 1, HEADS)
    query = torch.randn(sum(TOKENS), HEADS, NOPE + ROPE, generator=torch.Generator().manual_seed(9))
    selected = selected_positions(first, index)

    for layer in (first, second):
        out, sums = layer.attend(backend, index, latent, query)
        expected, expected_sums = plain(layer, selected, latent, query, sinks)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        for row, (count, tokens) in enumerate(zip(SLOTS, TOKENS, strict=True)):
            torch.testing.assert_close(
                sums[row, :, :count], expected_sums[row, :, :count], atol=1e-5, rtol=1e-4
            )
            if tokens == 1:  # slots that are not selected have no weight at all
                assert int((sums[row, 0, :count] != 0).sum()) <= TOPK
    assert index.rows.tolist() == SELECTING


@any_backend
@torch.inference_mode()
def test_a_selection_of_all_tokens_is_full_attention(backend):
    layer, latent = Layer.of(seed=3, evicted=True, indexed=True), projections()
    query = torch.randn(sum(TOKENS), HEADS, NOPE + ROPE, generator=torch.Generator().manual_seed(9))
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
    layer, latent = Layer.of(seed=3, evicted=True, indexed=True), projections()
    pages = coded_twin(layer.lanes, codec)  # the plain pages then hold what these decode to
    query = torch.randn(sum(TOKENS), HEADS, NOPE + ROPE, generator=torch.Generator().manual_seed(9))

    coded, coded_sums = layer.attend(backend, token_index(), latent, query, pages)
    expected, sums = layer.attend(BACKENDS["reference"], token_index(), latent, query)

    torch.testing.assert_close(coded, expected, atol=2e-2, rtol=2e-2)
    for row, count in enumerate(SLOTS):
        torch.testing.assert_close(
            coded_sums[row, :, :count], sums[row, :, :count], atol=2e-2, rtol=2e-2
        )


@any_backend
@torch.inference_mode()
def test_one_decode_row_of_one_page_of_selected_slots(backend):
    lanes, latent = Layer.of(seed=3, evicted=False, indexed=True), projections()
    row = StepShape.of(lanes.lanes.tokens[3:4])
    query = torch.randn(1, HEADS, NOPE + ROPE, generator=torch.Generator().manual_seed(9))
    whole = token_index()
    own = {name: getattr(whole, name)[3:4] for name in ("query", "weights", "key")}
    index = replace(whole, **own)
    pages = replace(lanes.pages, rows=lanes.pages.rows[3:4])
    plan = LatentPlan(backend, row, LaneSlots(lanes.lanes.slots[3:4], None), 16, 160)
    math = AttentionMath(0.3, index=index, latent=latent, sinks=torch.linspace(-1, 1, HEADS))
    fresh = tuple(x[3:4] for x in lanes.lanes.fresh())

    alone = attend_pages(backend, plan, pages, math, query, fresh)
    together, _ = lanes.attend(backend, whole, latent, query.expand(sum(TOKENS), -1, -1))

    torch.testing.assert_close(alone[0], together[3], atol=1e-5, rtol=1e-5)
