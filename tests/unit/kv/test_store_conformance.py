"""Contract tests of the KV memory: in any order of use, tokens are where the page tables say."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.errors import ConfigError, OutOfPages
from quire.kv.compaction import Kind, commit_compaction, plan_compaction
from quire.kv.repacking import repack
from quire.kv.sharing import fork
from quire.kv.swap import append_tail, can_split, can_swap_in, swap_in, swap_out
from support.stored_tokens import (
    EVICTING,
    FULL,
    MAX_TOKENS,
    STATISTICS,
    WINDOW,
    StoredTokens,
    memory_of,
)

SEEDS = st.integers(0, 2**16)


@pytest.fixture
def stored():
    return StoredTokens(memory_of())


def test_tokens_match_the_tables_during_long_decoding(stored):
    row = stored.start(3)

    for _ in range(MAX_TOKENS // 2):  # windows move on
        stored.grow({row: 1})
        stored.check()


def test_rows_that_grow_together_do_not_overwrite_each_other(stored):
    rows = [stored.start(tokens) for tokens in (1, 7, 20)]

    for count in (1, 9, 1, 1, 13):
        stored.grow(dict.fromkeys(rows, count))
        stored.check()


def test_released_rows_free_all_their_bytes(stored):
    free_bytes = stored.memory.free_bytes
    for row in [stored.start(tokens) for tokens in (30, 5, 60)]:
        stored.grow({row: 11})
        stored.release(row)

    assert stored.memory.free_bytes == free_bytes == stored.memory.total_bytes
    stored.check()


def test_fork_and_parent_grow_separately(stored):
    row = stored.start(21)
    child = fork(stored.memory, row)
    stored.rows[child] = stored.copy(row)

    for _ in range(2 * WINDOW):
        stored.grow({row: 1, child: 1})
        stored.check()
    stored.release(row)
    stored.grow({child: 9})
    stored.check()


def test_fork_without_free_pages_changes_nothing(stored):
    rows = [stored.start(40) for _ in range(stored.memory.num_free_rows - 1)]
    others = np.array(rows[1:])
    counts = np.full(len(others), 4, dtype=np.int32)
    while stored.memory.can_grow(others, counts):
        stored.grow(dict.fromkeys(rows[1:], 4))
    free_bytes = stored.memory.free_bytes

    try:
        child = fork(stored.memory, rows[0])
    except OutOfPages:
        assert stored.memory.free_bytes == free_bytes
    else:
        stored.rows[child] = stored.copy(rows[0])

    stored.check()


def test_swapped_row_is_restored(stored):
    row, other = stored.start(40), stored.start(6)
    content = stored.copy(row)
    swapped = swap_out(stored.memory, [row])
    del stored.rows[row]
    stored.grow({other: 20})

    (row,) = swap_in(stored.memory, swapped)
    stored.rows[row] = content
    stored.check()
    stored.grow({row: 5, other: 5})

    stored.check()


def test_swapped_row_that_does_not_fit_stays_swapped(stored):
    row = stored.start(40)
    content = stored.copy(row)
    swapped = swap_out(stored.memory, [row])
    del stored.rows[row]
    while stored.memory.num_free_rows:
        stored.start(1)

    with pytest.raises(OutOfPages):
        swap_in(stored.memory, swapped)
    stored.check()
    stored.release(next(iter(stored.rows)))
    (row,) = swap_in(stored.memory, swapped)

    stored.rows[row] = content
    stored.check()


def test_swapped_tail_is_appended_to_its_head():
    stored = StoredTokens(memory_of(groups=[FULL]))
    row, head = stored.start(22), 8
    content = stored.copy(row)
    assert can_split(stored.memory, row, head)
    swapped = swap_out(stored.memory, [row], keep_from=head)
    row = stored.memory.start()
    stored.rows = {row: {key: {} for key in content}}
    stored.grow({row: head})

    append_tail(stored.memory, row, swapped)

    for key, lane in content.items():
        stored.rows[row][key] |= {p: c for p, c in lane.items() if p >= head}
    stored.check()


def test_only_row_can_be_repacked_and_grow(stored):
    first, row = stored.start(30), stored.start(17)
    stored.release(first)

    repack(stored.memory, row)
    stored.check()
    stored.grow({row: 30})

    stored.check()


def test_truncated_row_grows_again(stored):
    row = stored.start(WINDOW - 2)

    stored.truncate(row, 5)
    stored.check()
    stored.grow({row: 9})

    stored.check()


def test_evicted_slots_are_reused_for_new_tokens(stored):
    row = stored.start(12)
    for _ in range(4):
        evict(stored, row, seed=3, fraction=0.5)
        stored.check()
        stored.grow({row: 6})
        stored.check()


def test_growth_beyond_the_pool_raises_and_changes_nothing(stored):
    row = stored.start(4)

    with pytest.raises(OutOfPages):
        stored.grow({row: 100_000})

    stored.check()
    stored.grow({row: 4})
    stored.check()


def evict(stored, row, seed, fraction, kind=Kind.FILL_HOLES):
    """Retain about a fraction of each lane of the unordered group."""
    table = stored.memory.tables[EVICTING.name]
    slots = table.num_slots[row]
    keep = np.random.default_rng(seed).random((len(slots), int(slots.max(initial=0)))) < fraction
    if kind is Kind.DROP_PAGES:
        keep = keep[:, np.arange(keep.shape[1]) // EVICTING.page_class.tokens]
    retained = [set(positions(stored, row, lane)[keep[lane, : slots[lane]]]) for lane in (0, 1)]
    plan = plan_compaction(stored.memory, EVICTING.name, row, keep, kind)
    commit_compaction(stored.memory, plan)
    for lane in (0, 1):
        stored.keep(EVICTING.name, row, lane, retained[lane])


def positions(stored, row, lane):
    table = stored.memory.tables[EVICTING.name]
    per_page, slots = EVICTING.page_class.tokens, np.arange(table.num_slots[row, lane])
    places = table.pages[row, lane, slots // per_page], slots % per_page
    return stored.memory.store.read_slots(EVICTING.page_class, places)[2]


class StoreMachine(RuleBasedStateMachine):
    """Random operations on rows: tokens match the tables and every byte is accounted for."""

    @initialize(kib=st.sampled_from([56, 72, 128]))
    def open_memory(self, kib):
        self.stored = StoredTokens(memory_of(total_bytes=kib * 1024))
        self.memory = self.stored.memory
        self.swapped = []

    def pick(self, seed):
        return sorted(self.stored.rows)[seed % len(self.stored.rows)]

    @precondition(lambda self: self.memory.num_free_rows)
    @rule(tokens=st.integers(0, 30), used=st.sets(st.sampled_from(sorted(STATISTICS))))
    def start(self, tokens, used):
        row = self.stored.start(0, used)
        self.grow({row: tokens})

    @precondition(lambda self: self.stored.rows)
    @rule(picks=st.lists(st.tuples(SEEDS, st.integers(0, 13)), min_size=1, max_size=3))
    def prefill(self, picks):
        self.grow({self.pick(seed): tokens for seed, tokens in picks})

    @precondition(lambda self: self.stored.rows)
    @rule(steps=st.integers(1, 5))
    def decode(self, steps):
        for _ in range(steps):
            self.grow(dict.fromkeys(self.stored.rows, 1))

    def grow(self, counts):
        rows = np.array(list(counts))
        fits = self.memory.can_grow(rows, np.array(list(counts.values()), dtype=np.int32))
        try:
            self.stored.grow(counts)
        except OutOfPages:
            assert not fits
        else:
            assert fits

    @precondition(lambda self: self.stored.rows)
    @rule(seed=SEEDS)
    def release(self, seed):
        self.stored.release(self.pick(seed))

    @precondition(lambda self: self.stored.rows)
    @rule(seed=SEEDS, cut=st.integers(0, 40))
    def truncate(self, seed, cut):
        row = self.pick(seed)
        length = max(0, int(self.memory.lengths[row]) - cut)
        # refused if the row needs pages that its windows have freed, or has evicted tokens
        with suppress(ConfigError):
            self.stored.truncate(row, length)

    @precondition(lambda self: self.stored.rows and self.memory.num_free_rows)
    @rule(seed=SEEDS)
    def fork(self, seed):
        row = self.pick(seed)
        try:
            child = fork(self.memory, row)
        except OutOfPages:
            return
        self.stored.rows[child] = self.stored.copy(row)

    @precondition(lambda self: self.stored.rows)
    @rule(seed=SEEDS, fraction=st.sampled_from([0.0, 0.3, 0.7]), kind=st.sampled_from(Kind))
    def evict(self, seed, fraction, kind):
        with suppress(OutOfPages):  # no free pages for copies of shared pages
            evict(self.stored, self.pick(seed), seed, fraction, kind)

    @precondition(lambda self: self.stored.rows)
    @rule(seeds=st.lists(SEEDS, min_size=1, max_size=2))
    def swap_out(self, seeds):
        rows = sorted({self.pick(seed) for seed in seeds})
        contents = [self.stored.rows.pop(row) for row in rows]
        self.swapped.append((swap_out(self.memory, rows), contents))

    @precondition(lambda self: self.swapped)
    @rule(seed=SEEDS)
    def swap_in(self, seed):
        swapped, contents = self.swapped.pop(seed % len(self.swapped))
        fits = can_swap_in(self.memory, swapped)
        try:
            rows = swap_in(self.memory, swapped)
        except OutOfPages:
            assert not fits
            self.swapped.append((swapped, contents))
        else:
            assert fits
            self.stored.rows |= dict(zip(rows, contents, strict=True))

    @precondition(lambda self: len(self.stored.rows) == 1)
    @rule()
    def pack(self):
        repack(self.memory, *self.stored.rows)

    @invariant()
    def check_tokens(self):
        self.stored.check()
        for row in self.stored.rows:
            assert self.memory.peak_bytes[row] >= self.memory.row_bytes(row)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=max(8, settings().max_examples // 8))
