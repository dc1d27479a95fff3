"""Who uses each page: ledger extents by hand, and the page map page by page."""

from dataclasses import replace

import numpy as np
import pytest

from quire.errors import InvariantError
from quire.kv.compaction import commit_compaction, plan_compaction
from quire.kv.ledger import NO_ROW, exact_rows, extents_of, prove_extents
from quire.kv.memory import KVMemory
from quire.kv.page_map import CACHE, CACHED, EVICTED, FIRST_ROW, FREE, SHARED, read_pages
from quire.kv.sharing import fork, reference_pages, release_reference
from quire.layout.codec_names import codec_spec
from quire.layout.pages import CacheLayout, LaneGroup, kv_pages

PAGE_TOKENS = 4


def page_class(key="float32", value="float32", **shape):
    codecs = codec_spec(key), None if value is None else codec_spec(value)
    sizes = {"heads": 1, "head_dim": 8, "tokens": PAGE_TOKENS} | shape
    return kv_pages(key=codecs[0], value=codecs[1], **sizes)


BODY = page_class()  # 256 B
PAIR = LaneGroup(name="pair", page_class=BODY, layers=(0, 1))
WINDOW = LaneGroup(name="window", page_class=BODY, layers=(2,), window=5)
LOOSE = LaneGroup(
    name="loose", page_class=page_class("int8", "int8", positions=True), layers=(3,), ordered=False
)


def memory_of(*groups):
    return KVMemory(CacheLayout(groups), 64 * 1024, max_rows=8)


def grown(memory, tokens, row=None):
    row = memory.start() if row is None else row
    memory.grow(np.array([row]), np.array([tokens], dtype=np.int32))
    return row


def parts(memory, *names):
    """The named attributes of all extents."""
    found = extents_of(memory)
    prove_extents(memory, found)
    return [tuple(getattr(extent, name) for name in names) for extent in found]


def test_pages_are_counted_from_the_tables_and_split_among_their_sequences():
    memory = memory_of(PAIR, WINDOW)
    assert extents_of(memory) == []
    first, second = grown(memory, 9), grown(memory, 4)

    assert parts(memory, "row", "group", "pages", "num_bytes", "references", "sequences") == [
        (first, "pair", 6, 6 * 256, 1, 1),
        (first, "window", 3, 3 * 256, 1, 1),
        (second, "pair", 2, 2 * 256, 1, 1),
        (second, "window", 1, 256, 1, 1),
    ]
    memory = memory_of(PAIR)
    parent = grown(memory, 8)
    children = fork(memory, parent), fork(memory, parent)
    grown(memory, 1, parent)

    found = parts(memory, "row", "sequences", "pages", "num_bytes")

    assert found[:2] == [(parent, 1, 2, 512), (parent, 3, 4, 1024 // 3)]
    assert [part[:3] for part in found[2:]] == [(child, 3, 4) for child in children]
    assert sum(num_bytes for *_, num_bytes in found) == 6 * 256


def test_cached_pages_belong_to_their_sequence_or_else_to_the_prefix_cache():
    memory = memory_of(PAIR)
    row = grown(memory, 9)
    first = reference_pages(memory, row, 0, 4)

    assert parts(memory, "row", "group", "references", "sequences", "num_bytes") == [
        (row, "pair", 1, 1, 4 * 256),
        (row, "pair", 2, 1, 2 * 256),
    ]
    both = reference_pages(memory, row, 0, 8)
    memory.release([row])
    memory.check()

    assert parts(memory, "row", "group", "references", "sequences", "pages", "num_bytes") == [
        (NO_ROW, "", 1, 0, 2, 2 * 256),  # the second page of each lane
        (NO_ROW, "", 2, 0, 2, 2 * 256),  # the first, in both references
    ]
    release_reference(memory, both)
    other = grown(memory, 4)
    assert memory.pools[BODY].num_shared == 0
    assert parts(memory, "row", "pages") == [(NO_ROW, 2), (other, 2)]
    memory.release([other])
    release_reference(memory, first)
    assert extents_of(memory) == []


def test_rows_with_an_evicted_token_or_a_lossy_codec_are_not_exact():
    memory = memory_of(replace(LOOSE, page_class=page_class(positions=True)), WINDOW)
    whole, pruned = grown(memory, 12), grown(memory, 12)
    keep = np.ones((1, 12), dtype=bool)
    keep[0, 3] = False
    commit_compaction(memory, plan_compaction(memory, "loose", pruned, keep))
    grown(memory, 1, pruned)

    assert exact_rows(memory)[[whole, pruned]].tolist() == [True, False]
    assert set(parts(memory, "row", "exact")) == {(whole, True), (pruned, False)}

    memory = memory_of(PAIR, WINDOW)
    row = grown(memory, 12)
    grown(memory, 12, row)
    assert memory.tables["window"].num_slots[row] < 24  # freed pages of a window lose nothing
    assert exact_rows(memory)[row]
    memory = memory_of(LOOSE)
    row = grown(memory, 5)
    assert parts(memory, "row", "codec", "exact") == [(row, "int8", False)]


def test_codec_name_of_keys_and_values():
    for key, value, name, plain in (
        ("bfloat16", "bfloat16", "bfloat16", True),
        ("float16", "int8", "float16/int8", False),
        ("int8", "float16", "int8/float16", False),
    ):
        shape = page_class(key, value)
        assert (shape.codec_name, shape.is_plain) == (name, plain)


def plus(extent, num_bytes):
    return replace(extent, num_bytes=extent.num_bytes + num_bytes)


@pytest.mark.parametrize(
    "change",
    [
        lambda extents: extents[1:],
        lambda extents: [*extents, extents[0]],
        lambda extents: [replace(extents[0], row=7), *extents[1:]],
        lambda extents: [replace(extents[0], references=3), *extents[1:]],
        lambda extents: [plus(extents[0], 1), *extents[1:]],
        lambda extents: [*map(plus, extents[:2], (-1, 1)), *extents[2:]],
    ],
    ids=["missing", "twice", "other-owner", "other-references", "a-byte-more", "moved-byte"],
)
def test_prove_extents_detects_each_error(change):
    memory = memory_of(PAIR)
    fork(memory, grown(memory, 9))
    grown(memory, 5)
    extents = extents_of(memory)
    prove_extents(memory, extents)

    with pytest.raises(InvariantError):
        prove_extents(memory, change(extents))


MAP_FULL = LaneGroup(name="full", page_class=BODY, layers=(0, 1))
MAP_CODED = replace(LOOSE, name="coded", layers=(2,))


@pytest.fixture
def memory():
    return memory_of(MAP_FULL, MAP_CODED)


def held_pages(memory, row, name):
    return set(memory.tables[name].row_pages(row).tolist())


def owned(facts, owner):
    return [set(one.pages[one.owner == owner].tolist()) for one in facts.classes]


def marked(one, bit):
    return set(one.pages[one.state & bit > 0].tolist())


def test_each_page_belongs_to_the_row_whose_table_names_it_and_all_cover_the_arena(memory):
    rows = [grown(memory, 20), grown(memory, 5), grown(memory, 33)]
    facts = read_pages(memory, rows)
    for index, row in enumerate(rows):
        full, coded = owned(facts, FIRST_ROW + index)
        assert full == held_pages(memory, row, "full")
        assert coded == held_pages(memory, row, "coded")
        assert len(full) == 2 * -(-int(memory.lengths[row]) // PAGE_TOKENS)
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
    grown(memory, 4, child)

    facts = read_pages(memory, [parent, child])

    full, own = facts.classes[0], owned(facts, FIRST_ROW + 1)[0]
    assert owned(facts, FIRST_ROW)[0] == held_pages(memory, parent, "full")
    assert own == held_pages(memory, child, "full") - held_pages(memory, parent, "full")
    assert len(own) == 2
    assert marked(full, SHARED) == held_pages(memory, parent, "full")


def test_pages_of_the_prefix_cache_are_marked(memory):
    gone, stays = grown(memory, 8), grown(memory, 8)
    reference_pages(memory, gone, 0, PAGE_TOKENS)
    reference_pages(memory, stays, 0, PAGE_TOKENS)
    memory.release([gone])

    facts = read_pages(memory, [stays])

    full = facts.classes[0]
    assert [len(pages) for pages in owned(facts, CACHE)] == [2, 1]
    assert np.count_nonzero(full.state & CACHED) == 2
    assert not np.count_nonzero(full.state & SHARED)


def test_only_these_rows_hides_all_other_pages(memory):
    mine, other = grown(memory, 8), grown(memory, 40)
    reference_pages(memory, mine, 0, PAGE_TOKENS)
    child = fork(memory, mine)  # of another tenant

    alone = read_pages(memory, [mine], only_these=True)
    owner, state, kind = alone.in_order()

    own = len(held_pages(memory, mine, "full")) + len(held_pages(memory, mine, "coded"))
    assert len(owner) == own > 0
    assert (owner == FIRST_ROW).all()
    assert not state.any()
    assert set(kind.tolist()) == {0, 1}
    memory.release([other, child])
    again = read_pages(memory, [mine], only_these=True).in_order()
    assert all(map(np.array_equal, again, (owner, state, kind)))


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
