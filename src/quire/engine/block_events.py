"""KV cache events in vLLM's format, for prefix-aware routers.

    EventBatch        [ts, [event, ...]]
    BlockStored       [name, block_hashes, parent_block_hash, token_ids, block_size, lora_id,
                       medium, lora_name]
    BlockRemoved      [name, block_hashes, medium]
    AllBlocksCleared  [name]

In Python a batch is a dict with these names. It is sent as MessagePack: arrays in this order,
hashes as bytes. Names and order are those of vLLM's `distributed/kv_events.py`.
"""

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.errors import ConfigError
from quire.layout.extras import require_extra

Event = Mapping[str, object]
Batch = Mapping[str, object]
Publish = Callable[[Batch], None]

MEDIA = {"cuda": "GPU", "cpu": "CPU"}
"""The medium of a device type in events."""

_FIELDS = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size"),
        *("lora_id", "medium", "lora_name"),
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}


class BlockEvents:
    """A `PrefixListener` that publishes one batch for each call.

    Args:
        publish: called with each batch.
        medium: where the blocks are stored; one of the values of `MEDIA`.
        clock: Unix time in seconds, for time stamps.
    """

    def __init__(
        self, publish: Publish, medium: str, clock: Callable[[], float] = time.time
    ) -> None:
        self._publish, self._medium, self._clock = publish, medium, clock

    def stored(
        self,
        block_hashes: Sequence[bytes],
        parent_hash: bytes | None,
        token_ids: Sequence[int],
        page_tokens: int,
    ) -> None:
        """See `PrefixListener.stored`."""
        self._send(
            {
                "type": "BlockStored",
                "block_hashes": list(block_hashes),
                "parent_block_hash": parent_hash,
                "token_ids": list(token_ids),
                "block_size": page_tokens,
                "lora_id": None,
                "medium": self._medium,
                "lora_name": None,
            }
        )

    def removed(self, block_hashes: Sequence[bytes]) -> None:
        """See `PrefixListener.removed`."""
        self._send(
            {
                "type": "BlockRemoved",
                "block_hashes": list(block_hashes),
                "medium": self._medium,
            }
        )

    def cleared(self) -> None:
        """Publish that no block is stored; the first event of a new process."""
        self._send({"type": "AllBlocksCleared"})

    def _send(self, event: Event) -> None:
        self._publish({"ts": self._clock(), "events": [event]})


def as_arrays(batch: Batch) -> list[object]:
    """Convert a batch to nested lists, ready for MessagePack."""
    events = batch["events"]
    assert isinstance(events, list), "a batch has a list of events"
    return [batch["ts"], [_as_array(event) for event in events]]


def _as_array(event: Event) -> list[object]:
    name = event["type"]
    assert isinstance(name, str), "an event has a name"
    return [name, *(event[field] for field in _FIELDS[name])]


# ---- block publisher -----------------------------------------------------------------------------

# Publishes block events over ZeroMQ: topic, sequence number, MessagePack, as vLLM does.

DEFAULT_TOPIC = "kv-events"
NUMBER_BYTES = 8
MOST_UNSENT = 100_000
"""Messages queued for a slow subscriber (ZeroMQ high-water mark); further messages are dropped."""


class BlockPublisher:
    """A ZeroMQ PUB socket for block events.

    A message has three frames: the topic, a sequence number (8 bytes, big-endian; 0, 1, 2, ...),
    and the batch in MessagePack. A gap in the sequence numbers means that the subscriber missed
    messages. Numbers that restart at 0 mean that the engine was restarted with an empty cache.

    Args:
        endpoint: address to bind, such as tcp://*:5557.
        topic: the topic that subscribers subscribe to.

    Raises:
        ConfigError: the packages are not installed, or the address cannot be bound.
    """

    def __init__(self, endpoint: str, topic: str = DEFAULT_TOPIC) -> None:
        require_extra("events", "--kv-events-endpoint")
        self._zmq: Any = importlib.import_module("zmq")
        self._msgpack: Any = importlib.import_module("msgpack")
        self._topic = topic.encode()
        self._sent = 0
        self._socket = self._zmq.Context.instance().socket(self._zmq.PUB)
        self._socket.set(self._zmq.SNDHWM, MOST_UNSENT)
        try:
            self._socket.bind(endpoint)
        except (self._zmq.ZMQError, UnicodeEncodeError) as error:
            self.close()
            raise ConfigError(
                f"KV events cannot be published at {endpoint!r}: {error}; expected an address to "
                "bind, such as tcp://*:5557"
            ) from error

    def __call__(self, batch: Batch) -> None:
        """Send a batch to all current subscribers. Never blocks."""
        number = self._sent.to_bytes(NUMBER_BYTES, "big")
        payload = self._msgpack.packb(as_arrays(batch))
        self._socket.send_multipart([self._topic, number, payload])
        self._sent += 1

    def close(self) -> None:
        """Close the socket; unsent messages are lost."""
        self._socket.close(linger=0)
