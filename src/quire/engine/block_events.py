"""KV cache events in vLLM's format, for prefix-aware routers.

    EventBatch        [ts, [event, ...]]
    BlockStored       [name, block_hashes, parent_block_hash, token_ids, block_size, lora_id,
                       medium, lora_name]
    BlockRemoved      [name, block_hashes, medium]
    AllBlocksCleared  [name]

In Python a batch is a dict with these names. It is sent as MessagePack: arrays in this order,
hashes as bytes. Names and order are those of vLLM's `distributed/kv_events.py`.
"""

import errno
import importlib
import json
import logging
import os
import select
import stat
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from quire.errors import ConfigError
from quire.layout.extras import require_extra
from quire.scheduler.events import KVEvent

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
    """A `PrefixListener` that publishes one batch for each call, with Unix time in seconds."""

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

NUMBER_BYTES = 8
MAX_UNSENT = 100_000
"""Messages queued for a slow subscriber (ZeroMQ high-water mark); further messages are dropped."""


class BlockPublisher:
    """A ZeroMQ PUB socket for block events.

    A message has three frames: the topic, a sequence number (8 bytes, big-endian; 0, 1, 2, ...),
    and the batch in MessagePack. A gap in the sequence numbers means that the subscriber missed
    messages. Numbers that restart at 0 mean that the engine was restarted with an empty cache.

    Args:
        endpoint: address to bind, such as tcp://*:5557.
        topic: the topic that subscribers subscribe to.
    """

    def __init__(self, endpoint: str, topic: str = "kv-events") -> None:
        require_extra("events", "--kv-events-endpoint")
        self._zmq: Any = importlib.import_module("zmq")
        self._msgpack: Any = importlib.import_module("msgpack")
        self._topic = topic.encode()
        self._sent = 0
        self._socket = self._zmq.Context.instance().socket(self._zmq.PUB)
        self._socket.set(self._zmq.SNDHWM, MAX_UNSENT)
        try:
            self._socket.bind(endpoint)
        except (self._zmq.ZMQError, UnicodeEncodeError) as error:
            self.close()
            raise ConfigError(
                f"KV events cannot be published at {endpoint!r}: {error}; expected an address to "
                "bind, such as tcp://*:5557"
            ) from error

    def __call__(self, batch: Batch) -> None:
        number = self._sent.to_bytes(NUMBER_BYTES, "big")
        payload = self._msgpack.packb(as_arrays(batch))
        self._socket.send_multipart([self._topic, number, payload])
        self._sent += 1

    def close(self) -> None:
        """Close the socket; unsent messages are lost."""
        self._socket.close(linger=0)


MAX_HELD_BYTES = 16 << 20
"""Limit of the events buffered in memory while the disk is full."""

CLOSE_WAIT_S = 5.0
"""Seconds that `close` waits for the reader of a pipe to take the buffered events."""

logger = logging.getLogger(__name__)


_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0)
_REASONS = {
    errno.ENXIO: "no process has opened it for reading",
    errno.EPIPE: "its reader has closed it",
    errno.EAGAIN: "its reader does not keep up",
}


class EventFile:
    """A listener that appends every event to a file, one write per event.

    Lines are complete even if the process is killed, and a reader of the file sees each line at
    once. While the disk is full, events are buffered in memory; the next event that can be written
    writes them too. The log says so once. Use as a context manager, or call `close`.

    A pipe (FIFO) or terminal is a stream and cannot be truncated. A partly written line is finished
    before the next line begins. The engine never waits for the reader: lines are buffered as for a
    full disk. `close` waits `CLOSE_WAIT_S` for the reader.

    Attributes:
        num_lost: events that were neither written nor buffered.
    """

    def __init__(self, path: Path) -> None:
        self.num_lost = 0
        self._path = path
        self._held: deque[bytes] = deque()
        self._held_bytes = 0
        self._has_warned = False
        self._descriptor = -1
        try:
            self._descriptor = os.open(path, _FLAGS, 0o644)
        except OSError as error:
            raise self._refusal(error) from error
        mode = os.fstat(self._descriptor).st_mode
        self._is_stream = stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)
        if not (self._is_stream or stat.S_ISREG(mode)):
            os.close(self._descriptor)
            raise ConfigError(self._lacking("not a regular file, pipe or terminal"))

    def __call__(self, event: KVEvent) -> None:
        """Append one event after the buffered events."""
        if self._descriptor < 0:
            raise ValueError(f"{self._path} is closed")
        line = json.dumps(event.as_dict(), allow_nan=False).encode() + b"\n"
        if self._held_bytes + len(line) > MAX_HELD_BYTES:
            self.num_lost += 1
        else:
            self._held.append(line)
            self._held_bytes += len(line)
        try:
            self._write_held()
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("%s; events are buffered in memory", self._refusal(error))

    def close(self) -> None:
        """Write the buffered events and close the file. Later events raise `ValueError`."""
        if self._descriptor < 0:
            return
        try:
            self._write_all_held()
        except OSError as error:
            self.num_lost += len(self._held)
            raise self._refusal(error) from error
        finally:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1
        if self.num_lost:
            raise ConfigError(self._lacking("the disk was full"))

    def _write_all_held(self) -> None:
        """Write the buffered events; wait at most `CLOSE_WAIT_S` for the reader of a pipe."""
        deadline_s = time.monotonic() + CLOSE_WAIT_S
        while True:
            try:
                return self._write_held()
            except BlockingIOError:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise
                select.select([], [self._descriptor], [], left_s)

    def _write_held(self) -> None:
        while self._held:
            self._write(self._held[0])
            self._held_bytes -= len(self._held.popleft())

    def _write(self, line: bytes) -> None:
        left = line
        try:
            while left:  # a full disk, a pipe or a signal can cut a write short
                left = left[os.write(self._descriptor, left) :]
        except OSError:
            self._begun(line, left)
            raise

    def _begun(self, line: bytes, left: bytes) -> None:
        """Truncate a partly written line; for a stream, keep its rest for the next write."""
        if self._is_stream:
            self._held[0] = left
            self._held_bytes -= len(line) - len(left)
        elif len(left) < len(line):
            size = os.fstat(self._descriptor).st_size
            with suppress(OSError):
                os.ftruncate(self._descriptor, size - len(line) + len(left))

    def _refusal(self, error: OSError) -> ConfigError:
        reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
        return ConfigError(self._lacking(reason))

    def _lacking(self, reason: str) -> str:
        lacking = f"; the file lacks {self.num_lost:,} events" if self.num_lost else ""
        return (
            f"KV events cannot be written to {self._path}: {reason}{lacking}; choose another file "
            "for --kv-events, or free disk space"
        )

    def __enter__(self) -> "EventFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except ConfigError as refusal:
            if error is None:
                raise
            logger.warning("%s", refusal)  # the error that ends the command is reported separately
