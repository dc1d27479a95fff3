"""Three kinds of compaction over all groups of a row, with the statistics of its slots."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError, InvariantError, OutOfPages
from quire.kv.compaction import Kind, commit_compaction, plan_compaction
from quire.kv.memory import MemoryListener
from quire.kv.sharing import fork, reference_pages, release_reference
from quire.layout.pages import LaneGroup
from support.small_memory import grow, keys, mask, plain_class, started, with_groups
from support.statistics_rows import KV, NAMES, RING, SUMS
from support.statistics_rows import started as row_of

MORE = LaneGroup(name="more", page_class=plain_class(positions=True), layers=(2,), ordered=False)


def memory_of(*groups, **options):
    return with_groups(*(groups or (KV, SUMS, RING)), **options)


def compact(memory, row, text, kind):
    keep = np.repeat(mask(text), 2, axis=0)
    plan = plan_compaction(memory, "kv", row, keep, kind)
    commit_compaction(memory, plan)
    memory.check()
    return plan


def test_statistics_groups_cannot_be_compacted_separately():
    memory = memory_of()
    row = row_of(memory, 12)

    for name in NAMES:
        with pytest.raises(ConfigError, match="holds statistics"):
            plan_compaction(memory, name, row, np.ones((2, 12), dtype=bool))


def test_only_written_shared_pages_need_copies():
    memory = memory_of()
    row = row_of(memory, 12)
    child = fork(memory, row)
    texts = {
        Kind.FILL_HOLES: ("ooooxoooxxxo", 1),
        Kind.KEEP_ORDER: ("ooooxooooooo", 2),
        Kind.DROP_PAGES: ("ooooxxxxoooo", 0),
    }

    for kind, (text, pages) in texts.items():
        plan = plan_compaction(memory, "kv", row, np.repeat(mask(text), 2, axis=0), kind)
        assert plan.needed_pages == {KV.page_class: 2 * pages}
    copied = memory.store.copied_pages
    compact(memory, row, texts[Kind.KEEP_ORDER][0], Kind.KEEP_ORDER)

    assert memory.store.copied_pages - copied == 4
    assert keys(memory, child) == keys(memory, child, name="kv.sums") == list(range(12))
    assert keys(memory, row) == [0, 1, 2, 3, *range(5, 12)]


def test_drop_pages_rejects_masks_that_split_a_page():
    memory = memory_of()
    row = row_of(memory, 10)

    with pytest.raises(ConfigError, match="expected whole pages to be retained or evicted"):
        compact(memory, row, "oxoooooooo", Kind.DROP_PAGES)

    memory.check()


def test_ordered_lanes_support_drop_pages_only():
    memory = memory_of(replace(KV, ordered=True), SUMS)
    row = row_of(memory, 10)

    for kind in (Kind.FILL_HOLES, Kind.KEEP_ORDER):
        with pytest.raises(ConfigError, match="drop whole pages"):
            compact(memory, row, "oooooooooo", kind)
    compact(memory, row, "ooooxxxxoo", Kind.DROP_PAGES)
    grow(memory, row, 4)

    expected = [0, 1, 2, 3, 8, 9, 10, 11, 12, 13]
    assert memory.tables["kv"].slot_positions(row, 1).tolist() == expected
    assert keys(memory, row, name="kv.sums")[:6] == expected[:6]


# ---- all or nothing ------------------------------------------------------------------------------


def test_plans_of_several_groups_are_committed_together_or_not_at_all():
    memory = memory_of(KV, MORE, total_bytes=9 * 192, max_rows=2)
    row = started(memory, 12)
    child = fork(memory, row)
    plans = [
        plan_compaction(memory, name, row, np.repeat(mask("ooooxxoooooo"), lanes, axis=0))
        for name, lanes in (("kv", 2), ("more", 1))
    ]
    before = memory.store.arena.tobytes()
    assert memory.free_bytes == 0

    with pytest.raises(OutOfPages, match="3 private pages"):
        commit_compaction(memory, *plans)
    assert memory.store.arena.tobytes() == before
    assert memory.tables["kv"].num_slots[row].tolist() == [12, 12]
    memory.release([child])
    commit_compaction(memory, *plans)

    assert memory.tables["more"].num_slots[row].tolist() == [10]
    memory.check()


def test_invalid_slot_map_is_rejected_before_any_write():
    memory = memory_of()
    row = row_of(memory, 12)
    fork(memory, row)
    plan = plan_compaction(memory, "kv", row, np.repeat(mask("oxoooooooooo"), 2, axis=0))
    broken = replace(plan, moves=replace(plan.moves, target=plan.moves.target + 1))
    before = memory.store.arena.tobytes()

    with pytest.raises(InvariantError, match="overwrites a retained slot"):
        commit_compaction(memory, broken)

    assert memory.store.arena.tobytes() == before
    memory.check()


# ---- cached pages --------------------------------------------------------------------------------


class Cache(MemoryListener):
    """Holds cached references and releases those whose pages only one row shares."""

    def __init__(self, memory):
        self.memory, self.cached_references, self.requested = memory, [], []
        memory.listeners.subscribe(self)

    def unpublish(self, page_class, pages):
        self.requested.append(pages.tolist())
        counts = self.memory.pools[page_class].ref_counts
        before = counts[pages].copy()
        for cached_reference in list(self.cached_references):
            named = cached_reference.pages["kv"]
            if np.isin(named, pages).any() and (counts[named] == 2).all():
                self.cached_references.remove(cached_reference)
                release_reference(self.memory, cached_reference)
        return (before == 2) & (counts[pages] == 1)


@pytest.mark.parametrize("kind", [Kind.FILL_HOLES, Kind.KEEP_ORDER])
def test_pages_shared_with_the_cache_only_are_written_in_place(kind):
    memory = memory_of()
    row = row_of(memory, 12)
    cache = Cache(memory)
    cache.cached_references = [
        reference_pages(memory, row, start, start + 4) for start in (0, 4, 8)
    ]
    copied = memory.store.copied_pages
    pages = memory.tables["kv"].pages[row, :, 1].tolist()

    plan = compact(memory, row, "oooooxoooxxo", kind)

    assert plan.needed_pages == {KV.page_class: 0}
    assert memory.store.copied_pages == copied
    assert set(pages) <= set(cache.requested[0])
    assert cache.cached_references[0].start == 0
    assert sorted(keys(memory, row)) == [0, 1, 2, 3, 4, 6, 7, 8, 11]
    memory.check()


@given(
    lanes=st.lists(st.lists(st.booleans(), min_size=23, max_size=23), min_size=2, max_size=2),
    kind=st.sampled_from([Kind.FILL_HOLES, Kind.KEEP_ORDER]),
)
def test_every_retained_slot_keeps_its_statistics(lanes, kind):
    memory, keep = memory_of(), np.array(lanes)
    row = row_of(memory, 23)

    commit_compaction(memory, plan_compaction(memory, "kv", row, keep, kind))

    for lane in (0, 1):
        found = keys(memory, row, lane)
        assert found == keys(memory, row, lane, name="kv.sums")
        expected = (np.flatnonzero(keep[lane]) + 100 * lane).tolist()
        assert sorted(found) == expected
        assert kind is Kind.FILL_HOLES or found == expected
    assert memory.statistics_of(row) == NAMES
    memory.check()


def test_pages_shared_with_another_row_are_copied_even_if_cached():
    memory = memory_of()
    row = row_of(memory, 12)
    cache = Cache(memory)
    cache.cached_references = [reference_pages(memory, row, 0, 12)]
    child = fork(memory, row)

    plan = compact(memory, row, "oooooxoooxxo", Kind.FILL_HOLES)

    assert plan.needed_pages == {KV.page_class: 2}
    assert len(cache.cached_references) == 1
    assert keys(memory, child) == list(range(12))
