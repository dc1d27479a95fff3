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
        offset: of the first slot in the block.
        tokens: number of slots.
    """

    start: int
    block: int
    offset: int
    tokens: int


@dataclass(slots=True)
class _Kept:
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
        self._rows: dict[int, _Kept] = {}
        self.peak_blocks = 0

    @property
    def used_blocks(self) -> int:
        """Blocks allocated to sequences."""
        return self.num_blocks - len(self._free)

    def known(self, row: int) -> range:
        """Slots of a sequence with stored activations; empty if none are stored."""
        kept = self._rows.get(row)
        return range(kept.first, kept.end) if kept is not None else range(0)

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
        kept = self._rows.get(row)
        if kept is None or start > kept.end:
            if start >= until or self.block_tokens * len(self._free) < self._page_tokens:
                return []  # not one page could be stored
            self.forget([row])
            first = -(-start // self._page_tokens) * self._page_tokens
            kept = self._rows[row] = _Kept(first, first)
        kept.end = max(kept.first, min(kept.end, start))
        stop = max(kept.end, min(start + tokens, until))
        self._extend(kept, stop)
        begin = kept.end
        kept.end = min(stop, kept.first + len(kept.blocks) * self.block_tokens)
        return self.segments(row, begin, kept.end)

    def segments(self, row: int, start: int, stop: int) -> list[Segment]:
        """Locations of stored slots of a sequence, in order."""
        kept, found = self._rows[row], []
        while start < stop:
            index, offset = divmod(start - kept.first, self.block_tokens)
            tokens = min(self.block_tokens - offset, stop - start)
            found.append(Segment(start, kept.blocks[index], offset, tokens))
            start += tokens
        return found

    def cut(self, row: int, slots: int) -> None:
        """Free the activations from this slot on."""
        kept = self._rows.get(row)
        if kept is None:
            return
        if slots <= kept.first:
            self.forget([row])
            return
        kept.end = min(kept.end, slots)
        needed = -(-(kept.end - kept.first) // self.block_tokens)
        self._free += kept.blocks[needed:]
        del kept.blocks[needed:]

    def forget(self, rows: Iterable[int]) -> None:
        """Free all activations of sequences."""
        for row in rows:
            kept = self._rows.pop(row, None)
            if kept is not None:
                self._free += kept.blocks

    def check(self) -> None:
        """Check that every block is free or belongs to one sequence.

        Raises:
            InvariantError: a block is lost or has two owners.
        """
        named = sorted([*self._free, *(b for kept in self._rows.values() for b in kept.blocks)])
        if named != list(range(self.num_blocks)):
            raise InvariantError("activation blocks are lost, or have two owners")
        for row, kept in self._rows.items():
            if not 0 <= kept.end - kept.first <= len(kept.blocks) * self.block_tokens:
                raise InvariantError(
                    f"row {row} has more or fewer slots than its activation blocks"
                )

    def _extend(self, kept: _Kept, stop: int) -> None:
        needed = -(-(stop - kept.first) // self.block_tokens) - len(kept.blocks)
        for _ in range(min(needed, len(self._free))):
            kept.blocks.append(self._free.pop())
        self.peak_blocks = max(self.peak_blocks, self.used_blocks)
