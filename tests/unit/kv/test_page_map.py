"""The page map compared with page tables and reference counts, page by page."""

import numpy as np
import pytest

from quire.kv.memory import KVMemory
from quire.kv.page_map import CACHE, CACHED, EVICTED, FIRST_ROW, FREE, SHARED, read_pages
from quire.kv.sharing import fork
from quire.layout.codec_names import codec_spec
from quire.layout.pages import CacheLayout, LaneGroup, kv_pages

PAGE_TOKENS = 4


def page_class(codec="float32", **shape):
    sizes = {"heads": 1, "head_dim": 8, "tokens": PAGE_TOKENS} | shape
    return kv_pages(key=codec_spec(codec), value=codec_spec(codec), **sizes)


FULL = LaneGroup(name="full", page_class=page_class(), layers=(0, 1))
CODED = LaneGroup(
    name="coded", page_class=page_class("int8", positions=True), layers=(2,), ordered=False
)


@pytest.fixture
def memory():
    return KVMemory(CacheLayout((FULL, CODED)), 64 * 1024, max_rows=8)


def grown(memory, tokens):
    row = memory.start()
    memory.grow(np.array([row]), np.array([tokens], dtype=np.int32))
    return row


def reference(memory, row, columns):
    """Reference the first pages of a row, as a prefix index does."""
    pages = {n: t.pages[row, :, :columns].reshape(-1).copy() for n, t in memory.tables.items()}
    memory.cached_references[next(memory.cached_reference_keys)] = pages
    for name, numbers in pages.items():
        memory.pools[memory.tables[name].group.page_class].retain(numbers)


def held_pages(memory, row, name):
    return set(memory.tables[name].row_pages(row).tolist())


def owned(facts, owner):
    return [set(one.pages[one.owner == owner].tolist()) for one in facts.classes]


def marked(one, bit):
    return set(one.pages[one.state & bit > 0].tolist())


def test_each_page_belongs_to_the_row_whose_table_names_it(memory):
    rows = [grown(memory, 9), grown(memory, 5)]

    facts = read_pages(memory, rows)

    for index, row in enumerate(rows):
        full, coded = owned(facts, FIRST_ROW + index)
        assert full == held_pages(memory, row, "full")
        assert coded == held_pages(memory, row, "coded")
        assert len(full) == 2 * -(-int(memory.lengths[row]) // PAGE_TOKENS)


def test_pages_in_address_order_cover_the_arena(memory):
    rows = [grown(memory, 20), grown(memory, 5), grown(memory, 33)]
    memory.release([rows[1]])

    owner, state, kind = read_pages(memory, rows[:1] + rows[2:]).in_order()

    sizes = np.array([c.page_bytes for c in memory.pools])[kind]
    borders = sum(pool.tail_bytes for pool in memory.pools.values())
    assert sizes.sum() + borders <= memory.total_bytes
    assert sizes[owner != FREE].sum() == sum(p.used_bytes for p in memory.pools.values())
    assert (owner == FREE).sum() > 0
    assert not state.any()


@pytest.mark.parametrize("tokens", [8, 160])
def test_pages_of_a_fork_are_shared_and_belong_to_the_first_row(memory, tokens):
    parent = grown(memory, tokens)
    child = fork(memory, parent)
    memory.grow(np.array([child]), np.array([4], dtype=np.int32))

    facts = read_pages(memory, [parent, child])

    full, own = facts.classes[0], owned(facts, FIRST_ROW + 1)[0]
    assert owned(facts, FIRST_ROW)[0] == held_pages(memory, parent, "full")
    assert own == held_pages(memory, child, "full") - held_pages(memory, parent, "full")
    assert len(own) == 2
    assert marked(full, SHARED) == held_pages(memory, parent, "full")


def test_pages_of_the_prefix_cache_are_marked(memory):
    gone, stays = grown(memory, 8), grown(memory, 8)
    reference(memory, gone, 1)
    reference(memory, stays, 1)
    memory.release([gone])

    facts = read_pages(memory, [stays])

    full = facts.classes[0]
    assert [len(pages) for pages in owned(facts, CACHE)] == [2, 1]
    assert np.count_nonzero(full.state & CACHED) == 2
    assert not np.count_nonzero(full.state & SHARED)


def test_only_these_rows_hides_all_other_pages(memory):
    mine, other = grown(memory, 8), grown(memory, 40)
    reference(memory, mine, 1)
    child = fork(memory, mine)  # of another tenant

    alone = read_pages(memory, [mine], only_these=True)
    owner, state, kind = alone.in_order()

    own = len(held_pages(memory, mine, "full")) + len(held_pages(memory, mine, "coded"))
    assert len(owner) == own > 0
    assert (owner == FIRST_ROW).all()
    assert not state.any()
    assert set(kind.tolist()) == {0, 1}
    memory.release([other, child])
    assert [a.tolist() for a in read_pages(memory, [mine], only_these=True).in_order()] == [
        owner.tolist(),
        state.tolist(),
        kind.tolist(),
    ]


def test_pages_of_a_row_without_a_token_are_marked(memory):
    whole, cut = grown(memory, 8), grown(memory, 8)
    table = memory.tables["coded"]
    memory.pools[table.group.page_class].release(
        table.cut(np.array([cut]), np.array([[1]], dtype=np.int32))
    )
    table.num_slots[cut] = PAGE_TOKENS

    facts = read_pages(memory, [whole, cut])

    for one, name in zip(facts.classes, ("full", "coded"), strict=True):
        assert marked(one, EVICTED) == held_pages(memory, cut, name)
