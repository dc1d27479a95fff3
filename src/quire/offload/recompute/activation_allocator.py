"""Allocates blocks of CPU memory for the attention inputs (X) of slots: bookkeeping only.

    row     | no X (a cached prefix) | X: blocks of slots, all layers in each | no X |
             0                        first                                    end

A block holds the activations of some slots in every layer, contiguous for each layer. So all blocks
have the same size and copies are large. The activation of a token has the slot of its KV; it moves
and is freed with that slot.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.errors import InvariantError


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring slots of one block.

    Attributes:
        start: first slot.
        block: index of the block.
        offset: offset of the first slot in the block.
        tokens: number of slots.
    """

    start: int
    block: int
    offset: int
    tokens: int


@dataclass(slots=True)
class Stored:
    """Blocks of a sequence: the activations of its slots from `first` to `end`."""

    first: int
    end: int
    blocks: list[int] = field(default_factory=list)


class ActivationAllocator:
    """Blocks of activations by sequence. Each block is free or belongs to one sequence.

    Args:
        num_blocks: total number of blocks.
        block_tokens: slots of a block.
        page_tokens: slots of a page; stored ranges begin at a page boundary.
    """

    def __init__(self, num_blocks: int, block_tokens: int, page_tokens: int) -> None:
        self.num_blocks, self.block_tokens = num_blocks, block_tokens
        self._page_tokens = page_tokens
        self._free = list(range(num_blocks - 1, -1, -1))
        self._rows: dict[int, Stored] = {}
        self._detached: list[Stored] = []
        self.peak_blocks = 0

    @property
    def used_blocks(self) -> int:
        """Blocks allocated to sequences."""
        return self.num_blocks - len(self._free)

    def known(self, row: int) -> range:
        """Slots of a sequence with stored activations; empty if none are stored."""
        stored = self._rows.get(row)
        return range(stored.first, stored.end) if stored is not None else range(0)

    def note(self, row: int, start: int, tokens: int, until: int) -> list[Segment]:
        """Allocate blocks for the activations of new slots before `until`, while blocks are free.

        Args:
            row: the sequence.
            start: first new slot. Activations stored from it on are replaced.
            tokens: number of new slots.
            until: first slot whose activation is not stored.

        Returns:
            Locations to write to, in order; slots outside of them are not stored.
        """
        stored = self._rows.get(row)
        if stored is None or start > stored.end:
            if start >= until or self.block_tokens * len(self._free) < self._page_tokens:
                return []  # not one page could be stored
            self.forget([row])
            first = -(-start // self._page_tokens) * self._page_tokens
            stored = self._rows[row] = Stored(first, first)
        stored.end = max(stored.first, min(stored.end, start))
        stop = max(stored.end, min(start + tokens, until))
        self._extend(stored, stop)
        begin = stored.end
        stored.end = min(stop, stored.first + len(stored.blocks) * self.block_tokens)
        return self.segments(row, begin, stored.end)

    def segments(self, row: int, start: int, stop: int) -> list[Segment]:
        """Locations of stored slots of a sequence, in order."""
        stored, found = self._rows[row], []
        while start < stop:
            index, offset = divmod(start - stored.first, self.block_tokens)
            tokens = min(self.block_tokens - offset, stop - start)
            found.append(Segment(start, stored.blocks[index], offset, tokens))
            start += tokens
        return found

    def cut(self, row: int, slots: int) -> None:
        """Free the activations from this slot on."""
        stored = self._rows.get(row)
        if stored is None:
            return
        if slots <= stored.first:
            self.forget([row])
            return
        stored.end = min(stored.end, slots)
        needed = -(-(stored.end - stored.first) // self.block_tokens)
        self._free += stored.blocks[needed:]
        del stored.blocks[needed:]

    def forget(self, rows: Iterable[int]) -> None:
        """Free all activations of sequences."""
        for row in rows:
            stored = self._rows.pop(row, None)
            if stored is not None:
                self._free += stored.blocks

    def detach(self, row: int) -> "Stored | None":
        """Return the blocks of a sequence that leaves the arena; they stay allocated."""
        stored = self._rows.pop(row, None)
        if stored is not None:
            self._detached.append(stored)
        return stored

    def attach(self, row: int, stored: "Stored") -> None:
        """Give the blocks of a detached sequence to its new row."""
        self._detached = [other for other in self._detached if other is not stored]
        self._rows[row] = stored

    def discard(self, stored: "Stored") -> None:
        """Free the blocks of a detached sequence."""
        self._detached = [other for other in self._detached if other is not stored]
        self._free += stored.blocks

    def check(self) -> None:
        """Check that every block is free or belongs to one sequence.

        Raises:
            InvariantError: a block is lost or has two owners.
        """
        owners = (*self._rows.values(), *self._detached)
        named = sorted([*self._free, *(b for stored in owners for b in stored.blocks)])
        if named != list(range(self.num_blocks)):
            raise InvariantError("activation blocks are lost, or have two owners")
        for row, stored in self._rows.items():
            if not 0 <= stored.end - stored.first <= len(stored.blocks) * self.block_tokens:
                raise InvariantError(
                    f"row {row} has more or fewer slots than its activation blocks"
                )

    def _extend(self, stored: Stored, stop: int) -> None:
        needed = -(-(stop - stored.first) // self.block_tokens) - len(stored.blocks)
        for _ in range(min(needed, len(self._free))):
            stored.blocks.append(self._free.pop())
        self.peak_blocks = max(self.peak_blocks, self.used_blocks)
