"""Iteration-level batching: a row that is free is filled at once, its prompt read in one step.

step   row 0    row 1                 row 2
7      decodes  decodes, and ends     decodes
8      decodes  reads a whole prompt  decodes      <- selective batching: rows of any kind
"""

from dataclasses import dataclass

from quire.scheduler.batchers.base import Batcher, BatchState, BatchView, DenseRule, PagedRule, Q
from quire.scheduler.batchers.continuous import EveryStep
from quire.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class Orca(PagedRule, DenseRule):
    """As `continuous`, but no prompt is cut that a step can hold beside a full batch.

    Source: Orca (Yu et al. 2022): iteration-level scheduling, first come first served, at most
    `max_num_seqs` requests. Its slots for whole answers are `--admission reserved` here.

    Differs from the paper: a prompt longer than a step is read in several, beside decoding rows.
    On dense rows a prompt is read by itself and embedded before the step: there is no padding and
    no queue, and the other rows wait while it is read.
    """

    name = "orca"

    def make(self, state: BatchState) -> Batcher:
        """See `PagedRule`."""
        beside_others = state.max_num_batched_tokens - state.max_num_seqs
        return WholePrompts(min(state.chunk_tokens, beside_others))

    def next_group(self, view: BatchView[Q]) -> list[Q]:
        """See `DenseRule`: the first in line, when there is a row for it."""
        return list(view.waiting[:1])


class WholePrompts(EveryStep):
    """Lets a prompt in when the step can read all of it.

    Args:
        longest: tokens of a prompt that a step can hold whatever decodes; longer ones are cut.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest

    def candidate(self, head: Request, budget: int) -> Request | None:
        """See `Batcher`."""
        return None if budget < head.num_tokens <= self._longest else head
