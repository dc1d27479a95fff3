"""Continuous batching: requests that fit are admitted in every step, with chunked prefill."""

from dataclasses import dataclass

from quire.scheduler.batchers.base import Batcher, BatchState, BatchSwaps, PagedRule
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
        """See `Batcher`."""

    def may_compute(self, request: Request) -> bool:
        return True

    def prefill_tokens(self, budget: int) -> int:
        return budget

    def stalled(self) -> bool:
        return False
