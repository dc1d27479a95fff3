"""The device cache of offloaded pages: every KV head finds the pages that it reads."""

import itertools
import random

import numpy as np
import pytest

from quire.kv.extents import Extent
from quire.kv.tables import LaneTable
from quire.layout.codec_names import codec_spec
from quire.layout.pages import LaneGroup, kv_pages
from quire.offload.kv.hot_pages import HotPages, HotRow
from quire.offload.kv.offloaded_prefixes import HostPages, OffloadedPageGroup
from quire.offload.swap.host_pool import HostSpace

HEADS, LAYERS, FIRST = 3, 5, 1


def cache_of(columns, most, *, lanes=1, first_page=0):
    """A cache over two page groups, whose page starts name the layer, lane and column."""
    plain = codec_spec("float32")
    page_class = kv_pages(key=plain, value=plain, head_dim=8, heads=HEADS, tokens=4)
    layers = tuple(range(LAYERS))
    group = LaneGroup(
        name="kv",
        page_class=page_class,
        layers=layers,
        lanes_per_layer=lanes,
        dense_layers=FIRST,
    )
    found, first = list[OffloadedPageGroup](), 0
    for number, count in enumerate((columns // 3, columns - columns // 3)):
        number = first_page + 1000 * number
        staging = (number + np.arange(2 * lanes * count)).astype(np.int32)
        size = page_class.page_bytes * lanes
        begin = first_page * size
        starts = [10**6 * begin + size * (100 * layer * columns + first) for layer in layers]
        spaces = [HostSpace(0, {page_class: (Extent(start, size * count),)}) for start in starts]
        host = HostPages(spaces, count, None, np.zeros((1, 0), dtype=np.int32))
        found.append(OffloadedPageGroup("kv", first, staging.reshape(2, lanes, count), host))
        first += count
    return HotPages(LaneTable(group, 1), found, FIRST, most)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize(("columns", "most"), [(9, 9), (40, 4), (40, 12), (100, 30)])
def test_every_head_reads_the_page_of_its_column(columns, most, lanes, rows):
    """Also of rows that share the cache: their pages stay until the next layer."""
    rng, cache = random.Random(0), cache_of(columns, min(columns, rows * most), lanes=lanes)
    # of pages after the shared ones
    own = cache_of(20, most, lanes=lanes, first_page=3000)
    resident = np.arange(8000, 8000 + columns + 26, dtype=np.int32)
    content, picks, hits = {}, {}, 0
    caches = [HotRow([cache, own]), *[HotRow([cache])] * (rows - 1)]
    for step, layer in itertools.product(range(30), range(FIRST, LAYERS)):
        cache.begin(layer)
        own.begin(layer)
        read = []
        for lane, (row, of_row) in itertools.product(range(lanes), enumerate(caches)):
            key, count = (row, layer, lane), of_row.starts.shape[2]
            drawn = [rng.sample(range(count + 6), most) for _ in range(HEADS)]
            kept = step and rng.random() < 0.8
            picks[key] = picks[key] if kept else np.sort(np.array(drawn), axis=1)
            where, parts = of_row.find(lane, picks[key], resident)
            for one in parts:
                for page, head, start in zip(one.missing, one.heads, one.starts, strict=True):
                    content[int(page), int(head)] = int(start)
            hits += sum(one.num_hits for one in parts)
            read.append((of_row, lane, picks[key], where))
        for of_row, lane, columns_read, where in read:
            for (head, at), column in np.ndenumerate(columns_read):
                page, count = int(where[head, at]), of_row.starts.shape[2]
                if column >= count:
                    assert page == resident[column]
                else:
                    assert content[page, head] == of_row.starts[layer, lane, column]
    assert hits > 0 or columns == most


def test_a_layer_keeps_what_it_reads_again_while_other_layers_read():
    cache = cache_of(40, 8)
    columns = np.tile(np.arange(8), (HEADS, 1))
    for layer in range(FIRST, LAYERS):
        cache.begin(layer)
        assert len(cache.find(0, columns + layer).missing) == 8 * HEADS
    for layer in range(FIRST, LAYERS):
        moved = columns + layer
        moved[:, 0] = 30
        cache.begin(layer)
        found = cache.find(0, moved)
        assert (found.num_hits, len(found.missing)) == (7 * HEADS, HEADS)


def test_a_larger_budget_or_another_prefix_needs_another_cache():
    cache = cache_of(40, 8)
    held = list(cache.page_groups)

    assert cache.fits(held, FIRST, 8)
    assert not cache.fits(held, FIRST, cache.max_pages + 1)
    assert not cache.fits(held, FIRST - 1, 8)
    assert not cache.fits(held[:1], FIRST, 8)
