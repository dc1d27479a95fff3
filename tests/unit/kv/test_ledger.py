"""Who holds the arena, worked out by hand; the state machine of the memory does the rest."""

from dataclasses import replace

import numpy as np
import pytest

from quire.errors import InvariantError
from quire.kv.compaction import commit_compaction, plan_compaction
from quire.kv.ledger import NO_ROW, codec_name, exact_rows, extents_of, is_plain, prove_extents
from quire.kv.memory import KVMemory
from quire.kv.sharing import fork
from quire.layout.codec_names import codec_spec
from quire.layout.pages import CacheLayout, LaneGroup, PageClass

PAGE_TOKENS = 4


def page_class(key="float32", value="float32", **shape):
    codecs = codec_spec(key), None if value is None else codec_spec(value)
    sizes = {"heads": 1, "head_dim": 8, "tokens": PAGE_TOKENS} | shape
    return PageClass(key=codecs[0], value=codecs[1], **sizes)


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
    """Refer to the first pages of a row without being a sequence, as a prefix index does."""
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
    """The extents, by the attributes named."""
    found = extents_of(memory)
    prove_extents(memory, found)
    return [tuple(getattr(extent, name) for name in names) for extent in found]


def test_an_empty_memory_has_no_extents():
    assert extents_of(memory_of(PAIR)) == []


def test_what_nobody_shares_is_counted_from_the_tables():
    memory = memory_of(PAIR, WINDOW)
    first, second = grown(memory, 9), grown(memory, 4)

    assert parts(memory, "row", "group", "pages", "num_bytes", "references", "sequences") == [
        (first, "pair", 6, 6 * 256, 1, 1),
        (first, "window", 3, 3 * 256, 1, 1),
        (second, "pair", 2, 2 * 256, 1, 1),
        (second, "window", 1, 256, 1, 1),
    ]


def test_a_shared_page_belongs_to_its_sequences_in_equal_parts():
    memory = memory_of(PAIR)
    parent = grown(memory, 8)
    children = fork(memory, parent), fork(memory, parent)
    grown(memory, 1, parent)

    found = parts(memory, "row", "sequences", "pages", "num_bytes")

    assert found[:2] == [(parent, 1, 2, 512), (parent, 3, 4, 1024 // 3)]
    assert [part[:3] for part in found[2:]] == [(child, 3, 4) for child in children]
    assert sum(num_bytes for *_, num_bytes in found) == 6 * 256


def test_pages_the_prefix_cache_lends_to_a_sequence_are_the_sequences():
    memory = memory_of(PAIR)
    row = grown(memory, 9)
    reference_pages(memory, row, 4)

    assert parts(memory, "row", "group", "references", "sequences", "num_bytes") == [
        (row, "pair", 1, 1, 4 * 256),
        (row, "pair", 2, 1, 2 * 256),
    ]


def test_pages_that_no_sequence_names_are_the_prefix_caches():
    memory = memory_of(PAIR)
    row = grown(memory, 9)
    cached_references = reference_pages(memory, row, 4), reference_pages(memory, row, 8)
    memory.release([row])

    assert parts(memory, "row", "group", "references", "sequences", "pages", "num_bytes") == [
        (NO_ROW, "", 1, 0, 2, 2 * 256),  # the second page of each lane
        (NO_ROW, "", 2, 0, 2, 2 * 256),  # the first, in both loans
    ]
    for cached_reference in cached_references:
        release_reference(memory, cached_reference)
    assert extents_of(memory) == []


def test_idle_pages_without_any_sharing_are_seen_too():
    memory = memory_of(PAIR)
    row = grown(memory, 4)
    reference_pages(memory, row, 4)
    memory.release([row])
    other = grown(memory, 4)

    assert memory.pools[BODY].num_shared == 0
    assert parts(memory, "row", "pages") == [(NO_ROW, 2), (other, 2)]


def test_a_row_that_has_lost_a_token_is_not_exact_any_more():
    memory = memory_of(replace(LOOSE, page_class=page_class(positions=True)), WINDOW)
    whole, pruned = grown(memory, 12), grown(memory, 12)
    keep = np.ones((1, 12), dtype=bool)
    keep[0, 3] = False
    commit_compaction(memory, plan_compaction(memory, "loose", pruned, keep))
    grown(memory, 1, pruned)

    assert exact_rows(memory)[[whole, pruned]].tolist() == [True, False]
    assert set(parts(memory, "row", "exact")) == {(whole, True), (pruned, False)}


def test_a_window_that_has_passed_is_no_loss():
    memory = memory_of(PAIR, WINDOW)
    row = grown(memory, 12)
    grown(memory, 12, row)

    assert memory.tables["window"].num_slots[row] < 24
    assert exact_rows(memory)[row]


def test_what_a_lossy_codec_stores_is_never_exact():
    memory = memory_of(LOOSE)
    row = grown(memory, 5)

    assert parts(memory, "row", "codec", "exact") == [(row, "int8", False)]


@pytest.mark.parametrize(
    ("key", "value", "name", "plain"),
    [
        ("bfloat16", "bfloat16", "bfloat16", True),
        ("float32", None, "float32", True),
        ("float16", "int8", "float16/int8", False),
        ("int8", "float16", "int8/float16", False),
    ],
)
def test_codecs_have_one_name_for_keys_and_values(key, value, name, plain):
    shape = page_class(key, value)

    assert codec_name(shape) == name
    assert is_plain(shape) == plain


@pytest.mark.parametrize(
    "wrong",
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
def test_the_proof_finds_what_is_wrong(wrong):
    memory = memory_of(PAIR)
    fork(memory, grown(memory, 9))
    grown(memory, 5)
    right = extents_of(memory)
    prove_extents(memory, right)

    with pytest.raises(InvariantError):
        prove_extents(memory, wrong(right))
