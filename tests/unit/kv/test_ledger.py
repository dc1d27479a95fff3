"""Ledger extents compared with values worked out by hand; the memory machine checks the rest."""

from dataclasses import replace

import numpy as np
import pytest

from quire.errors import InvariantError
from quire.kv.compaction import commit_compaction, plan_compaction
from quire.kv.ledger import NO_ROW, exact_rows, extents_of, prove_extents
from quire.kv.memory import KVMemory
from quire.kv.sharing import fork
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


def reference_pages(memory, row, tokens):
    """Reference the first pages of a row, as a prefix index does."""
    key = next(memory.cached_reference_keys)
    memory.cached_references[key] = {
        name: table.pages[row, :, : tokens // PAGE_TOKENS].reshape(-1).copy()
        for name, table in memory.tables.items()
    }
    for name, pages in memory.cached_references[key].items():
        memory.pools[memory.tables[name].group.page_class].retain(pages)
    memory.check()
    return key


def release_reference(memory, key):
    for name, pages in memory.cached_references.pop(key).items():
        memory.pools[memory.tables[name].group.page_class].release(pages)


def parts(memory, *names):
    """The named attributes of all extents."""
    found = extents_of(memory)
    prove_extents(memory, found)
    return [tuple(getattr(extent, name) for name in names) for extent in found]


def test_empty_memory_has_no_extents():
    assert extents_of(memory_of(PAIR)) == []


def test_unshared_pages_are_counted_from_the_tables():
    memory = memory_of(PAIR, WINDOW)
    first, second = grown(memory, 9), grown(memory, 4)

    assert parts(memory, "row", "group", "pages", "num_bytes", "references", "sequences") == [
        (first, "pair", 6, 6 * 256, 1, 1),
        (first, "window", 3, 3 * 256, 1, 1),
        (second, "pair", 2, 2 * 256, 1, 1),
        (second, "window", 1, 256, 1, 1),
    ]


def test_shared_page_is_split_equally_among_its_sequences():
    memory = memory_of(PAIR)
    parent = grown(memory, 8)
    children = fork(memory, parent), fork(memory, parent)
    grown(memory, 1, parent)

    found = parts(memory, "row", "sequences", "pages", "num_bytes")

    assert found[:2] == [(parent, 1, 2, 512), (parent, 3, 4, 1024 // 3)]
    assert [part[:3] for part in found[2:]] == [(child, 3, 4) for child in children]
    assert sum(num_bytes for *_, num_bytes in found) == 6 * 256


def test_cached_pages_in_use_belong_to_the_sequence():
    memory = memory_of(PAIR)
    row = grown(memory, 9)
    reference_pages(memory, row, 4)

    assert parts(memory, "row", "group", "references", "sequences", "num_bytes") == [
        (row, "pair", 1, 1, 4 * 256),
        (row, "pair", 2, 1, 2 * 256),
    ]


def test_cached_pages_without_a_sequence_belong_to_the_prefix_cache():
    memory = memory_of(PAIR)
    row = grown(memory, 9)
    cached_references = reference_pages(memory, row, 4), reference_pages(memory, row, 8)
    memory.release([row])

    assert parts(memory, "row", "group", "references", "sequences", "pages", "num_bytes") == [
        (NO_ROW, "", 1, 0, 2, 2 * 256),  # the second page of each lane
        (NO_ROW, "", 2, 0, 2, 2 * 256),  # the first, in both references
    ]
    for cached_reference in cached_references:
        release_reference(memory, cached_reference)
    assert extents_of(memory) == []


def test_unused_cached_pages_are_counted_without_sharing():
    memory = memory_of(PAIR)
    row = grown(memory, 4)
    reference_pages(memory, row, 4)
    memory.release([row])
    other = grown(memory, 4)

    assert memory.pools[BODY].num_shared == 0
    assert parts(memory, "row", "pages") == [(NO_ROW, 2), (other, 2)]


def test_row_with_an_evicted_token_is_not_exact():
    memory = memory_of(replace(LOOSE, page_class=page_class(positions=True)), WINDOW)
    whole, pruned = grown(memory, 12), grown(memory, 12)
    keep = np.ones((1, 12), dtype=bool)
    keep[0, 3] = False
    commit_compaction(memory, plan_compaction(memory, "loose", pruned, keep))
    grown(memory, 1, pruned)

    assert exact_rows(memory)[[whole, pruned]].tolist() == [True, False]
    assert set(parts(memory, "row", "exact")) == {(whole, True), (pruned, False)}


def test_row_with_freed_window_pages_is_exact():
    memory = memory_of(PAIR, WINDOW)
    row = grown(memory, 12)
    grown(memory, 12, row)

    assert memory.tables["window"].num_slots[row] < 24
    assert exact_rows(memory)[row]


def test_row_of_a_lossy_codec_is_not_exact():
    memory = memory_of(LOOSE)
    row = grown(memory, 5)

    assert parts(memory, "row", "codec", "exact") == [(row, "int8", False)]


@pytest.mark.parametrize(
    ("key", "value", "name", "plain"),
    [
        ("bfloat16", "bfloat16", "bfloat16", True),
        ("float16", "int8", "float16/int8", False),
        ("int8", "float16", "int8/float16", False),
    ],
)
def test_codec_name_of_keys_and_values(key, value, name, plain):
    shape = page_class(key, value)

    assert shape.codec_name == name
    assert shape.is_plain == plain


@pytest.mark.parametrize(
    "change",
    [
        lambda extents: extents[1:],
        lambda extents: [*extents, extents[0]],
        lambda extents: [replace(extents[0], row=7), *extents[1:]],
        lambda extents: [replace(extents[0], references=3), *extents[1:]],
        lambda extents: [replace(extents[0], num_bytes=extents[0].num_bytes + 1), *extents[1:]],
        lambda extents: [
            replace(extents[0], num_bytes=extents[0].num_bytes - 1),
            replace(extents[1], num_bytes=extents[1].num_bytes + 1),
            *extents[2:],
        ],
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
