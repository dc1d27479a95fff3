"""A KV memory next to a plain account of its tokens.

The account stores every key and value in full precision, the decoded values, and the pages that
were full when a query was computed. It grows token by token, independent of chunks.
"""

from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np
import torch

from quire.codecs.registry import make_codec
from quire.kernels.backend import AttentionMath
from quire.kernels.reference_backend import attend_reference
from quire.kv.compaction import Kind, commit_compaction, plan_compaction
from quire.kv.lane_reader import LaneReader
from quire.kv.memory import KVMemory
from quire.kv.paged_kv import allocate_kv
from quire.kv.sharing import fork
from quire.kv.swap import swap_in, swap_out
from quire.layout.kv_format import read_format
from quire.layout.layout import layout_for
from support.lanes import grown_step
from support.model_specs import small_spec

CPU = torch.device("cpu")
NUM_HEADS, NUM_KV_HEADS, WINDOW, PAGE = 4, 2, 9, 4
DIMS = HEAD_DIM, VALUE_DIM = 8, 16
MODEL = small_spec(None, WINDOW, None, value_dim=VALUE_DIM)
MATH = AttentionMath(scale=0.5)


@dataclass
class Token:
    """A token of a layer: key and value, decoded ones, and decoded residuals by promoted head."""

    position: int
    exact: tuple[torch.Tensor, torch.Tensor]
    decoded: list[torch.Tensor | None]
    promoted: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


@dataclass
class Lane:
    """The pages of tokens of one layer of a row, in order."""

    pages: list[list[Token]] = field(default_factory=list)


class Account:
    """The keys and values that every query must attend to."""

    def __init__(self, text: str) -> None:
        self.form = read_format(text)
        self.codecs = [*map(make_codec, (self.form.key, self.form.value), DIMS)]
        self.rows: dict[int, tuple[int, list[Lane]]] = {}

    def coded(self, exact) -> list[tuple]:
        """Decoded key and value of each token; None if whole pages are encoded."""
        sides = [
            [None] * len(vectors)
            if codec.spec.per_page
            else codec.decode(codec.encode(vectors[:, :, None]))[:, :, 0]
            for codec, vectors in zip(self.codecs, exact, strict=True)
        ]
        return [*zip(*sides, strict=True)]

    def append(self, row: int, layer: int, position: int, exact, decoded) -> None:
        lane = self.rows[row][1][layer]
        if not lane.pages or len(lane.pages[-1]) == PAGE:
            lane.pages.append([])
        lane.pages[-1].append(Token(position, exact, [*decoded]))
        for side, codec in enumerate(self.codecs):
            if codec.spec.per_page and len(lane.pages[-1]) == PAGE:
                whole = torch.stack([t.exact[side] for t in lane.pages[-1]], dim=1)[None]
                for i, token in enumerate(lane.pages[-1]):
                    token.decoded[side] = codec.decode(codec.encode(whole))[0, :, i]

    def attended(self, row: int, layer: int, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [token, head, head_dim] that the query at `position` attends to."""
        window = MODEL.layers[layer].window or 1 << 30
        pages = self.rows[row][1][layer].pages
        found = [(p, token) for p in pages for token in p if token.position > position - window]
        return tuple(
            torch.stack([self._vector(page, token, position, side) for page, token in found])
            for side in (0, 1)
        )

    def _vector(self, page, token: Token, position: int, side: int) -> torch.Tensor:
        form = self.form
        is_partial = form.per_page and len(page) < PAGE
        newest = token.position > position - form.residual
        if token.position < form.sinks or newest or is_partial:
            return token.exact[side]
        found = token.decoded[side].clone()
        for head, vectors in token.promoted.items():
            found[head] += vectors[side]
        return found

    def promote_token(self, row: int, layer: int, position: int, heads: range) -> None:
        """Add records of a token for some KV heads."""
        records = self.form.promoted
        codecs = [*map(make_codec, (records.key, records.value), DIMS)]
        tokens = [token for page in self.rows[row][1][layer].pages for token in page]
        for token in (token for token in tokens if token.position == position):
            sides = list(zip(codecs, token.exact, token.decoded, strict=True))
            for head in heads:
                token.promoted[head] = tuple(
                    codec.decode(codec.encode((exact - code)[None, head, None]))[0, 0]
                    for codec, exact, code in sides
                )


class CheckedMemory:
    """A KV memory and its account, always in the same state."""

    def __init__(self, text, backend, seed=0, *, evicting=False, heads_apart=False, sparse=None):
        bounds, self.sparse = sparse is not None, sparse
        options = {"evicting": evicting, "heads_apart": heads_apart, "bounds": bounds}
        layout = layout_for(MODEL, codec=text, page_tokens=PAGE, **options)
        total_bytes = layout.smallest_sequence_bytes * 60
        self.kv = allocate_kv(layout, total_bytes, 8, device=CPU, backend=backend)
        self.kv.store.arena.fill_(0xFF)
        self.account = Account(text)
        self.rng = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)

    @property
    def memory(self) -> KVMemory:
        return self.kv.memory

    def start(self) -> int:
        row = self.memory.start()
        self.account.rows[row] = (0, [Lane() for _ in MODEL.layers])
        return row

    def step(self, tokens: dict[int, int]) -> None:
        step, order, counts = grown_step(self.kv, tokens, self.sparse)
        for layer in range(len(MODEL.layers)):
            query, key, value = self.draw(int(counts.sum()))
            got = step.attend(layer, MATH, query, key, value)
            expected = self._expected(order, tokens, layer, (query, key, value))
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        for row in order:
            length, lanes = self.account.rows[row]
            self.account.rows[row] = (length + tokens[row], lanes)

    def draw(self, count: int) -> list[torch.Tensor]:
        """Random queries, keys and values."""
        shapes = (NUM_HEADS, HEAD_DIM), (NUM_KV_HEADS, HEAD_DIM), (NUM_KV_HEADS, VALUE_DIM)
        return [torch.randn(count, *shape, generator=self.generator) for shape in shapes]

    def _expected(self, order, tokens, layer, vectors) -> torch.Tensor:
        query, key, value = vectors
        decoded, out, index = self.account.coded((key, value)), [], 0
        for row in order:
            length, _ = self.account.rows[row]
            for position in range(length, length + tokens[row]):
                exact = key[index], value[index]
                self.account.append(row, layer, position, exact, decoded[index])
                seen_key, seen_value = self.account.attended(row, layer, position)
                places = torch.tensor([len(seen_key)]), torch.arange(len(seen_key))
                named = {"query_positions": places[0], "key_positions": places[1], "math": MATH}
                out.append(attend_reference(query[index][None], seen_key, seen_value, **named)[0])
                index += 1
        return torch.cat(out)

    def evict_tokens(self, row: int) -> None:
        """Evict tokens of the full layers, the same in all heads of a layer."""
        table = self.memory.tables["full"]
        positions = LaneReader(self.kv, "full", row).positions
        evicted = {p for p in positions[0].tolist() if p >= 0 and self.rng.random() < 0.3}
        stored = self._stored_positions(table, row)
        keep = ~np.isin(stored, list(evicted))
        commit_compaction(self.memory, plan_compaction(self.memory, "full", row, keep))
        for layer in (0, 2):
            lane = self.account.rows[row][1][layer]
            lane.pages = [[t for t in page if t.position not in evicted] for page in lane.pages]
            flat = [token for page in lane.pages for token in page]
            lane.pages = [flat[i : i + PAGE] for i in range(0, len(flat), PAGE)]

    def _stored_positions(self, table, row: int) -> np.ndarray:
        views = self.kv.store.views(table.group.page_class)
        width = -(-int(table.num_slots[row].max()) // PAGE)
        pages = torch.from_numpy(np.maximum(table.pages[row, :, :width], 0)).long()
        return views.positions[pages].flatten(1).numpy()

    def evict_pages(self, row: int) -> None:
        table = self.memory.tables["full"]
        columns = int(table.num_pages[row].max())
        retained = self.rng.random(columns) < 0.6
        retained[self.rng.integers(columns)] = True
        keep = np.repeat(retained, PAGE)[None].repeat(table.group.num_lanes, axis=0)
        plan = plan_compaction(self.memory, "full", row, keep, Kind.DROP_PAGES)
        commit_compaction(self.memory, plan)
        for layer in (0, 2):
            lane = self.account.rows[row][1][layer]
            lane.pages = [
                page for page, is_retained in zip(lane.pages, retained, strict=True) if is_retained
            ]

    def fork(self, row: int) -> int:
        child = fork(self.memory, row)
        self.account.rows[child] = deepcopy(self.account.rows[row])
        return child

    def swap(self, row: int) -> int:
        swapped = swap_out(self.memory, [row])
        if not self.memory.used_bytes:
            self.kv.store.arena.fill_(0xFF)
        [back] = swap_in(self.memory, swapped)
        self.account.rows[back] = self.account.rows.pop(row)
        return back

    def compare(self, row: int) -> None:
        """Check that a lane reader returns what the newest token attends to."""
        length, lanes = self.account.rows[row]
        if not length or not lanes[0].pages:
            return
        reader = LaneReader(self.kv, "full", row)
        for layer, of_layer in enumerate(zip(*[reader.keys().unflatten(0, (2, -1))], strict=True)):
            expected, _ = self.account.attended(row, (0, 2)[layer], length - 1)
            order = np.argsort([t.position for p in lanes[(0, 2)[layer]].pages for t in p])
            assert torch.equal(of_layer[0][:, : len(order)], expected[order].transpose(0, 1))


def play(checked: CheckedMemory, evict=None, rounds: int = 5) -> None:
    """Run steps of all sizes with evictions, swaps and forks between them."""
    rows, rng = [checked.start() for _ in range(2)], checked.rng
    for _ in range(rounds):
        chosen = [row for row in rows if rng.random() < 0.8] or rows
        checked.step({row: int(rng.choice([1, 1, 1, 2, 3, 6, 13])) for row in chosen})
        if evict is not None and checked.account.rows[rows[0]][0]:
            evict(rows[0])
        at = int(rng.integers(len(rows)))
        if checked.account.rows[rows[at]][0]:
            rows[at] = checked.swap(rows[at])
            if len(rows) < 5:
                rows.append(checked.fork(rows[at]))
        for row in rows:
            checked.compare(row)
        checked.memory.check()
