import numpy as np

from quire.kv.compaction import Kind, commit_compaction, plan_compaction
from quire.kv.memory import KVMemory
from quire.layout.codec_names import codec_spec
from quire.layout.pages import (
    INDEX,
    KEY,
    NUMBERS,
    VALUE,
    CacheLayout,
    LaneGroup,
    PageClass,
    PlaneSpec,
)
from support.host_bytes import HostBytes, vector_bytes

PLAIN = codec_spec("float16")


def plain_class(*, tokens=4, heads=1, head_dim=8, positions=False, value=True):
    """Pages of `heads * tokens * head_dim * 4` bytes (keys and values)."""
    names = (KEY, VALUE) if value else (NUMBERS,)
    planes = tuple(PlaneSpec(name, PLAIN, head_dim, heads) for name in names)
    return PageClass(planes=planes, tokens=tokens, positions=positions)


def latent_class(*, tokens=4):
    """Pages of latents with an index: rotated parts of keys, int8 latents and index keys."""
    planes = (
        PlaneSpec(KEY, PLAIN, 4),
        PlaneSpec(VALUE, codec_spec("int8"), 6),
        PlaneSpec(INDEX, PLAIN, 3),
    )
    return PageClass(planes=planes, tokens=tokens, joined=True)


def same_bytes(page_class, values):
    """The planes of slots whose bytes all have the value of their slot."""
    return [
        np.broadcast_to(
            values[:, None, None],
            (len(values), plane.heads, sum(vector_bytes(plane.codec, plane.width))),
        )
        for plane in page_class.planes
    ]


def one_group(page_class=None, *, num_lanes=1, total_bytes=64 * 1024, max_rows=4, **rules):
    """A KV memory with one lane group named "kv" and a `HostBytes` store."""
    page_class = page_class or plain_class(positions=not rules.get("ordered", True))
    group = LaneGroup(name="kv", page_class=page_class, layers=tuple(range(num_lanes)), **rules)
    return with_groups(group, total_bytes=total_bytes, max_rows=max_rows)


def with_groups(*groups, total_bytes=64 * 1024, max_rows=4):
    return KVMemory(
        CacheLayout(groups), total_bytes, max_rows, store=HostBytes(total_bytes), track_changes=True
    )


def grow(memory, row, tokens):
    memory.grow(np.array([row]), np.array([tokens], dtype=np.int32))


def started(memory, tokens, *, name="kv"):
    """Start a row of `tokens` tokens; every key byte of token p in lane l is p + 100 l."""
    row = memory.start()
    grow(memory, row, tokens)
    table = memory.tables[name]
    for lane in range(table.group.num_lanes):
        write_lane(memory, row, lane, name=name)
    return row


def mask(*lanes):
    """A mask from one text per lane: o is a retained slot, x an evicted one."""
    return np.array([[letter == "o" for letter in lane] for lane in lanes])


def drop_pages(memory, row, columns, *, lane=0, name="kv"):
    table = memory.tables[name]
    slots = np.arange(table.num_slots[row].max())
    keep = np.ones((table.group.num_lanes, len(slots)), dtype=bool)
    keep[lane] = ~np.isin(slots // table.group.page_class.tokens, columns)
    commit_compaction(memory, plan_compaction(memory, name, row, keep, Kind.DROP_PAGES))


def write_lane(memory, row, lane, *, name="kv"):
    table = memory.tables[name]
    page_class, slots = table.group.page_class, np.arange(table.num_slots[row, lane])
    shape = (len(slots), page_class.heads, 2 * page_class.head_dim)
    vectors = np.broadcast_to((slots + 100 * lane).astype(np.uint8)[:, None, None], shape)
    planes = [vectors] * len(page_class.planes)
    memory.store.write_slots(page_class, places(table, row, lane), planes, slots)


def places(table, row, lane):
    per_page = table.group.page_class.tokens
    slots = np.arange(table.num_slots[row, lane])
    return table.pages[row, lane, slots // per_page], slots % per_page


def keys(memory, row, lane=0, *, name="kv"):
    """The first byte of each slot's key, in slot order."""
    table = memory.tables[name]
    (key, *_), _ = memory.store.read_slots(table.group.page_class, places(table, row, lane))
    return key[:, 0, 0].tolist()


def used_pages(memory):
    return sum(pool.num_used for pool in memory.pools.values())
