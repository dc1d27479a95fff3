"""Prefixes in a tier: runs of blocks of one chain, found again by the keys of their blocks.

    entry    [tokens, pages of block 0][tokens, pages of block 1] ...    a record for each block
    facts    nature, keys of the blocks                                  beside it, in an index

A key says all that KV depends on but the machine's own: tokens, salt, model, codec, pages. The
nature says it again for the whole store, so that what another model or layout has left there is
never looked at; the tokens of a block lie in its record and are compared before it is used.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.errors import CorruptData, OffloadError, TierUnreachable
from quire.kv.prefix_key import Block
from quire.offload.tiers.base import Stored, Tier
from quire.offload.tiers.newest import NewestTier

Records = NDArray[np.uint8]
AWAY_S = 10.0
_ENTRY_BYTES = 4 << 20  # of a run, where a prefix is as long: a tier rounds entries up to 1 MiB

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a block lies.

    Attributes:
        entry: key of the tier.
        index: of its record.
    """

    entry: str
    index: int


class PrefixStore:
    """Blocks of prefixes in a tier.

    Safe to be asked by several threads; the tier is asked outside of the lock.

    Args:
        tier: that holds the bytes.
        nature: of everything that may be read: model, precision, codec, layout.
        record_bytes: of one block, its tokens included.
        makes_room: drop what was used longest ago where the tier is full; else its owner does.
        clock: seconds.

    Attributes:
        record_bytes: see above.
        is_shared: whether others write to the tier too.
        run_blocks: blocks of one entry at most.
        num_found: blocks that were there when it was opened.
        num_stored: blocks written so far.
        num_discarded: entries that were damaged, foreign to their key or gone when they were read.
        num_failed: entries that could not be written.
    """

    def __init__(
        self,
        tier: Tier,
        nature: str,
        record_bytes: int,
        *,
        makes_room: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.record_bytes, self.is_shared = record_bytes, not makes_room
        self.run_blocks = max(1, -(-_ENTRY_BYTES // record_bytes))
        self.num_stored = self.num_discarded = self.num_failed = 0
        self._clock, self._away_until_s = clock, -math.inf
        self._tier: Tier = NewestTier(tier, self._gone) if makes_room else tier
        self._nature = nature
        self._turn = threading.Lock()
        self._places: dict[bytes, Place] = {}
        self._entries: dict[str, tuple[bytes, ...]] = {}
        self._coming: set[bytes] = set()
        self.refresh()
        self.num_found = len(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_bytes(self) -> int:
        """Of all records that can be found."""
        return len(self._places) * self.record_bytes

    def refresh(self) -> None:
        """Look at what is in the tier now: others may write to it too.

        Raises:
            StorageError: it cannot be had.
        """
        found = self._tier.stored()
        with self._turn:
            for entry, stored in found.items():
                if entry not in self._entries and self._is_ours(stored):
                    self._note(entry, tuple(map(bytes.fromhex, stored.facts["keys"])))

    def _is_ours(self, stored: Stored) -> bool:
        facts = stored.facts
        if facts.get("nature") != self._nature:
            return False
        return stored.num_bytes == len(facts["keys"]) * self.record_bytes

    def _note(self, entry: str, keys: tuple[bytes, ...]) -> None:
        self._entries[entry] = keys
        for index, key in enumerate(keys):
            self._places[key] = Place(entry, index)

    # ---- looking up ----------------------------------------------------------------------------

    def find(self, blocks: Iterable[Block]) -> list[tuple[Block, Place]]:
        """The first of these blocks that are here, up to the first that is not."""
        found: list[tuple[Block, Place]] = []
        if self._is_away:
            return found
        with self._turn:
            for block in blocks:
                place = self._places.get(block.key)
                if place is None:
                    break
                found.append((block, place))
        return found

    def claim(self, keys: Sequence[bytes]) -> None:
        """These blocks are about to be written."""
        with self._turn:
            self._coming.update(keys)

    def lacks(self, key: bytes) -> bool:
        """Whether a block is neither here nor about to be written."""
        with self._turn:
            return key not in self._places and key not in self._coming

    # ---- bytes ---------------------------------------------------------------------------------

    def put(self, keys: Sequence[bytes], records: Records) -> bool:
        """Write a run of blocks; whether it is there now.

        Args:
            keys: of consecutive blocks of one chain.
            records: [blocks, record_bytes].
        """
        entry = keys[0].hex() + keys[-1].hex()
        facts = {"nature": self._nature, "keys": [key.hex() for key in keys]}
        try:
            if self._is_away:
                raise TierUnreachable("it did not answer a moment ago")
            self._tier.write(entry, records.reshape(-1).data, facts)
        except OffloadError as error:
            self._failed(error)
            return False
        finally:
            with self._turn:
                self._coming.difference_update(keys)
        with self._turn:
            self._note(entry, tuple(keys))
            self.num_stored += len(keys)
        return True

    def _failed(self, error: OffloadError) -> None:
        self.num_failed += 1
        if isinstance(error, TierUnreachable):
            self._leave_alone()
        if self.num_failed == 1:
            logger.warning(
                "a prefix could not be stored: %s; those that fail now stay silent", error
            )

    def read(self, blocks: Sequence[Block], place: Place, into: Records) -> None:
        """Read the records of consecutive blocks of one entry.

        Args:
            blocks: that are expected there.
            place: of the first of them.
            into: [blocks, record_bytes].

        Raises:
            OffloadError: they cannot be had; where they are damaged or others, they are dropped.
        """
        try:
            first = place.index * self.record_bytes
            self._tier.read(place.entry, into.reshape(-1).data, first)
        except TierUnreachable:
            self._leave_alone()
            raise
        except OffloadError as error:
            self._discard(place.entry, str(error))
            raise
        for block, record in zip(blocks, into, strict=True):
            if record[: len(block.tokens)].tobytes() != block.tokens:
                self._tier.drop(place.entry)
                self._discard(place.entry, "it has other tokens than its key says")
                raise CorruptData(f"{place.entry!r} has other tokens than its key says")

    @property
    def _is_away(self) -> bool:
        """Whether the tier did not answer a moment ago: nobody shall wait for that again."""
        return self._clock() < self._away_until_s

    def _leave_alone(self) -> None:
        if not self._is_away:
            logger.warning("the store of prefixes does not answer: it is left alone for a while")
            self._away_until_s = self._clock() + AWAY_S

    def _discard(self, entry: str, why: str) -> None:
        logger.warning("a stored prefix is discarded and will be computed again: %s", why)
        self.num_discarded += 1
        self._gone(entry)

    def _gone(self, entry: str) -> None:
        with self._turn:
            for key in self._entries.pop(entry, ()):
                place = self._places.get(key)
                if place is not None and place.entry == entry:
                    del self._places[key]

    def close(self) -> None:
        """Close the tier; what is stored stays."""
        self._tier.close()
