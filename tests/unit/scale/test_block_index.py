"""The block index compared with one list of blocks per replica."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.scale.routing.block_index import BlockIndex

REPLICAS = ("a", "b", "c")
chains = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(
    lambda path: tuple(hash(tuple(path[: i + 1])) for i in range(len(path)))
)
sends = st.lists(st.tuples(st.sampled_from(REPLICAS), chains), max_size=30)


def stored(*blocks):
    return {"type": "BlockStored", "block_hashes": list(blocks)}


def removed(*blocks):
    return {"type": "BlockRemoved", "block_hashes": list(blocks)}


def prefix_of(held, chain):
    depth = 0
    while depth < len(chain) and chain[depth] in held:
        depth += 1
    return depth


@given(sends=sends, asked=chains, max_blocks=st.integers(1, 8))
def test_without_events_the_max_recently_sent_blocks_are_expected(sends, asked, max_blocks):
    index = BlockIndex(max_blocks)
    held = {name: OrderedDict() for name in REPLICAS}
    for name, chain in sends:
        index.expect(name, chain)
        for block in reversed(chain):
            held[name][block] = None
            held[name].move_to_end(block)
        while len(held[name]) > max_blocks:
            held[name].popitem(last=False)

    depths = {name: prefix_of(blocks, asked) for name, blocks in held.items()}
    assert index.cached_blocks(asked) == {name: n for name, n in depths.items() if n}
    assert all(index.num_blocks(name) == len(held[name]) <= max_blocks for name in REPLICAS)
    assert index.num_hashes == len(set().union(*held.values()))


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["send", "finish", "stored", "removed", "lost"]),
            st.sampled_from(REPLICAS),
            chains,
        ),
        max_size=40,
    ),
    asked=chains,
)
def test_with_events_stored_blocks_and_those_of_running_requests_are_expected(steps, asked):
    index = BlockIndex(max_blocks=1000)
    cached = {name: set() for name in REPLICAS}
    running = {name: [] for name in REPLICAS}
    for name in REPLICAS:
        index.apply_events(name, [{"type": "AllBlocksCleared"}])
    for kind, name, chain in steps:
        if kind == "send":
            index.expect(name, chain)
            running[name].append(chain)
        elif kind == "finish" and running[name]:
            index.finish(name, running[name].pop(0))
        elif kind == "stored":
            index.apply_events(name, [stored(*chain)])
            cached[name].update(chain)
        elif kind == "removed":
            index.apply_events(name, [removed(*chain)])
            cached[name].difference_update(chain)
        elif kind == "lost":
            index.forget(name)
            index.apply_events(name, [{"type": "AllBlocksCleared"}])
            cached[name], running[name] = set(), []

    held = {name: cached[name].union(*running[name]) for name in REPLICAS}
    depths = {name: prefix_of(held[name], asked) for name in REPLICAS}
    assert index.cached_blocks(asked) == {name: n for name, n in depths.items() if n}
    assert index.num_hashes == len(set().union(*held.values()))


def test_first_event_replaces_the_approximation():
    index = BlockIndex(max_blocks=10)
    index.expect("a", (1, 2, 3))

    index.apply_events("a", [stored(1)])

    assert index.cached_blocks((1, 2, 3)) == {"a": 1}


def test_place_of_a_lost_replica_is_used_again():
    index = BlockIndex(max_blocks=10)
    for name in ("a", "b"):
        index.expect(name, (1, 2))
    index.forget("a")
    index.expect("c", (1,))

    assert index.cached_blocks((1, 2)) == {"b": 2, "c": 1}


def test_unknown_events_are_refused():
    with pytest.raises(ConfigError, match="expected a KV event of type BlockStored"):
        BlockIndex(4).apply_events("a", [{"type": "BlockMoved", "block_hashes": [1]}])
