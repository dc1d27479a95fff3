"""Listeners of the prefix index know all cached prefixes; the ledger counts unused ones."""

from dataclasses import replace

from quire.config.generation_request import GenerationRequest
from quire.engine.block_events import BlockEvents
from support import engines
from support.ledger_sums import check_sums

PAGE_TOKENS = 4
PROMPT = [3, 5, 7, 11, 13, 17, 19, 23, 29, 31]


def engine_with(room, **kv):
    return engines.engine_for(
        engines.load("llama"), room=room, longest=24, page_tokens=PAGE_TOKENS, **kv
    )


def run(engine, prompt, **options):
    engine.submit(GenerationRequest(prompt, engines.greedy(4), **options))
    while engine.has_work:
        engine.step()
        engine.check()
        check_sums(engine.ledger())


def follow(engine):
    batches = []
    engine.prefix_events.subscribe(BlockEvents(batches.append, "CPU", clock=lambda: 0.0))
    return batches


def blocks_of(batches):
    """The blocks that a listener believes are stored: {hash: (parent, tokens)}."""
    stored = {}
    for [event] in (batch["events"] for batch in batches):
        if event["type"] == "BlockRemoved":
            for key in event["block_hashes"]:
                del stored[key]
            continue
        assert event["block_size"] * len(event["block_hashes"]) == len(event["token_ids"])
        parent = event["parent_block_hash"]
        assert parent is None or parent in stored
        for index, key in enumerate(event["block_hashes"]):
            first = index * event["block_size"]
            stored[key] = (parent, event["token_ids"][first : first + event["block_size"]])
            parent = key
    return stored


def chains(stored):
    """The tokens of every stored prefix from position 0."""

    def tokens_to(key):
        return [] if key is None else tokens_to(stored[key][0]) + stored[key][1]

    return sorted(tokens_to(key) for key in stored)


def test_listener_knows_every_prefix_that_can_be_shared():
    engine = engine_with(room=4)
    batches = follow(engine)
    run(engine, PROMPT)
    run(engine, PROMPT[:4] + PROMPT)

    found = chains(blocks_of(batches))

    assert PROMPT[:4] in found
    assert PROMPT[:8] in found
    assert PROMPT[:4] + PROMPT[:4] in found
    assert all(len(tokens) % PAGE_TOKENS == 0 for tokens in found)


def test_evicted_blocks_are_reported_as_removed():
    engine = engine_with(room=1)
    batches = follow(engine)
    for first in range(2, 10):
        run(engine, [first] * 10)

    kinds = [event["type"] for batch in batches for event in batch["events"]]

    assert "BlockRemoved" in kinds
    assert len(blocks_of(batches)) * PAGE_TOKENS <= 24


def test_unused_prefixes_are_owned_by_the_cache_in_ledger_and_stats():
    engine = engine_with(room=4)
    run(engine, PROMPT)

    idle = engine.ledger()

    assert engine.stats().cached_bytes == idle["axes"]["owner"]["prefix_cache"] > 0
    assert idle["requests"] == []


def test_cached_prefix_in_use_is_owned_by_its_request():
    engine = engine_with(room=4)
    run(engine, PROMPT, tenant="red")
    cached = engine.stats().cached_bytes
    engine.submit(GenerationRequest([*PROMPT, 2], engines.greedy(4), tenant="red"))
    engine.step()

    found = engine.ledger()

    [row] = found["requests"]
    used = [e["bytes"] for e in row["extents"] if (e["references"], e["sequences"]) == (2, 1)]
    assert engine.stats().cached_bytes == found["axes"]["owner"]["prefix_cache"] < cached
    assert row["exclusive_bytes"] == row["kv_bytes"] > sum(used) > 0
    engine.submit(
        GenerationRequest([*PROMPT, 2], engines.greedy(4), tenant="blue")
    )  # cannot share red's prefix
    engine.step()
    assert all(row["exclusive_bytes"] == row["kv_bytes"] for row in engine.ledger()["requests"])
    while engine.has_work:
        engine.step()


def test_events_of_a_request_start_with_admitted_and_end_with_freed():
    engine = engine_with(room=4)
    run(engine, PROMPT, request_id="a", tenant="red")
    run(engine, PROMPT, request_id="b", tenant="red")

    events = [replace(event, time_s=0.0) for event in engine.events.newest()]

    assert [event.number for event in events] == list(range(1, len(events) + 1))
    assert {event.tenant for event in events if event.request_id} == {"red"}
    by_request = {"a": [], "b": []}
    for event in events:
        by_request.setdefault(event.request_id, []).append(event)
    assert by_request["a"][0].kind == by_request["b"][0].kind == "admitted"
    assert by_request["a"][-1].kind == by_request["b"][-1].kind == "freed"
    assert by_request["a"][0].data["cached_tokens"] == 0
    assert by_request["b"][0].data["cached_tokens"] == 8
