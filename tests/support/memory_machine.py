"""A state machine over the KV memory: its bytes always equal those of a dictionary of tokens.

The model of a lane is {position: bytes}. Groups of different page sizes, with and without order,
window and sharing, use one arena that is small enough to run out of pages. Rows have the private
groups that they requested. Some kinds exist only here: an index plane in ragged lanes, and a state.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.errors import ConfigError, InvariantError, OutOfPages
from quire.kv.block_records import BlockRecords, SnapshotRecords
from quire.kv.compaction import Kind, commit_compaction, plan_compaction
from quire.kv.ledger import extents_of, prove_extents
from quire.kv.memory import KVMemory, MemoryListener
from quire.kv.prefix import Block
from quire.kv.repacking import repack
from quire.kv.sharing import (
    CachedReference,
    fork,
    reference_pages,
    reference_statistics,
    release_reference,
    start_from_references,
)
from quire.kv.swap import Swapped, can_swap_in, swap_in, swap_out
from quire.layout.codec_names import codec_spec
from quire.layout.pages import KEY, NUMBERS, VALUE, CacheLayout, LaneGroup, PageClass, PlaneSpec
from support.host_bytes import HostBytes, vector_bytes
from support.small_memory import drop_pages, latent_class

MAX_ROWS = 6
WINDOW, CHUNK = 13, 12
SHARED_TOKENS = 8  # whole pages of every shared group


def page_class(codec, *names, heads, head_dim, **shape):
    planes = (PlaneSpec(name, codec_spec(codec), head_dim, heads) for name in names or (KEY, VALUE))
    return PageClass(planes=tuple(planes), **shape)


BODY = page_class("bfloat16", heads=2, tokens=4, head_dim=2)
INDEX = PlaneSpec("index", codec_spec("int8"), 2)  # a test-only kind: it follows its key
_RAGGED = *(PlaneSpec(name, codec_spec("bfloat16"), 4) for name in (KEY, VALUE)), INDEX
RAGGED = PageClass(planes=_RAGGED, tokens=8, positions=True)
LATENTS = latent_class(tokens=8)
INT8 = page_class("int8", heads=3, tokens=4, head_dim=6)
NARROW = page_class("float16", heads=5, tokens=2, head_dim=7, positions=True)
SUMS = page_class("float32", NUMBERS, heads=2, tokens=3, head_dim=4)
SLOTS = page_class("float32", NUMBERS, heads=1, tokens=8, head_dim=3)
RING = page_class("float32", NUMBERS, heads=1, tokens=2, head_dim=5)
_CONVOLUTION = PlaneSpec("convolution", codec_spec("bfloat16"), 5, 3)
_RECURRENT = PlaneSpec("recurrent", codec_spec("float32"), 7)
STATE = PageClass(planes=(_CONVOLUTION, _RECURRENT), tokens=1)  # test-only: one record per row
LAYOUT = CacheLayout(
    (
        LaneGroup(name="body", page_class=BODY, layers=(0, 3)),
        LaneGroup(name="ragged", page_class=RAGGED, layers=(1,), lanes_per_layer=3, ordered=False),
        LaneGroup(name="int8", page_class=INT8, layers=(2,)),
        LaneGroup(name="indexed", page_class=LATENTS, layers=(8,), topk=3),
        LaneGroup(name="window", page_class=NARROW, layers=(4,), window=WINDOW),
        LaneGroup(name="chunk", page_class=NARROW, layers=(6,), chunk=CHUNK, readers=2),
        LaneGroup(name="sums", page_class=SUMS, layers=(0, 1, 2, 3, 4), private=True),
        LaneGroup(name="more sums", page_class=SUMS, layers=(1,), private=True),
        LaneGroup(name="slot sums", page_class=SLOTS, layers=(1,), lanes_per_layer=3, of="ragged"),
        LaneGroup(name="ring", page_class=RING, layers=(1,), lanes_per_layer=3, records=3),
        LaneGroup(name="state", page_class=STATE, layers=(5, 7), records=1),
    )
)
GROUPS = {group.name: group for group in LAYOUT.groups}
PRIVATE = tuple(name for name, group in GROUPS.items() if group.private)
BLOCK = Block(b"key", bytes(8 * SHARED_TOKENS), SHARED_TOKENS)
KINDS = st.sampled_from(Kind)
SEEDS = st.integers(0, 2**16)  # also picks a row, lane or cached reference, modulo their number


def first_visible(length):
    """The first position that the next query of a row attends to, by lane group."""
    return {"window": length + 1 - WINDOW, "chunk": length // CHUNK * CHUNK}


@dataclass
class Sequence:
    length: int
    lanes: dict[tuple[str, int], dict[int, bytes]]
    statistics: frozenset[str]
    kind: Kind

    def copy(self, *, statistics=None, kind=None):
        lanes = {key: dict(lane) for key, lane in self.lanes.items()}
        used = self.statistics if statistics is None else statistics
        for name in set(PRIVATE) - used:
            lanes |= {key: {} for key in lanes if key[0] == name}
        return Sequence(self.length, lanes, used, kind or self.kind)


def empty_sequence(statistics=frozenset(PRIVATE), kind=Kind.FILL_HOLES):
    lanes = [(g.name, lane) for g in LAYOUT.groups for lane in range(g.num_lanes)]
    return Sequence(0, {key: {} for key in lanes}, statistics, kind)


class Cache(MemoryListener):
    """Forwards `unpublish` to the machine."""

    def __init__(self, unpublish):
        self.unpublish = unpublish


class MemoryMachine(RuleBasedStateMachine):
    moved_groups = frozenset({"ragged", *(group.name for group in LAYOUT.followers_of("ragged"))})

    @initialize(kib=st.sampled_from([24, 40, 96]))
    def open_memory(self, kib):
        self.store = HostBytes(kib * 1024)
        self.memory = KVMemory(LAYOUT, kib * 1024, MAX_ROWS, store=self.store, track_changes=True)
        self.rows: dict[int, Sequence] = {}
        self.cached_references: list[tuple[CachedReference, Sequence]] = []
        self.swapped: list[tuple[Swapped, list[Sequence]]] = []
        self.random = np.random.default_rng(kib)
        self.device_copies = dict.fromkeys(self.memory.tables, (-1, None))
        self.drops_cached = False
        self.memory.listeners.subscribe(Cache(self.unpublish))

    def unpublish(self, page_class, pages):
        """Drop the cached references that hold these pages, or none of them."""
        before = self.memory.pools[page_class].ref_counts[pages]
        remaining = []
        for cached_reference, prefix in self.cached_references:
            if self.drops_cached and np.isin(cached_reference.pages["ragged"], pages).any():
                release_reference(self.memory, cached_reference)
            else:
                remaining.append((cached_reference, prefix))
        self.cached_references = remaining
        return (before > 1) & (self.memory.pools[page_class].ref_counts[pages] == 1)

    @precondition(lambda self: len(self.rows) < MAX_ROWS)
    @rule(tokens=st.integers(0, 30), used=st.sets(st.sampled_from(PRIVATE)), kind=KINDS)
    def start(self, tokens, used, kind):
        row = self.memory.start(used)
        self.add(row, empty_sequence(frozenset(used), kind))
        self.grow({row: tokens})

    @precondition(lambda self: len(self.rows) == MAX_ROWS)
    @rule()
    def start_without_a_free_row(self):
        self.attempt(self.memory.start, possible=False)

    @precondition(lambda self: self.rows)
    @rule(picks=st.lists(st.tuples(SEEDS, st.integers(0, 13)), min_size=1, max_size=4))
    def prefill(self, picks):
        self.grow({self.pick_row(pick): count for pick, count in picks})

    @precondition(lambda self: self.rows)
    @rule()
    def decode(self):
        self.grow(dict.fromkeys(self.rows, 1))

    def grow(self, counts):
        while True:
            left = {row: CHUNK - self.rows[row].length % CHUNK for row in counts}
            if not self.grow_once({row: min(n, left[row]) for row, n in counts.items()}):
                return
            counts = {row: n - left[row] for row, n in counts.items() if n > left[row]}
            if not counts:
                return

    def grow_once(self, counts):
        rows = np.array(list(counts), dtype=np.int64)
        tokens = np.array(list(counts.values()), dtype=np.int32)
        fits = self.memory.can_grow(rows, tokens)
        self.drop_model_behind_windows(rows)
        needed = self.pages_in_bytes(self.memory.pages_to_grow(rows, tokens))
        used = self.bytes_in_use()

        if not self.attempt(lambda: self.memory.grow(rows, tokens) or "grown", fits):
            return False
        assert self.bytes_in_use() - used <= needed
        for row, count in counts.items():
            self.write_new_tokens(row, count)
        return True

    @precondition(lambda self: self.rows)
    @rule(pick=SEEDS)
    def grow_beyond_the_memory(self, pick):
        rows = np.array([self.pick_row(pick)])
        self.memory.drop_behind_windows(rows)
        self.drop_model_behind_windows(rows)
        tokens = np.array([len(self.store.arena)], dtype=np.int32)
        assert not self.memory.can_grow(rows, tokens)
        self.check_refused(lambda: self.memory.grow(rows, tokens), InvariantError)

    @precondition(lambda self: self.rows)
    @rule(picks=st.lists(SEEDS, min_size=1, max_size=2))
    def release(self, picks):
        rows = {self.pick_row(pick) for pick in picks}
        self.memory.release(sorted(rows))
        for row in rows:
            del self.rows[row]

    @precondition(lambda self: self.rows)
    @rule(
        pick=SEEDS,
        seed=SEEDS,
        share=st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0]),
        drops_cached=st.booleans(),
    )
    def evict(self, pick, seed, share, drops_cached):
        row, table = self.pick_row(pick), self.memory.tables["ragged"]
        sequence, slots = self.rows[row], table.num_slots[row].copy()
        random = np.random.default_rng(seed)
        keep = random.random((len(slots), int(slots.max()) + seed % 2)) < share
        if sequence.kind is Kind.DROP_PAGES:
            keep = keep[:, np.arange(keep.shape[1]) // RAGGED.tokens]
        before = self.read("ragged", row)
        self.drops_cached = drops_cached
        plan = plan_compaction(self.memory, "ragged", row, keep, sequence.kind)
        self.check_plan(plan, slots, sequence)
        used = self.bytes_in_use()
        fits = self.memory.fits(plan.needed_pages)
        copied, moved = self.store.copied_pages, self.store.moved_slots

        if self.attempt(lambda: commit_compaction(self.memory, plan) or "evicted", fits):
            assert self.store.copied_pages - copied == plan.needed_pages[RAGGED]
            moved_groups = len(self.moved_groups & {"ragged", *sequence.statistics})
            assert self.store.moved_slots - moved == len(plan.moves) * moved_groups
            assert used - self.bytes_in_use() == plan.gain_bytes
            for lane, tokens in enumerate(before):
                mask = keep[lane, : len(tokens)].tolist()
                retained = {token[0] for token, keeps in zip(tokens, mask, strict=True) if keeps}
                for name in self.moved_groups:
                    held = sequence.lanes[name, lane]
                    sequence.lanes[name, lane] = {p: held[p] for p in held if p in retained}

    def check_plan(self, plan, slots, sequence):
        lanes, freed, needed = plan.moves.lane.tolist(), plan.freed_pages, plan.needed_pages
        targets = set(zip(lanes, plan.moves.target.tolist(), strict=True))
        sources = set(zip(lanes, plan.moves.source.tolist(), strict=True))
        assert len(targets) == len(sources) == len(plan.moves)
        if sequence.kind is Kind.FILL_HOLES:
            assert not targets & sources
            moves = np.bincount(plan.moves.lane, minlength=len(slots))
            assert (moves <= np.minimum(plan.keep_slots, slots - plan.keep_slots)).all()
        if sequence.kind is Kind.DROP_PAGES:
            assert not lanes
            assert not needed[RAGGED]
        assert plan.gain_bytes == self.pages_in_bytes(freed) - self.pages_in_bytes(needed)

    @precondition(lambda self: self.rows)
    @rule(
        pick=SEEDS, name=st.sampled_from(["body", "int8", "indexed", "window", "chunk"]), seed=SEEDS
    )
    def drop_pages(self, pick, name, seed):
        row, table = self.pick_row(pick), self.memory.tables[name]
        lane, per_page = seed % table.group.num_lanes, table.group.page_class.tokens
        tokens = self.rows[row].lanes[name, lane]
        positions = sorted(tokens)
        num_pages = -(-len(positions) // per_page)  # the last one may be partly filled
        columns = np.flatnonzero(np.random.default_rng(seed).random(num_pages) < 0.4)

        drop_pages(self.memory, row, columns, lane=lane, name=name)

        for column in columns.tolist():
            for position in positions[column * per_page : (column + 1) * per_page]:
                del tokens[position]

    @precondition(lambda self: self.rows)
    @rule(pick=SEEDS, back=st.integers(0, 6) | SEEDS)
    def truncate(self, pick, back):
        row = self.pick_row(pick)
        sequence = self.rows[row]
        length = sequence.length - back % (sequence.length + 1)
        if not self.may_truncate(sequence, length):
            self.check_refused(lambda: self.memory.truncate(row, length))
            return
        self.memory.truncate(row, length)
        sequence.length = length
        for (name, _), lane in sequence.lanes.items():
            dropped = [p for p in lane if p >= length]
            if GROUPS[name].records is not None:  # its records have no position
                dropped = [] if length else list(lane)
            for position in dropped:
                del lane[position]

    def may_truncate(self, sequence, length):
        ragged = [lane for (name, _), lane in sequence.lanes.items() if name == "ragged"]
        if any(len(lane) < sequence.length for lane in ragged):
            return False
        for name, first in first_visible(length).items():
            oldest, first = min(sequence.lanes[name, 0], default=length), max(0, first)
            if first < length and oldest > first:
                return False
        return True

    @precondition(lambda self: self.rows)
    @rule(pick=SEEDS)
    def fork(self, pick):
        row = self.pick_row(pick)
        copied = self.store.copied_pages
        pages = dict.fromkeys(LAYOUT.page_classes, 0)
        for table in self.private_tables():
            pages[table.group.page_class] += int(table.num_pages[row].sum())
        private = sum(pages.values())
        fits = len(self.rows) < MAX_ROWS and self.memory.fits(pages)

        child = self.attempt(lambda: fork(self.memory, row), fits)

        if child is not None:
            assert self.store.copied_pages - copied == private
            self.add(child, self.rows[row].copy())

    @precondition(lambda self: self.shareable_rows())
    @rule(pick=SEEDS, pages=SEEDS)
    def reference_pages(self, pick, pages):
        shareable = self.shareable_rows()
        row = shareable[pick % len(shareable)]
        tokens = SHARED_TOKENS * (1 + pages % (self.rows[row].length // SHARED_TOKENS))

        cached_reference = reference_pages(self.memory, row, 0, tokens)

        prefix = empty_sequence()
        prefix.length = tokens
        for key, lane in prefix.lanes.items():
            referenced = {p: token for p, token in self.rows[row].lanes[key].items() if p < tokens}
            lane.update(self.zeros(key[0], tokens) if key[0] in PRIVATE else referenced)
        self.cached_references.append((cached_reference, prefix))

    @staticmethod
    def zeros(name, tokens):
        """Zero statistics of a row that starts with `tokens` cached tokens."""
        group = GROUPS[name]
        slot_bytes = sum(
            plane.heads * sum(vector_bytes(plane.codec, plane.width))
            for plane in group.page_class.planes
        )
        return dict.fromkeys(range(group.slots_of(tokens)), bytes(slot_bytes))

    @precondition(lambda self: self.rows)
    @rule(pick=SEEDS, pages=st.integers(0, 9), odd=st.integers(0, SHARED_TOKENS - 1))
    def reference_pages_that_cannot_be_shared(self, pick, pages, odd):
        row = self.pick_row(pick)
        tokens = SHARED_TOKENS * pages + odd
        beyond = tokens > self.rows[row].length
        if tokens == 0 or odd or beyond or row not in self.shareable_rows():
            self.check_refused(lambda: reference_pages(self.memory, row, 0, tokens))

    def shareable_rows(self):
        """Rows with at least one whole page that hold every token in every shared lane."""
        return [
            row
            for row, sequence in sorted(self.rows.items())
            if sequence.length >= SHARED_TOKENS
            and all(
                len(lane) == sequence.length
                for key, lane in sequence.lanes.items()
                if key[0] not in PRIVATE
            )
        ]

    @precondition(lambda self: self.cached_references)
    @rule(pick=SEEDS, used=st.sets(st.sampled_from(PRIVATE)), kind=KINDS, source=SEEDS)
    def start_from_cached(self, pick, used, kind, source):
        """Start from a cached reference, with the statistics of a complete row of that length."""
        cached_reference, prefix = self.cached_references[pick % len(self.cached_references)]
        ends = [r for r in self.shareable_rows() if self.rows[r].length == cached_reference.end]
        sources = [row for row in ends if self.has_complete_statistics(row)]
        snapshot = None
        if sources and source % 2:
            source_row = sources[source % len(sources)]
            snapshot = reference_statistics(self.memory, source_row)
            if snapshot is not None:
                self.restore_in_place(snapshot)
        pages = dict.fromkeys(LAYOUT.page_classes, 0)
        for group in (self.memory.tables[name].group for name in used):
            lane_pages = group.page_class.pages_for(group.slots_of(cached_reference.end))
            pages[group.page_class] += lane_pages * group.num_lanes
        fits = len(self.rows) < MAX_ROWS and self.memory.fits(pages)

        row = self.attempt(
            lambda: start_from_references(self.memory, [cached_reference], snapshot, used=used),
            fits,
        )

        if row is not None:
            sequence = prefix.copy(statistics=frozenset(used), kind=kind)
            for name in used & snapshot.pages.keys() if snapshot else ():
                held = self.rows[source_row].lanes
                sequence.lanes |= {key: dict(held[key]) for key in held if key[0] == name}
            self.add(row, sequence)
        if snapshot is not None:
            release_reference(self.memory, snapshot)

    def has_complete_statistics(self, row):
        return all(
            len(lane) == self.memory.tables[name].group.slots_of(self.rows[row].length)
            for (name, _), lane in self.rows[row].lanes.items()
            if name in self.rows[row].statistics
        )

    @precondition(lambda self: self.cached_references)
    @rule(pick=SEEDS)
    def release_reference(self, pick):
        cached_reference, _ = self.cached_references.pop(pick % len(self.cached_references))
        release_reference(self.memory, cached_reference)

    @precondition(lambda self: self.cached_references)
    @rule(pick=SEEDS)
    def export_and_restore_cached(self, pick):
        """Replace a cached reference by the pages that its byte records restore."""
        place = pick % len(self.cached_references)
        reference, prefix = self.cached_references[place]
        counts = dict.fromkeys(LAYOUT.page_classes, 0)
        for name, numbers in reference.pages.items():
            counts[GROUPS[name].page_class] += numbers.size
        if not self.memory.fits(counts):
            return
        blocks = [BLOCK] * (reference.end // SHARED_TOKENS)
        stored = BlockRecords(self.memory, SHARED_TOKENS)
        records = self.stored_elsewhere(stored.gather(blocks, reference.pages))
        pages = {}
        for name, numbers in reference.pages.items():
            pool = self.memory.pools[GROUPS[name].page_class]
            pages[name] = pool.allocate(numbers.size).reshape(numbers.shape)
        self.memory.note_peaks(np.empty(0, dtype=np.int64))
        release_reference(self.memory, reference)
        stored.scatter(records, pages)
        restored = replace(reference, key=next(self.memory.cached_reference_keys), pages=pages)
        self.memory.cached_references[restored.key] = pages
        self.cached_references[place] = restored, prefix

    def stored_elsewhere(self, records):
        """The same bytes, from the tier of a machine that has one."""
        return records

    def restore_in_place(self, snapshot):
        records = SnapshotRecords(self.memory, SHARED_TOKENS)
        record = self.stored_elsewhere(records.gather(replace(BLOCK, end=snapshot.end), snapshot))
        for name, numbers in snapshot.pages.items():
            self.store.clear_pages(GROUPS[name].page_class, numbers.reshape(-1))
        records.scatter(record, snapshot.pages)

    @precondition(lambda self: self.rows)
    @rule(pick=SEEDS)
    def rewrite_statistics(self, pick):
        row = self.pick_row(pick)
        for table in self.private_tables():
            for lane in range(table.group.num_lanes):
                self.write(table, row, lane, 0, int(table.num_slots[row, lane]))

    @precondition(lambda self: self.rows)
    @rule(picks=st.lists(SEEDS, min_size=1, max_size=3))
    def swap_out(self, picks):
        rows = sorted({self.pick_row(pick) for pick in picks})
        distinct = sum(self.distinct_pages(c, rows) * c.page_bytes for c in LAYOUT.page_classes)

        swapped = swap_out(self.memory, rows)

        assert swapped.num_bytes == distinct
        self.swapped.append((swapped, [self.rows.pop(row) for row in rows]))

    def distinct_pages(self, page_class, rows):
        tables = [t for t in self.memory.tables.values() if t.group.page_class == page_class]
        named = np.concatenate([table.pages[rows].reshape(-1) for table in tables])
        return len(set(named[named >= 0].tolist()))

    @precondition(lambda self: self.swapped)
    @rule(pick=SEEDS)
    def swap_in(self, pick):
        index = pick % len(self.swapped)
        swapped, sequences = self.swapped[index]
        rows_fit = len(self.rows) + len(sequences) <= MAX_ROWS
        fits = rows_fit and self.memory.fits(swapped.pages)
        used = self.bytes_in_use()
        assert can_swap_in(self.memory, swapped) == fits

        rows = self.attempt(lambda: swap_in(self.memory, swapped), fits)

        if rows is not None:
            assert self.bytes_in_use() - used == swapped.num_bytes
            del self.swapped[index]
            for row, sequence in zip(rows, sequences, strict=True):
                self.add(row, sequence)

    @precondition(lambda self: len(self.rows) == 1 and not self.cached_references)
    @rule()
    def repack_the_only_row(self):
        [row] = self.rows
        used = {c: pool.num_used for c, pool in self.memory.pools.items()}
        slabs = sum(-(-n // self.memory.pools[c].pages_per_slab) for c, n in used.items())
        if slabs <= self.memory.arena.num_slabs:  # as admission ensures
            repack(self.memory, row)
            assert {c: pool.num_used for c, pool in self.memory.pools.items()} == used

    @invariant()
    def check_accounts(self):
        self.memory.check()
        assert self.memory.used_bytes + self.memory.free_bytes == self.memory.total_bytes
        assert self.memory.live_rows.tolist() == sorted(self.rows)
        assert self.memory.arena_peak_bytes >= self.bytes_in_use()
        for table in self.private_tables():
            pages = table.pages[table.pages >= 0]
            assert (self.memory.pools[table.group.page_class].ref_counts[pages] == 1).all()

    @invariant()
    def check_ledger(self):
        prove_extents(self.memory, extents_of(self.memory))

    @invariant()
    def check_slots(self):
        self.store.poison_free(self.memory)
        for row, sequence in self.rows.items():
            assert self.memory.lengths[row] == sequence.length
            assert self.memory.peak_bytes[row] >= self.memory.row_bytes(row)
            assert self.memory.statistics_of(row) == sequence.statistics
            for name, table in self.memory.tables.items():
                for lane, found in enumerate(self.read(name, row)):
                    tokens = sequence.lanes[name, lane]
                    unordered = sequence.kind is Kind.FILL_HOLES and not table.group.ordered
                    assert (sorted(found) if unordered else found) == sorted(tokens.items())
                    pages = table.group.page_class.pages_for(len(tokens))
                    assert table.num_pages[row, lane] == pages

    @invariant()
    def check_tracked_changes(self):
        for name, table in self.memory.tables.items():
            version, device_copy = self.device_copies[name]
            changed = table.drain_changes()
            if version != table.version:
                device_copy = table.pages.copy()
            device_copy.flat[changed] = table.pages.flat[changed]
            assert (device_copy == table.pages).all()
            self.device_copies[name] = (table.version, device_copy)

    def teardown(self):
        self.memory.release(sorted(self.rows))
        for cached_reference, _ in self.cached_references:
            release_reference(self.memory, cached_reference)
        self.memory.check()
        assert self.memory.arena.num_free_slabs == self.memory.arena.num_slabs
        assert self.bytes_in_use() == 0

    def pick_row(self, pick):
        return sorted(self.rows)[pick % len(self.rows)]

    def add(self, row, sequence):
        assert row not in self.rows
        self.rows[row] = sequence

    def private_tables(self):
        return [t for t in self.memory.tables.values() if t.group.private]

    def bytes_in_use(self):
        return sum(pool.used_bytes for pool in self.memory.pools.values())

    def pages_in_bytes(self, pages):
        return sum(count * page_class.page_bytes for page_class, count in pages.items())

    def attempt(self, act, possible):
        """Call `act`; if it is not possible, check that it raises OutOfPages without changes."""
        if possible:
            return act()
        before = self.snapshot()
        with pytest.raises(OutOfPages):
            act()
        assert self.snapshot() == before
        return None

    def check_refused(self, act, error=ConfigError):
        before = self.snapshot()
        with pytest.raises(error):
            act()
        assert self.snapshot() == before

    def snapshot(self):
        memory, found = self.memory, {}
        for name, table in memory.tables.items():
            arrays = (table.pages, table.page_positions, table.num_pages, table.num_slots)
            found[name] = [table.version, *(array.tobytes() for array in arrays)]
        for page_class, pool in memory.pools.items():
            found[page_class] = (pool.ref_counts.tobytes(), pool.held_slabs, pool.free_bytes)
        rows = memory.live_rows
        found["rows"] = (memory.lengths[rows].tolist(), memory.peak_bytes[rows].tolist())
        arena = memory.arena
        found["arena"] = arena.free_slabs, memory.arena_peak_bytes, sorted(memory.cached_references)
        found["bytes"] = self.store.arena.tobytes()
        return found

    def drop_model_behind_windows(self, rows):
        """Drop from the model what the memory dropped; check that no visible token is dropped."""
        per_page = NARROW.tokens
        for row in rows.tolist():
            for name, first in first_visible(self.rows[row].length).items():
                tokens = self.rows[row].lanes[name, 0]
                held = set(self.memory.tables[name].slot_positions(row, 0).tolist())
                dropped = set(tokens) - held
                assert all(position < first for position in dropped)
                assert sum(position < first for position in held) < per_page
                for position in dropped:
                    del tokens[position]

    def write_new_tokens(self, row, count):
        sequence = self.rows[row]
        for name, table in self.memory.tables.items():
            if table.group.private and name not in sequence.statistics:
                continue
            for lane in range(table.group.num_lanes):
                end = int(table.num_slots[row, lane])
                start = end - count
                if table.group.records is not None:  # allocated with the first token
                    start = 0 if count and not sequence.length else end
                if table.group.private:
                    self.check_cleared(table, row, lane, start, end)
                self.write(table, row, lane, start, end)
        sequence.length += count

    def check_cleared(self, table, row, lane, start, end):
        per_page = table.group.page_class.tokens
        slots = np.arange(-(-start // per_page) * per_page, end)
        places = table.pages[row, lane, slots // per_page], slots % per_page
        planes, _ = self.store.read_slots(table.group.page_class, places)
        assert not any(plane.any() for plane in planes)

    def write(self, table, row, lane, start, end):
        """Write new bytes into slots [start, end) of a lane; its pages must be unshared."""
        page_class, slots = table.group.page_class, np.arange(start, end)
        per_page = page_class.tokens
        page, offset = table.pages[row, lane, slots // per_page], slots % per_page
        assert (self.memory.pools[page_class].ref_counts[page] == 1).all()
        widths = ((p.heads, sum(vector_bytes(p.codec, p.width))) for p in page_class.planes)
        shapes = [(len(slots), *width) for width in widths]
        planes = [self.random.integers(0, 256, shape, dtype=np.uint8) for shape in shapes]
        tokens = self.rows[row].lanes[table.group.name, lane]
        length = self.rows[row].length
        positions = np.arange(length, length + len(slots))
        if table.group.follows is not None:
            positions = self.positions(table.group.follows, row, lane)[start:end]
        elif table.group.private:
            positions = slots
        self.store.write_slots(page_class, (page, offset), planes, positions)
        tokens.update(zip(positions.tolist(), rows_of_bytes(planes), strict=True))

    def positions(self, name, row, lane):
        table = self.memory.tables[name]
        per_page, slots = table.group.page_class.tokens, np.arange(table.num_slots[row, lane])
        places = table.pages[row, lane, slots // per_page], slots % per_page
        return self.store.read_slots(table.group.page_class, places)[1]

    def read(self, name, row):
        """For each lane [(position, bytes)], in slot order."""
        table = self.memory.tables[name]
        page_class, num_slots = table.group.page_class, table.num_slots[row]
        lane = np.repeat(np.arange(len(num_slots)), num_slots)
        ends = np.cumsum(num_slots)
        slot = np.arange(len(lane)) - np.repeat(ends - num_slots, num_slots)
        page = table.pages[row, lane, slot // page_class.tokens]
        planes, positions = self.store.read_slots(page_class, (page, slot % page_class.tokens))
        if table.group.records is not None:
            positions = slot
        if table.group.follows is not None:
            lanes = range(len(num_slots))
            followed = table.group.follows
            positions = np.concatenate([self.positions(followed, row, i) for i in lanes])
            positions = positions if num_slots.any() else slot
        if table.group.ordered:
            first = table.page_positions[row, lane, slot // page_class.tokens]
            by_table = first + slot % page_class.tokens
            assert not page_class.positions or (by_table == positions).all()
            positions = by_table
        tokens = list(zip(positions.tolist(), rows_of_bytes(planes), strict=True))
        return [tokens[end - count : end] for end, count in zip(ends, num_slots, strict=True)]


def rows_of_bytes(planes):
    """One `bytes` object per slot."""
    flat = [plane.reshape(len(plane), plane.shape[1] * plane.shape[2]) for plane in planes]
    joined = np.concatenate(flat, axis=1)
    return [row.tobytes() for row in joined]
