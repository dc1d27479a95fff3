"""KV events in the shape of vLLM's, so that routers which know that engine know this one.

    EventBatch        [ts, [event, ...]]
    BlockStored       [name, block_hashes, parent_block_hash, token_ids, block_size, lora_id,
                       medium, lora_name]
    BlockRemoved      [name, block_hashes, medium]
    AllBlocksCleared  [name]

In Python a batch is a dict with these names. On the wire it is MessagePack: arrays in this order,
hashes as bytes. Names and order are those of vLLM's `distributed/kv_events.py`.
"""

import time
from collections.abc import Callable, Mapping, Sequence

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
