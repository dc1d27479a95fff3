"""Hashes of blocks of tokens, for routers that see tokens, and KV events in these hashes.

Engines salt the hashes of their KV events, so that tenants cannot guess them. A router without the
engine's secret hashes the tokens of the events itself:

    engine    BlockStored(hashes e0 e1, token ids of 2 blocks)  --->  BlockStored(hashes r0 r1)
              BlockRemoved(e1)                                  --->  BlockRemoved(r1)

Prompts of two tenants with equal tokens then have equal hashes. A wrong guess costs time only: the
engine never shares KV between tenants.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from quire.errors import ConfigError
from quire.scale.routing.base import KvEvent
from quire.scale.routing.block_index import CLEARED, REMOVED, STORED

HASH_BYTES = 16


def block_hashes(token_ids: Sequence[int], block_tokens: int, salt: str = "") -> tuple[bytes, ...]:
    """Hashes of the whole blocks of a prompt; each covers the block and everything before it.

    Args:
        token_ids: tokens of the prompt.
        block_tokens: tokens of a block; the block size of the engines.
        salt: separates prompts that cannot share KV, such as those of different tenants. Leave it
            empty if the router follows KV events.
    """
    if block_tokens < 1:
        raise ConfigError(f"expected block_tokens of 1 or more, got {block_tokens}")
    return tuple(_chain(_root(salt), token_ids, block_tokens))


def _root(salt: str) -> bytes:
    return hashlib.blake2b(salt.encode(), digest_size=HASH_BYTES).digest()


def _chain(parent: bytes, token_ids: Sequence[int], block_tokens: int) -> Iterator[bytes]:
    tokens = np.asarray(token_ids, dtype=np.int64)
    for first in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = tokens[first : first + block_tokens].tobytes()
        parent = hashlib.blake2b(parent + block, digest_size=HASH_BYTES).digest()
        yield parent


class EventTranslator:
    """Rewrites the KV events of one engine to the hashes of `block_hashes`.

    Attributes:
        num_unknown: stored blocks whose parent is unknown because events were missed. They are
            left out, so the router expects no hits on them.
    """

    def __init__(self, block_tokens: int) -> None:
        self.num_unknown = 0
        self._block_tokens = block_tokens
        self._translated: dict[bytes, bytes] = {}  # of stored blocks
        self._num_copies: Counter[bytes] = Counter()  # equal tokens under different salts

    def __len__(self) -> int:
        return len(self._translated)

    def translate(self, events: Iterable[KvEvent]) -> list[KvEvent]:
        """Events in the router's hashes."""
        return [self._translate(event) for event in events]

    def _translate(self, event: KvEvent) -> KvEvent:
        kind = event.get("type")
        if kind == STORED:
            return {"type": STORED, "block_hashes": self._stored(event)}
        if kind == REMOVED:
            return {"type": REMOVED, "block_hashes": self._removed(event)}
        if kind == CLEARED:
            self._translated.clear()
            self._num_copies.clear()
        return event

    def _stored(self, event: KvEvent) -> list[bytes]:
        hashes, tokens, parent = (
            event[key] for key in ("block_hashes", "token_ids", "parent_block_hash")
        )
        assert isinstance(hashes, Sequence), "an event lists its blocks"
        assert isinstance(tokens, Sequence), "an event lists its tokens"
        if event["block_size"] != self._block_tokens:
            raise ConfigError(
                f"expected KV events with blocks of {self._block_tokens} tokens, got "
                f"{event['block_size']}: set the router's block size to that of the engines"
            )
        start = _root("") if parent is None else self._translated.get(_as_bytes(parent))
        if start is None:
            self.num_unknown += len(hashes)
            return []
        found = list(_chain(start, tokens, self._block_tokens))
        for engine_hash, block in zip(hashes, found, strict=True):
            if engine_hash not in self._translated:
                self._translated[engine_hash] = block
                self._num_copies[block] += 1
        return found

    def _removed(self, event: KvEvent) -> list[bytes]:
        hashes = event["block_hashes"]
        assert isinstance(hashes, Sequence), "an event lists its blocks"
        removed = []
        for engine_hash in hashes:
            block = self._translated.pop(engine_hash, None)
            if block is not None:
                self._num_copies[block] -= 1
                if not self._num_copies[block]:
                    del self._num_copies[block]
                    removed.append(block)
        return removed


def _as_bytes(value: object) -> bytes:
    assert isinstance(value, bytes), "hashes of KV events are bytes"
    return value
