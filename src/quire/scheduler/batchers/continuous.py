"""Iteration-level batching: free rows are filled in every step.

continuous   requests that fit are admitted in every step, with chunked prefill
orca         as `continuous`, but a prompt that fits in a step with a full batch is not split

step   row 0    row 1                    row 2
7      decodes  decodes, and ends        decodes
8      decodes  prefills a whole prompt  decodes      <- orca: selective batching, rows of any kind
"""

from dataclasses import dataclass

from quire.scheduler.batchers.base import (
    Batcher,
    BatchState,
    BatchSwaps,
    BatchView,
    DenseRule,
    PagedRule,
    Q,
)
from quire.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class Continuous(PagedRule):
    """Every step contains decoding rows, which come first, and chunks of prompts.

    Source: the schedulers of Sarathi-Serve (chunked prefill) and of vLLM.
    """

    name = "continuous"

    def make(self, state: BatchState) -> Batcher:
        return EveryStep()


class EveryStep(Batcher):
    """Batcher without restrictions."""

    def begin(self) -> BatchSwaps | None:
        return None

    def decoding(self, ready: list[Request]) -> list[Request]:
        return ready

    def candidate(self, head: Request, budget: int) -> Request | None:
        return head

    def admitted(self, request: Request) -> None:
        pass

    def may_compute(self, request: Request) -> bool:
        return True

    def prefill_tokens(self, budget: int) -> int:
        return budget

    def stalled(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Orca(PagedRule, DenseRule):
    """As `continuous`, but a prompt that fits in a step with a full batch is not split.

    Source: Orca (Yu et al. 2022): iteration-level scheduling, first come first served, at most
    `max_num_seqs` requests. Its slots for whole outputs are `--admission reserved` here.

    Differs from the paper: a prompt longer than a step is prefilled in several steps, with decoding
    rows. On dense rows a prompt is prefilled alone and inserted before the step: no padding, no
    queue, and the other rows wait during its prefill.
    """

    name = "orca"

    def make(self, state: BatchState) -> Batcher:
        free_tokens = state.max_num_batched_tokens - state.max_num_seqs
        return WholePrompts(min(state.chunk_tokens, free_tokens))

    def next_group(self, view: BatchView[Q]) -> list[Q]:
        """The first query, when there is a row for it."""
        return list(view.waiting[:1])


class WholePrompts(EveryStep):
    """Admits a prompt when the step can prefill all of it.

    Args:
        longest: longest prompt that fits in a step with a full batch; longer ones are split.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest

    def candidate(self, head: Request, budget: int) -> Request | None:
        return None if budget < head.num_tokens <= self._longest else head
