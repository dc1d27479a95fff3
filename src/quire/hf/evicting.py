"""When the rows of a cache evict, and how far they read before: the engine's rules, row by row.

read up to the cap -> evict -> read `every` more -> evict -> ...      prefill_and_decode
read the prompt -> evict once | before answers                        prefill_end | decode
read -> no page is left -> evict -> read on                           pressure
"""

from collections.abc import Callable, Iterable
from functools import cache

import numpy as np

from quire.eviction.eviction import PolicyEvictor
from quire.eviction.eviction_rules import EvictionRules
from quire.hf.memory import SCRATCH_BYTES
from quire.kv.step import PagedKV
from quire.layout.eviction import PREFILL_END, PRESSURE
from quire.models.base import Decoder
from quire.scheduler.lane_slots import (
    Slots,
    evicting_table,
    held_slots,
    in_blocks,
    lookahead,
    over_cap,
    room_tokens,
    slots_to_keep,
)
from quire.scheduler.request import Request
from quire.scheduler.schedule_config import ScheduleConfig

BLOCK_TOKENS = ScheduleConfig().chunk_tokens  # bounds activations, as in the engine


class Evicting:
    """Evicts from rows of a batch.

    Args:
        decoder: the model.
        kv: memory and bytes.
        rules: the one rule of the cache.
    """

    def __init__(self, decoder: Decoder, kv: PagedKV, rules: EvictionRules) -> None:
        self._table = evicting_table(kv.memory)
        self._evictor: PolicyEvictor | None = None
        if rules.evicts:
            self._evictor = PolicyEvictor(kv, rules, SCRATCH_BYTES, cache(decoder.rotations))

    def block_tokens(self, row: Request, left: int) -> int:
        """Tokens of a row's next block, once `bring_down` has made room for them.

        Args:
            row: a sequence.
            left: of this forward.
        """
        tokens = min(left, room_tokens(row, self._table))
        return tokens if in_blocks(row) else min(tokens, BLOCK_TOKENS)

    def bring_down(self, row: Request) -> None:
        """Evict what must leave before the row's next block.

        Raises:
            PolicyError: the rule broke its contract.
            OutOfPages: no room for private copies of pages that beams share.
        """
        if self._table is None or self._evictor is None or row.eviction.spec.cap is None:
            return
        if row.eviction.pending and row.progress.num_computed >= len(row.prompt_token_ids):
            self._evictor.finalize(row)
            row.eviction.pending = False
        self._evict(row, slots_to_keep(row, self._table, lookahead(row)))

    def end_prompt(self, row: Request) -> None:
        """Evict at once what must leave a prompt that has been read, not with the next token."""
        if row.eviction.spec.when == PREFILL_END:
            self.bring_down(row)

    def relieve(self, rows: Iterable[Request], enough: Callable[[], bool]) -> None:
        """Memory is short: let rows that waited for that go down to their cap, the longest first.

        Args:
            rows: of the batch.
            enough: whether it is no longer short.
        """
        if self._table is None:
            return
        waiting = [row for row in rows if row.eviction.spec.when == PRESSURE]
        for row in sorted(waiting, key=self._held, reverse=True):
            if enough():
                return
            self._evict(row, over_cap(row, self._table, tokens=1))

    def _held(self, row: Request) -> int:
        assert self._table is not None, "asked of rows that evict"
        return int(held_slots(self._table, row).sum())

    def _evict(self, row: Request, keep: Slots | None) -> None:
        assert self._table is not None, "asked of rows that evict"
        assert self._evictor is not None, "likewise"
        if keep is not None and np.any(keep < held_slots(self._table, row)):
            self._evictor.evict(row, keep)
