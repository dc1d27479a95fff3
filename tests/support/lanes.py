"""One layer's pages with random numbers, everything that is not live poisoned with NaN."""

from contextlib import contextmanager

import numpy as np
import torch

from quire.kernels.backend import LaneSlots, LaneVectors, LayerPages, PageScores, StepShape
from quire.kernels.reference_backend import ReferenceAttention
from quire.kv.step import StepAttention
from quire.layout.sparse import SparseSpec
from quire.policies.view import KVView


class Lanes:
    """Lanes of several rows over scattered pages.

    Args:
        tokens: new tokens of each row, one-token rows first.
        slots: live slots [rows][lanes], new ones included.
        dims: elements of a vector, or of a key and of a value.
        window: slots behind the window of the oldest new token are poisoned too.
        evicted: pages store positions; those of old slots are in any order, with gaps.
    """

    def __init__(
        self,
        tokens,
        slots,
        dims,
        *,
        heads=1,
        page_tokens=16,
        dtype=torch.float32,
        window=None,
        seed=0,
        evicted=False,
    ) -> None:
        rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        self.tokens = np.asarray(tokens, dtype=np.int32)
        self.slots = np.asarray(slots, dtype=np.int32)
        self.window, self.dtype, self.generator = window, dtype, generator
        rows, lanes = self.slots.shape
        columns = -(-int(self.slots.max()) // page_tokens)
        num_pages = rows * lanes * columns + 1  # one is not used
        dims = dims if isinstance(dims, tuple) else (dims, dims)
        arena = torch.full((num_pages, heads * page_tokens * sum(dims)), float("nan"), dtype=dtype)
        sides = arena.split([heads * page_tokens * dim for dim in dims], dim=1)
        key, value = (side.unflatten(1, (heads, page_tokens, -1)) for side in sides)
        table = torch.from_numpy(rng.permutation(num_pages)[:-1].astype(np.int32))
        self.table = table.view(rows, lanes, columns)
        for row, lane in np.ndindex(rows, lanes):
            slot = self._seen(row, lane)
            page = self.table[row, lane][slot // page_tokens].long()
            vectors = torch.randn(len(slot), heads, sum(dims), generator=generator).to(dtype)
            for plane, own in zip((key, value), vectors.split(dims, dim=2), strict=True):
                plane[page, :, slot % page_tokens] = own
            if len(slot):  # pages that no query sees are gone
                self.table[row, lane, : int(slot[0]) // page_tokens] = -1
                self.table[row, lane, int(slot[-1]) // page_tokens + 1 :] = -1
        self.pages = LayerPages(
            key=key,
            value=value,
            table=self.table,
            rows=torch.arange(rows),
            first_lane=0,
            num_lanes=lanes,
            positions=self._positions(rng, num_pages, page_tokens) if evicted else None,
        )

    def _positions(self, rng, num_pages, page_tokens):
        positions = torch.full((num_pages, page_tokens), -1, dtype=torch.int32)
        for row, lane in np.ndindex(*self.slots.shape):
            held, tokens = int(self.slots[row, lane]), int(self.tokens[row])
            old = rng.permutation(2 * held)[: held - tokens]
            slot = torch.arange(held)
            page = self.table[row, lane][slot // page_tokens].long()
            start = 2 * held if len(old) else 0  # the first tokens of a row have no earlier ones
            own = np.concatenate([old, start + np.arange(tokens)])
            positions[page, slot % page_tokens] = torch.from_numpy(own).int()
        return positions

    def _seen(self, row, lane):
        slots, oldest = int(self.slots[row, lane]), int(self.slots[row, lane] - self.tokens[row])
        first = 0 if self.window is None else max(0, oldest + 1 - self.window)
        return torch.arange(first, slots)

    def query(self, group, *, joined=False):
        """Random queries of the flat batch, which are compared with keys or with joined keys."""
        heads = self.pages.num_lanes * self.pages.key.shape[1] * group
        dim = self.pages.key.shape[3] + joined * self.pages.value.shape[3]
        shape = (int(self.tokens.sum()), heads, dim)
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def fresh(self):
        """Keys and values of the flat batch, as computed by the layer."""
        planes = (self.pages.key, self.pages.value)
        rows = range(len(self.tokens))
        return tuple(torch.cat([self._newest(plane, row) for row in rows]) for plane in planes)

    def _newest(self, plane, row):
        heads = []
        for lane in range(self.pages.num_lanes):
            slots, tokens = int(self.slots[row, lane]), int(self.tokens[row])
            slot = torch.arange(slots - tokens, slots)
            page = self.table[row, lane][slot // self.pages.page_tokens].long()
            heads.append(plane[page, :, slot % self.pages.page_tokens])
        return torch.cat(heads, dim=1)

    def attend(self, backend, query, math, *, column_sums=None):
        """Output of a backend for these lanes."""
        step = StepShape.of(self.tokens)
        slot_bytes = self.pages.key[0, :, 0].nbytes * 2
        lanes = LaneSlots(self.slots, self.window)
        plan = backend.plan(step, lanes, self.pages.page_tokens, slot_bytes)
        return backend.attend(plan, self.pages, math, query, self.fresh(), column_sums=column_sums)

    def attend_with_sums(self, backend, query, math):
        """The output, and the column sums [rows, num_heads, slots]."""
        sums = torch.zeros(len(self.tokens), query.shape[1], int(self.slots.max()))
        return self.attend(backend, query, math, column_sums=sums), sums

    def in_codes(self, pages):
        """The same lanes in pages of codes; new keys and values are not read."""
        coded = object.__new__(Lanes)
        coded.__dict__ |= self.__dict__ | {"pages": pages}
        empty = torch.full((int(self.tokens.sum()), 0, 0), torch.nan)
        coded.fresh = lambda: (empty, empty)
        return coded

    def check(
        self, backend, query, math, *, out=(1e-5, 1e-5), sums=(1e-5, 1e-4), scaled=False, pages=None
    ):
        """Compare output and column sums with the reference, and return the output.

        Args:
            out, sums: absolute and relative tolerance; the reference computes in `dtype`.
            scaled: whether the absolute one of the output is a fraction of its largest number.
            pages: pages of codes with what these lanes hold, which the backend reads.
        """
        reference = self.attend_with_sums(ReferenceAttention(), query.to(self.dtype), math)
        lanes = self if pages is None else self.in_codes(pages)
        got, got_sums = lanes.attend_with_sums(backend, query, math)
        expected, expected_sums = reference[0].float(), reference[1]
        unit = float(expected.abs().max()) if scaled else 1.0
        assert got.dtype == query.dtype
        torch.testing.assert_close(got.float(), expected, atol=out[0] * unit, rtol=out[1])
        torch.testing.assert_close(got_sums, expected_sums, atol=sums[0], rtol=sums[1])
        return got


class ScoredLanes:
    """Cached tokens in scattered slots, the queries of a ring, and a view of them.

    Args:
        lanes: `Lanes` of one new token a row; the numbers that the pages hold, or decode to.
        group: query heads of a KV head.
        pages: pages of codes with these numbers; default: those of `lanes`.
    """

    def __init__(self, lanes, ring, group, pages=None, *, seed=0, spread=1.0):
        generator = torch.Generator().manual_seed(seed)
        pages, plain = pages or lanes.pages, lanes.pages
        self.ring, held = ring, torch.from_numpy(lanes.slots).long().reshape(-1)
        slots, heads, dim = int(held.max()), plain.key.shape[1], plain.key.shape[3]
        shape = len(held), slots
        positions, order = torch.full(shape, -1), torch.arange(slots).repeat(shape[0], 1)
        for lane, count in enumerate(held.tolist()):
            order[lane, :count] = torch.randperm(count, generator=generator)
            cached = torch.randperm(2 * slots + 4, generator=generator)[:count]
            positions[lane, :count] = cached.sort().values
        table = plain.table.flatten(0, 1)
        place = order // lanes.pages.page_tokens
        number = table.gather(1, place).long()
        self._keys, self._values = (
            plane[number, :, order % plain.page_tokens]
            .float()
            .masked_fill((positions < 0)[..., None, None], 0.0)
            .transpose(1, 2)
            .flatten(0, 1)
            for plane in (plain.key, plain.value)
        )
        shape = len(held) * heads, ring.window, group * dim + 1
        records = torch.randn(shape, generator=generator).to(lanes.dtype).float() * spread
        newest = positions.amax(dim=1).repeat_interleave(heads)
        stored = newest[:, None] + 2 - torch.arange(ring.window)  # the position after the query's
        records[:, :, -1] = stored.clamp_min(0)
        if ring.window > 2:
            records[0, 1, -1] = 0  # no query
        self._pages = {
            plane: (getattr(pages, plane), pages.coded and getattr(pages.coded, plane))
            for plane in ("key", "value")
        }
        self._table, self._order, self._held = table, order, held
        self.positions, self._lane_positions = positions.repeat_interleave(heads, dim=0), positions
        scales = tuple((torch.rand(len(held), generator=generator) * 0.3 + 0.05).tolist())
        self._view = {"statistics": {ring.name: records}, "head_dim": dim, "group": group}
        self._view |= {"next_position": int(positions.max()) + 1, "heads_per_layer": heads}
        self._view["layer_scales"] = scales

    def keys(self):
        return self._keys

    def values(self):
        return self._values

    def view(self, backend=None):
        """The view of a rule; a backend scores the pages, or the rule reads the keys."""
        scores = {} if backend is None else {p: self._scores(backend, p) for p in self._pages}
        reader = _PagedReader(self, scores) if scores else self
        return KVView(self.positions, slots=reader, **self._view)

    def _scores(self, backend, plane):
        of, coded = self._pages[plane]
        assert backend.can_score(of, coded)
        places = (self._table, self._order, self._lane_positions, self._held)
        return PageScores(backend, LaneVectors(of, coded, *places))


class _PagedReader:
    def __init__(self, lanes, scores):
        self._scores, self.values = scores, lanes.values

    def keys(self):
        raise AssertionError("the keys are scored in the pages")

    def in_pages(self, plane):
        return self._scores[plane]


@contextmanager
def num_threads(count):
    """Let torch and the C library compute in this number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class AllPages(SparseSpec):
    """A rule of sparse attention that selects every page, where others read without selection."""

    def pages_read(self, held):
        return held


def grown_step(kv, tokens, sparse=None):
    """Grow rows, those of one token first: attention of the step, its rows and their tokens.

    The rows of one token have the rule `sparse`.
    """
    order = sorted(tokens, key=lambda row: tokens[row] != 1)
    counts = np.array([tokens[row] for row in order], dtype=np.int32)
    kv.memory.grow(np.array(order, dtype=np.int64), counts)
    rules = [sparse if count == 1 else None for count in counts] if sparse else ()
    step = StepAttention(kv, np.array(order, dtype=np.int64), counts, sparse=rules)
    return step, order, counts
