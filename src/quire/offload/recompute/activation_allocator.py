"""Which slots' attention inputs (X) are on the host, and in which blocks: bookkeeping alone.

    row     | no X (a cached prefix) | X: blocks of so many slots, all layers in each | no X |
             0                        first                                           end

A block holds the inputs of some slots in every layer, each layer's in one piece, so that blocks of
all sequences are alike and copies are large. An input lies at the slot of its token's KV; where
slots move or leave, inputs do so with them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.errors import InvariantError


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring slots of one block.

    Attributes:
        start: slot of the first.
        block: where they are.
        offset: of the first in the block.
        tokens: how many.
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
    """Blocks of inputs by sequence. Free blocks and those of sequences are all there are.

    Args:
        num_blocks: there are.
        block_tokens: slots of a block.
        page_tokens: slots of a page; what is kept begins with one.
    """

    def __init__(self, num_blocks: int, block_tokens: int, page_tokens: int) -> None:
        self.num_blocks, self.block_tokens = num_blocks, block_tokens
        self._page_tokens = page_tokens
        self._free = list(range(num_blocks - 1, -1, -1))
        self._rows: dict[int, _Kept] = {}
        self.peak_blocks = 0

    @property
    def used_blocks(self) -> int:
        """Blocks that sequences have."""
        return self.num_blocks - len(self._free)

    def known(self, row: int) -> range:
        """Slots of a sequence whose inputs are kept; empty where none are."""
        kept = self._rows.get(row)
        return range(kept.first, kept.end) if kept is not None else range(0)

    def note(self, row: int, start: int, tokens: int, until: int) -> list[Segment]:
        """Take room for the inputs of new slots, as far as they are wanted and there is room.

        Args:
            row: the sequence.
            start: first new slot. Slots from there on that were known are new ones now.
            tokens: how many are new.
            until: slots from this one on are not kept.

        Returns:
            Where to write, in order; what is left out of it is not kept.
        """
        kept = self._rows.get(row)
        if kept is None or start > kept.end:
            if start >= until or self.block_tokens * len(self._free) < self._page_tokens:
                return []  # nothing is begun that could not be held
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
        """Where known slots of a sequence are, in order."""
        kept, found = self._rows[row], []
        while start < stop:
            index, offset = divmod(start - kept.first, self.block_tokens)
            tokens = min(self.block_tokens - offset, stop - start)
            found.append(Segment(start, kept.blocks[index], offset, tokens))
            start += tokens
        return found

    def cut(self, row: int, slots: int) -> None:
        """Keep nothing from this slot on."""
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
        """Keep nothing of sequences."""
        for row in rows:
            kept = self._rows.pop(row, None)
            if kept is not None:
                self._free += kept.blocks

    def check(self) -> None:
        """Prove that every block is free or one sequence's.

        Raises:
            InvariantError: one is not.
        """
        named = sorted([*self._free, *(b for kept in self._rows.values() for b in kept.blocks)])
        if named != list(range(self.num_blocks)):
            raise InvariantError("blocks of attention inputs are lost, or have two owners")
        for row, kept in self._rows.items():
            if not 0 <= kept.end - kept.first <= len(kept.blocks) * self.block_tokens:
                raise InvariantError(f"inputs of row {row} are said to lie where no block is")

    def _extend(self, kept: _Kept, stop: int) -> None:
        needed = -(-(stop - kept.first) // self.block_tokens) - len(kept.blocks)
        for _ in range(min(needed, len(self._free))):
            kept.blocks.append(self._free.pop())
        self.peak_blocks = max(self.peak_blocks, self.used_blocks)
