"""Lane groups with statistics per slot and with a fixed number of records."""

from quire.layout.pages import LaneGroup
from support.small_memory import grow, plain_class, write_lane

KV = LaneGroup(name="kv", page_class=plain_class(positions=True), layers=(0, 1), ordered=False)
SUMS = LaneGroup(name="kv.sums", page_class=plain_class(value=False), layers=(0, 1), of="kv")
RING = LaneGroup(
    name="kv.ring", page_class=plain_class(tokens=2, value=False), layers=(0, 1), records=3
)
WINDOW = LaneGroup(name="window", page_class=plain_class(), layers=(2,), window=9)
GROUPS = (KV, SUMS, RING, WINDOW)
NAMES = frozenset({"kv.sums", "kv.ring"})


def started(memory, tokens, statistics=None):
    row = memory.start(statistics)
    grow(memory, row, tokens)
    write(memory, row)
    return row


def write(memory, row):
    for name, table in memory.tables.items():
        for lane in range(table.group.num_lanes):
            write_lane(memory, row, lane, name=name)


def slots(memory, row, name):
    return memory.tables[name].num_slots[row].tolist()


def expected(tokens, lane=0):
    return [token + 100 * lane for token in range(tokens)]
