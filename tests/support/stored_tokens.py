"""A KV memory next to a dictionary of its tokens, which it must hold byte for byte."""

import numpy as np

from quire.kv.memory import KVMemory
from quire.layout.pages import CacheLayout, LaneGroup
from support.host_bytes import HostBytes
from support.small_memory import plain_class

WINDOW = 10
MAX_TOKENS = 96
FULL = LaneGroup(name="full", page_class=plain_class(), layers=(0, 2))
WINDOWED = LaneGroup(name="window", page_class=plain_class(), layers=(1, 3), window=WINDOW)
EVICTING = LaneGroup(
    name="evicting",
    page_class=plain_class(tokens=2, heads=3, positions=True),
    layers=(4,),
    lanes_per_layer=2,
    ordered=False,
)
SUMS = LaneGroup(
    name="sums", page_class=plain_class(tokens=3, value=False), layers=(0,), private=True
)
SLOT_SUMS = LaneGroup(
    name="slot_sums",
    page_class=plain_class(tokens=2, value=False),
    layers=(4,),
    lanes_per_layer=2,
    mirrors="evicting",
)
RING = LaneGroup(
    name="ring",
    page_class=plain_class(tokens=2, heads=2, value=False),
    layers=(4,),
    lanes_per_layer=2,
    fixed_slots=5,
)
LAYOUT = CacheLayout((FULL, WINDOWED, EVICTING, SUMS, SLOT_SUMS, RING))
STATISTICS = frozenset(group.name for group in LAYOUT.groups if group.private)


def memory_of(*, groups=LAYOUT.groups, total_bytes=256 * 1024, max_rows=5):
    """A KV memory over poisoned bytes."""
    return KVMemory(
        CacheLayout(tuple(groups)),
        total_bytes,
        max_rows,
        store=HostBytes(total_bytes),
        track_changes=True,
    )


class StoredTokens:
    """Drives a KV memory and records the content of each position of each row and lane.

    Attributes:
        rows: row -> {(group, lane): {position: content}}.
    """

    def __init__(self, memory):
        self.memory = memory
        self.rows = {}
        self._contents = 0

    def start(self, tokens, statistics=None):
        row = self.memory.start(statistics)
        self.rows[row] = {
            (name, lane): {}
            for name, table in self.memory.tables.items()
            for lane in range(table.group.num_lanes)
        }
        self.grow({row: tokens})
        return row

    def grow(self, counts):
        """Grow rows and write their tokens; free bytes are poison before and after."""
        rows = np.array(list(counts), dtype=np.int64)
        self.memory.grow(rows, np.array(list(counts.values()), dtype=np.int32))
        self.poison()
        for row, count in counts.items():
            for name, lane in self.rows[row]:
                self._write(name, row, lane, count)

    def _write(self, name, row, lane, count):
        table = self.memory.tables[name]
        page_class, end = table.group.page_class, int(table.num_slots[row, lane])
        if not table.active[row]:
            return
        length = int(self.memory.lengths[row])
        positions = np.arange(length - count, length)
        slots = np.arange(end - count, end)
        if table.group.fixed_slots is not None:  # written again in every step
            slots = positions = np.arange(end)
        places = table.pages[row, lane, slots // page_class.tokens], slots % page_class.tokens
        contents = np.arange(self._contents, self._contents + len(slots))
        self._contents += len(slots)
        vectors = self._vectors(page_class, contents)
        self.memory.store.write_slots(page_class, places, vectors, vectors, positions)
        self.rows[row][name, lane].update(zip(positions.tolist(), contents.tolist(), strict=True))

    @staticmethod
    def _vectors(page_class, contents):
        """Bytes [slots, heads, bytes] that differ between contents."""
        codes = (contents[:, None] * 131 + np.arange(page_class.heads * 16) * 7) % 251
        return codes.reshape(len(contents), page_class.heads, 16).astype(np.uint8)

    def poison(self):
        """Overwrite free pages: no token may be stored in them."""
        self.memory.store.poison_free(self.memory)

    def release(self, row):
        self.memory.release([row])
        del self.rows[row]

    def copy(self, row):
        return {key: dict(lane) for key, lane in self.rows[row].items()}

    def truncate(self, row, length):
        self.memory.truncate(row, length)
        for (name, _), lane in self.rows[row].items():
            fixed = self.memory.tables[name].group.fixed_slots is not None
            for position in [p for p in lane if p >= length and not (fixed and length)]:
                del lane[position]

    def keep(self, name, row, lane, positions):
        """Record that a lane evicted all other positions, with their statistics."""
        mirrors = (group.name for group in self.memory.layout.mirrors_of(name))
        for group_name in (name, *mirrors):
            held = self.rows[row].get((group_name, lane))
            if held:
                self.rows[row][group_name, lane] = {p: held[p] for p in positions}

    def check(self):
        """Check the memory's accounts, and that each token is where the page tables say."""
        self.memory.check()
        self.poison()
        assert set(self.rows) == set(self.memory.live_rows.tolist())
        for row, lanes in self.rows.items():
            for (name, lane), expected in lanes.items():
                self._check_lane(name, row, lane, expected)

    def _check_lane(self, name, row, lane, expected):
        table = self.memory.tables[name]
        page_class, slots = table.group.page_class, np.arange(table.num_slots[row, lane])
        places = table.pages[row, lane, slots // page_class.tokens], slots % page_class.tokens
        key, value, positions = self.memory.store.read_slots(page_class, places)
        if table.group.ordered:
            positions = table.slot_positions(row, lane)
        if table.group.fixed_slots is not None:
            positions = slots
        if table.group.mirrors is not None:
            mirrored = self.memory.tables[table.group.mirrors]
            places = mirrored.pages[row, lane, slots // page_class.tokens], places[1]
            positions = self.memory.store.read_slots(mirrored.group.page_class, places)[2]
        held = positions.tolist()
        contents = np.array([expected[position] for position in held], dtype=np.int64)
        vectors = self._vectors(page_class, contents)

        assert (key == vectors).all(), (name, row, lane)
        assert not page_class.value or (value == vectors).all(), (name, row, lane)
        length = int(self.memory.lengths[row])
        if table.group.window is None:
            assert sorted(held) == sorted(expected)
        else:  # all positions in the window, each once
            first = max(0, length + 1 - table.group.window)
            assert held == list(range(held[0], length)) if held else not length
            assert not held or held[0] <= first
