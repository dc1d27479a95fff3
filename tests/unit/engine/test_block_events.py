"""KV block events for routers: names, order and frames of vLLM."""

import logging
import sys

import pytest

from quire.engine.block_events import BlockEvents, BlockPublisher, as_arrays
from quire.errors import ConfigError
from quire.kv.prefix import PrefixBroadcast, PrefixListener

FIRST, SECOND = b"\x00" * 15 + b"\x01", b"\xff" * 16
TIMEOUT_MS = 5_000


def recorded():
    batches = []
    return BlockEvents(batches.append, "CPU", clock=lambda: 12.5), batches


def test_stored_event_has_hashes_parent_tokens_and_medium():
    events, batches = recorded()

    events.stored([FIRST, SECOND], None, [1, 2, 3, 4], 2)

    assert batches == [
        {
            "ts": 12.5,
            "events": [
                {
                    "type": "BlockStored",
                    "block_hashes": [FIRST, SECOND],
                    "parent_block_hash": None,
                    "token_ids": [1, 2, 3, 4],
                    "block_size": 2,
                    "lora_id": None,
                    "medium": "CPU",
                    "lora_name": None,
                }
            ],
        }
    ]


def test_serialized_batches_are_arrays_in_the_order_of_vllm():
    events, batches = recorded()
    events.cleared()
    events.stored([SECOND], FIRST, [3, 4], 2)
    events.removed([SECOND])

    assert [as_arrays(batch) for batch in batches] == [
        [12.5, [["AllBlocksCleared"]]],
        [12.5, [["BlockStored", [SECOND], FIRST, [3, 4], 2, None, "CPU", None]]],
        [12.5, [["BlockRemoved", [SECOND], "CPU"]]],
    ]


def test_broadcast_reaches_every_listener_and_removes_one_that_raises(caplog):
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
    assert [record.message for record in caplog.records] == [
        "prefix listener Broken raised and was removed"
    ]


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

    topic, number, payload = frames[-1]
    assert topic == b"kv-events"
    assert len(number) == 8
    assert int.from_bytes(number, "big") == first + len(frames)
    assert msgpack.unpackb(payload) == [
        1.0,
        [["BlockStored", [FIRST], None, [7, 8], 2, None, "GPU", None]],
    ]


def test_decoder_with_the_types_of_vllm_reads_the_batches(zmq):
    msgspec = pytest.importorskip("msgspec", reason="msgspec is not installed")
    import msgpack

    class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
        pass

    class BlockStored(KVCacheEvent):
        block_hashes: list[bytes | int]
        parent_block_hash: bytes | int | None
        token_ids: list[int]
        block_size: int
        lora_id: int | None
        medium: str | None

    class BlockRemoved(KVCacheEvent):
        block_hashes: list[bytes | int]
        medium: str | None

    class AllBlocksCleared(KVCacheEvent):
        pass

    class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
        ts: float
        events: list[BlockStored | BlockRemoved | AllBlocksCleared]
        data_parallel_rank: int | None = None

    events, batches = recorded()
    events.cleared()
    events.stored([SECOND], FIRST, [3, 4], 2)
    events.removed([SECOND])
    decode = msgspec.msgpack.Decoder(EventBatch).decode

    decoded = [decode(msgpack.packb(as_arrays(batch))).events[0] for batch in batches]

    assert decoded == [
        AllBlocksCleared(),
        BlockStored([SECOND], FIRST, [3, 4], 2, None, "CPU"),
        BlockRemoved([SECOND], "CPU"),
    ]


def test_address_that_cannot_be_bound_is_rejected(zmq):
    with pytest.raises(ConfigError, match=r"expected an address to bind, such as tcp"):
        BlockPublisher("nonsense")
