"""Publishes block events over ZeroMQ: topic, number, MessagePack, as vLLM does."""

import importlib
from typing import Any

from quire.engine.block_events import Batch, as_arrays
from quire.errors import ConfigError

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
