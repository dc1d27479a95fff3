import json
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.scale.http_call import HttpCall, routed_request
from quire.scale.routing.block_index import BlockIndex
from quire.scale.routing.blocks import block_hashes

BLOCK_WORDS = 2
BLOCK_BYTES = 4 * BLOCK_WORDS


def hints(body, *, tenant="default", headers=(), method="POST"):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    url = {"path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b""}
    call = HttpCall(method=method, scheme="http", headers=tuple(headers), body=content, **url)
    return routed_request(call, tenant, BLOCK_WORDS)


def common(one, other):
    """Equal numbers, blocks or characters at the beginning of both."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def common_blocks(one, other):
    return common(one.prompt_blocks, other.prompt_blocks)


@given(st.binary(max_size=64), st.binary(max_size=64), st.binary(max_size=64))
def test_texts_share_the_blocks_of_their_common_beginning(beginning, one, other):
    shared, left, right = (text.hex() for text in (beginning, one, other))
    texts = shared + left, shared + right

    found = [hints({"prompt": text}) for text in texts]

    expected = common(*texts) // BLOCK_BYTES if left != right else len(found[0].prompt_blocks)
    assert common_blocks(*found) == expected  # a last word may have fewer bytes
    assert found[0].prompt_tokens == -(-len(texts[0]) // 4)


@given(
    st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=9),
    st.lists(st.integers(0, 9), max_size=9),
)
def test_token_ids_are_words(ids, more):
    one, other = hints({"prompt": ids}), hints({"prompt": ids + more})
    assert common_blocks(one, other) == len(ids) // BLOCK_WORDS
    assert (one.prompt_tokens, other.prompt_tokens) == (len(ids), len(ids) + len(more))


def test_salts_and_bodies_that_no_replica_takes_share_no_blocks():
    deep = b'{"messages": ' + b"[" * 600 + b"]" * 600 + b"}"

    for body in (b"{", deep, {"prompt": "a", "user": "\ud800"}, {"prompt": [1.5, float("nan")]}):
        found = hints(body)

        assert (found.prompt_tokens, found.session) == (0, None)
    assert hints({"prompt": "x" * 64}, method="GET").prompt_tokens == 0
    assert not set(block_hashes(range(8), BLOCK, salt="a")) & set(block_hashes(range(8), BLOCK))
    with pytest.raises(ConfigError, match="block_tokens of 1 or more, got 0"):
        block_hashes([1], 0)


def test_prompts_share_blocks_within_chats_salts_tenants_and_models():
    turns = [{"role": "system", "content": "s" * 40}, {"role": "user", "content": "u" * 40}]
    tools = [{"type": "function", "function": {"name": "f"}}]

    first = hints({"messages": turns, "tools": tools})
    second = hints({"messages": [*turns, {"role": "user", "content": "more"}], "tools": tools})

    assert common_blocks(first, second) == len(first.prompt_blocks) > 10
    assert common_blocks(first, hints({"messages": turns})) == 0

    body = {"prompt": "x" * 64}
    plain = hints(body)

    assert common_blocks(plain, hints(body)) == 8
    others = [hints(body | more) for more in ({"cache_salt": "s"}, {"model": "m"})]
    for other in (*others, hints(body, tenant="b")):
        assert common_blocks(plain, other) == 0
    # the session is named by header or body
    header = [(b"x-session-id", b"h")]
    assert hints({"user": "u"}, headers=header).session == "h"
    assert hints({"user": "u"}).session == "u"
    assert hints({"user": "u", "prompt_cache_key": "k"}).session == "k"
    assert hints({"user": 3}).session is None


@given(
    st.one_of(
        st.binary(max_size=20),
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.text(max_size=3),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from(["prompt", "messages", "user", "a"]), inner)
            ),
            max_leaves=6,
        ),
    )
)
def test_any_body_is_accepted(body):
    found = hints(body if isinstance(body, bytes) else json.dumps(body).encode())
    assert len(found.prompt_blocks) == found.prompt_tokens // BLOCK_WORDS


BLOCK = 4
tokens = st.lists(st.integers(0, 3), max_size=14)


@given(first=tokens, second=tokens)
def test_equal_hashes_are_equal_prefixes(first, second):
    hashes = [block_hashes(each, BLOCK) for each in (first, second)]
    assert [len(each) for each in hashes] == [len(first) // BLOCK, len(second) // BLOCK]
    assert common(*hashes) == common(first, second) // BLOCK


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


kinds = st.sampled_from(["send", "finish", "stored", "removed", "lost"])


@given(
    steps=st.lists(st.tuples(kinds, st.sampled_from(REPLICAS), chains), max_size=40), asked=chains
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
    with pytest.raises(ConfigError, match="expected a KV event of type BlockStored"):
        index.apply_events("a", [{"type": "BlockMoved", "block_hashes": [1]}])
    # the place of a lost replica is used again
    index = BlockIndex(max_blocks=10)
    for name in ("a", "b"):
        index.expect(name, (1, 2))
    index.forget("a")
    index.expect("c", (1,))
    assert index.cached_blocks((1, 2)) == {"b": 2, "c": 1}
