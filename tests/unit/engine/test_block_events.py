"""KV block events for routers: names, order and frames of vLLM."""

import logging
import sys
from dataclasses import replace

import pytest

from quire.config.generation_request import GenerationRequest
from quire.engine.block_events import BlockEvents, BlockPublisher, as_arrays
from quire.errors import ConfigError
from quire.kv.prefix import PrefixBroadcast, PrefixListener
from support import engines
from support.ledger_sums import check_sums

FIRST, SECOND = b"\x00" * 15 + b"\x01", b"\xff" * 16
TIMEOUT_MS = 5_000


def recorded():
    batches = []
    return BlockEvents(batches.append, "CPU", clock=lambda: 12.5), batches


def test_stored_and_removed_events_have_hashes_parents_tokens_and_medium():
    events, batches = recorded()

    events.stored([FIRST, SECOND], None, [1, 2, 3, 4], 2)

    hashes = {"block_hashes": [FIRST, SECOND], "parent_block_hash": None}
    tokens = {"token_ids": [1, 2, 3, 4], "block_size": 2}
    rest = {"lora_id": None, "medium": "CPU", "lora_name": None}
    event = {"type": "BlockStored"} | hashes | tokens | rest
    assert batches == [{"ts": 12.5, "events": [event]}]

    engine = engine_with(room=1)
    batches = follow(engine)
    for first in range(2, 10):
        run(engine, [first] * 10)

    kinds = [event["type"] for batch in batches for event in batch["events"]]

    assert "BlockRemoved" in kinds
    assert len(blocks_of(batches)) * PAGE_TOKENS <= 24


def test_batches_are_arrays_in_the_order_of_vllm_and_reach_listeners_until_they_raise(caplog):
    events, batches = recorded()
    events.cleared()
    events.stored([SECOND], FIRST, [3, 4], 2)
    events.removed([SECOND])
    assert [as_arrays(batch) for batch in batches] == [
        [12.5, [["AllBlocksCleared"]]],
        [12.5, [["BlockStored", [SECOND], FIRST, [3, 4], 2, None, "CPU", None]]],
        [12.5, [["BlockRemoved", [SECOND], "CPU"]]],
    ]

    class Broken:
        def stored(self, *_):
            raise RuntimeError("no more")

        def removed(self, _):
            raise AssertionError("it was dropped")

    events, batches = recorded()
    broadcast = PrefixBroadcast()
    broadcast.subscribe(Broken())
    broadcast.subscribe(events)
    with caplog.at_level(logging.ERROR):
        broadcast.stored([FIRST], None, [1, 2], 2)
        broadcast.removed([FIRST])

    assert isinstance(broadcast, PrefixListener)
    assert isinstance(events, PrefixListener)
    assert [batch["events"][0]["type"] for batch in batches] == ["BlockStored", "BlockRemoved"]
    [record] = caplog.records
    assert record.message == "prefix listener Broken raised and was removed"


@pytest.mark.parametrize("module", ["zmq", "msgpack"])
def test_missing_package_error_names_the_extra_that_installs_it(module, monkeypatch):
    monkeypatch.setitem(sys.modules, "zmq", sys)  # any module: it is not used yet
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"needs .*{module}.*quire-llm\[events\]"):
        BlockPublisher("tcp://127.0.0.1:0")


@pytest.fixture
def zmq():
    pytest.importorskip("msgpack", reason="the extra `events` is not installed")
    return pytest.importorskip("zmq", reason="the extra `events` is not installed")


def test_subscriber_receives_topic_number_and_message_pack(zmq, tmp_path):
    import msgpack

    endpoint = f"ipc://{tmp_path}/events"
    publisher = BlockPublisher(endpoint)
    subscriber = zmq.Context.instance().socket(zmq.SUB)
    try:
        subscriber.set(zmq.RCVTIMEO, TIMEOUT_MS)
        subscriber.set(zmq.SUBSCRIBE, b"kv-events")
        subscriber.connect(endpoint)
        events = BlockEvents(publisher, "GPU", clock=lambda: 1.0)
        while not subscriber.poll(10):  # wait for the connection; earlier events are lost
            events.cleared()
        first = int.from_bytes(subscriber.recv_multipart()[1], "big")
        events.stored([FIRST], None, [7, 8], 2)
        frames = []
        while not frames or b"BlockStored" not in frames[-1][2]:
            frames.append(subscriber.recv_multipart())
    finally:
        subscriber.close(linger=0)
        publisher.close()

    with pytest.raises(ConfigError, match=r"expected an address to bind, such as tcp"):
        BlockPublisher("nonsense")
    topic, number, payload = frames[-1]
    assert topic == b"kv-events"
    assert len(number) == 8
    assert int.from_bytes(number, "big") == first + len(frames)
    event = ["BlockStored", [FIRST], None, [7, 8], 2, None, "GPU", None]
    assert msgpack.unpackb(payload) == [1.0, [event]]


PAGE_TOKENS = 4
PROMPT = [3, 5, 7, 11, 13, 17, 19, 23, 29, 31]


def engine_with(room, **kv):
    model = engines.load("llama")
    return engines.engine_for(model, room=room, longest=24, page_tokens=PAGE_TOKENS, **kv)


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


def test_cached_prefix_in_use_is_owned_by_its_request():
    engine = engine_with(room=4)
    run(engine, PROMPT, tenant="red")
    cached, idle = engine.stats().cached_bytes, engine.ledger()
    assert cached == idle["axes"]["owner"]["prefix_cache"] > 0  # of no request
    assert idle["requests"] == []
    engine.submit(GenerationRequest([*PROMPT, 2], engines.greedy(4), tenant="red"))
    engine.step()

    found = engine.ledger()

    [row] = found["requests"]
    used = [e["bytes"] for e in row["extents"] if (e["references"], e["sequences"]) == (2, 1)]
    assert engine.stats().cached_bytes == found["axes"]["owner"]["prefix_cache"] < cached
    assert row["exclusive_bytes"] == row["kv_bytes"] > sum(used) > 0
    other = GenerationRequest([*PROMPT, 2], engines.greedy(4), tenant="blue")
    engine.submit(other)  # cannot share red's prefix
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
    for name, cached_tokens in (("a", 0), ("b", 8)):
        first, *_, last = by_request[name]
        assert (first.kind, last.kind) == ("admitted", "freed")
        assert first.data["cached_tokens"] == cached_tokens
