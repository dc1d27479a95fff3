"""KV events in the shape of vLLM's, so that routers which know that engine know this one.

    EventBatch        [ts, [event, ...]]
    BlockStored       [name, block_hashes, parent_block_hash, token_ids, block_size, lora_id,
                       medium, lora_name]
    BlockRemoved      [name, block_hashes, medium]
    AllBlocksCleared  [name]

In Python a batch is a dict with these names. On the wire it is MessagePack: arrays in this order,
hashes as bytes. Names and order are those of vLLM's `distributed/kv_events.py`.
"""

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.errors import ConfigError

Event = Mapping[str, object]
Batch = Mapping[str, object]
Publish = Callable[[Batch], None]

MEDIA = {"cuda": "GPU", "cpu": "CPU"}
"""What a device is called in events."""

_FIELDS = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size"),
        *("lora_id", "medium", "lora_name"),
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}


class BlockEvents:
    """A `PrefixListener` that publishes what it hears, one batch for each call.

    Args:
        publish: takes batches.
        medium: where the blocks lie; one of the values of `MEDIA`.
        clock: seconds since 1970, for time stamps.
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
        """Nothing is stored (any more): what a new process says first."""
        self._send({"type": "AllBlocksCleared"})

    def _send(self, event: Event) -> None:
        self._publish({"ts": self._clock(), "events": [event]})


def as_arrays(batch: Batch) -> list[object]:
    """A batch as it goes over the wire, before it becomes MessagePack."""
    events = batch["events"]
    assert isinstance(events, list), "a batch has a list of events"
    return [batch["ts"], [_as_array(event) for event in events]]


def _as_array(event: Event) -> list[object]:
    name = event["type"]
    assert isinstance(name, str), "an event has a name"
    return [name, *(event[field] for field in _FIELDS[name])]


# ---- block publisher -----------------------------------------------------------------------------

# Publishes block events over ZeroMQ: topic, number, MessagePack, as vLLM does.

DEFAULT_TOPIC = "kv-events"
NUMBER_BYTES = 8
MOST_UNSENT = 100_000
"""Messages kept for a subscriber that is slow; after that it misses some and sees a gap."""


class BlockPublisher:
    """A PUB socket.

    A message is three frames: the topic, a number (8 bytes, big end first; 0, 1, 2, ...), and the
    batch in MessagePack. A subscriber that finds a gap in the numbers has missed something; when
    they begin again at 0, the engine has been started anew and stores nothing yet.

    Args:
        endpoint: where to listen, such as tcp://*:5557.
        topic: what subscribers ask for.

    Raises:
        ConfigError: the packages are not installed, or nobody can listen there.
    """

    def __init__(self, endpoint: str, topic: str = DEFAULT_TOPIC) -> None:
        self._zmq, self._msgpack = _package("zmq", "pyzmq"), _package("msgpack", "msgpack")
        self._topic = topic.encode()
        self._sent = 0
        self._socket = self._zmq.Context.instance().socket(self._zmq.PUB)
        self._socket.set(self._zmq.SNDHWM, MOST_UNSENT)
        try:
            self._socket.bind(endpoint)
        except self._zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"KV events cannot be published at {endpoint!r}: {error}; expected an address to "
                "listen on, such as tcp://*:5557"
            ) from error

    def __call__(self, batch: Batch) -> None:
        """Send a batch to whoever listens now. Never waits."""
        number = self._sent.to_bytes(NUMBER_BYTES, "big")
        payload = self._msgpack.packb(as_arrays(batch))
        self._socket.send_multipart([self._topic, number, payload])
        self._sent += 1

    def close(self) -> None:
        """Stop listening; what has not been sent is lost."""
        self._socket.close(linger=0)


def _package(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"publishing KV events needs the package {name}, which is not installed: "
            "pip install 'quire[events]'"
        ) from error
