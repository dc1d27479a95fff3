"""Iteration-level batching: a row that is free is filled at once, its prompt read in one step.

step   row 0    row 1                 row 2
7      decodes  decodes, and ends     decodes
8      decodes  reads a whole prompt  decodes      <- selective batching: rows of any kind
"""

from dataclasses import dataclass

from quire.scheduler.batchers.base import Batcher, BatcherRule, BatchState, Moves
from quire.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class Orca(BatcherRule):
    """As `continuous`, but no prompt is cut that a step can hold beside a full batch.

    Source: Orca (Yu et al. 2022): iteration-level scheduling, first come first served, at most
    `max_num_seqs` requests. Its slots for whole answers are `--admission reserved` here.

    Differs from the paper: a prompt longer than a step is read in several, beside decoding rows.
    """

    name = "orca"

    def num_rows(self, max_num_seqs: int) -> int:
        """See `BatcherRule`."""
        return max_num_seqs

    def make(self, state: BatchState) -> Batcher:
        """See `BatcherRule`."""
        beside_others = state.max_num_batched_tokens - state.max_num_seqs
        return WholePrompts(min(state.chunk_tokens, beside_others))


class WholePrompts(Batcher):
    """Lets a prompt in when the step can read all of it.

    Args:
        longest: tokens of a prompt that a step can hold whatever decodes; longer ones are cut.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest

    def begin(self) -> Moves | None:
        """See `Batcher`."""
        return None

    def decoding(self, ready: list[Request]) -> list[Request]:
        """See `Batcher`."""
        return ready

    def candidate(self, head: Request, budget: int) -> Request | None:
        """See `Batcher`."""
        return None if budget < head.num_tokens <= self._longest else head

    def entered(self, request: Request) -> None:
        """See `Batcher`."""

    def reads(self, request: Request) -> bool:
        """See `Batcher`."""
        return True

    def prefill_tokens(self, budget: int) -> int:
        """See `Batcher`."""
        return budget

    def stalled(self) -> bool:
        """See `Batcher`."""
        return False
