"""The device cache of offloaded pages: every KV head finds the pages that it reads."""

import random

import numpy as np
import pytest

from quire.kv.extents import Extent
from quire.kv.tables import LaneTable
from quire.layout.codec_names import codec_spec
from quire.layout.pages import LaneGroup, kv_pages
from quire.offload.kv.hot_pages import HotPages
from quire.offload.kv.offloaded_prefixes import HostPages, OffloadedPageGroup
from quire.offload.swap.host_pool import HostSpace

HEADS, LAYERS, FIRST = 3, 5, 1


def cache_of(columns, most, *, lanes=1):
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
        staging = (1000 * number + np.arange(2 * lanes * count)).astype(np.int32)
        size = page_class.page_bytes * lanes
        starts = [size * (100 * layer * columns + first) for layer in layers]
        spaces = [HostSpace(0, {page_class: (Extent(start, size * count),)}) for start in starts]
        host = HostPages(spaces, count, None, np.zeros((1, 0), dtype=np.int32))
        found.append(OffloadedPageGroup("kv", first, staging.reshape(2, lanes, count), host))
        first += count
    return HotPages(LaneTable(group, 1), found, FIRST, most)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize(("columns", "most"), [(9, 9), (40, 4), (40, 12), (100, 30)])
def test_every_head_reads_the_page_of_its_column(columns, most, lanes):
    rng, cache = random.Random(0), cache_of(columns, most, lanes=lanes)
    resident = np.arange(5000, 5000 + columns + 6, dtype=np.int32)
    content, hits = {}, 0
    picks = {}
    for step in range(30):
        for layer in range(FIRST, LAYERS):
            for lane in range(lanes):
                key = layer, lane
                drawn = [rng.sample(range(columns + 6), most) for _ in range(HEADS)]
                kept = step and rng.random() < 0.8
                picks[key] = picks[key] if kept else np.sort(np.array(drawn), axis=1)
                found = cache.find(layer, lane, picks[key], resident)
                loads = zip(found.missing, found.heads, found.starts, strict=True)
                for page, head, start in loads:
                    content[int(page), int(head)] = int(start)
                hits += found.num_hits
                for head, (columns_read, pages) in enumerate(
                    zip(picks[key], found.pages, strict=True)
                ):
                    for column, page in zip(columns_read.tolist(), pages.tolist(), strict=True):
                        if column >= columns:
                            assert page == resident[column]
                        else:
                            start = int(cache.starts[layer, lane, column])
                            assert content[page, head] == start
                assert all(len(set(pages.tolist())) == most for pages in found.pages)
    assert hits > 0 or columns == most


def test_a_layer_keeps_what_it_reads_again_while_other_layers_read():
    cache = cache_of(40, 8)
    resident, columns = np.zeros(60, dtype=np.int32), np.tile(np.arange(8), (HEADS, 1))
    for layer in range(FIRST, LAYERS):
        assert len(cache.find(layer, 0, columns + layer, resident).missing) == 8 * HEADS
    for layer in range(FIRST, LAYERS):
        moved = columns + layer
        moved[:, 0] = 30
        found = cache.find(layer, 0, moved, resident)
        assert (found.num_hits, len(found.missing)) == (7 * HEADS, HEADS)


def test_a_larger_budget_or_another_prefix_needs_another_cache():
    cache = cache_of(40, 8)
    held = list(cache.page_groups)

    assert cache.fits(held, FIRST, 8)
    assert not cache.fits(held, FIRST, cache.most + 1)
    assert not cache.fits(held, FIRST - 1, 8)
    assert not cache.fits(held[:1], FIRST, 8)
