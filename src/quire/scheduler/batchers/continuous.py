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
        """See `PagedRule`."""
        return EveryStep()


class EveryStep(Batcher):
    """Batcher without restrictions."""

    def begin(self) -> BatchSwaps | None:
        """See `Batcher`."""
        return None

    def decoding(self, ready: list[Request]) -> list[Request]:
        """See `Batcher`."""
        return ready

    def candidate(self, head: Request, budget: int) -> Request | None:
        """See `Batcher`."""
        return head

    def admitted(self, request: Request) -> None:
        """See `Batcher`."""

    def may_compute(self, request: Request) -> bool:
        """See `Batcher`."""
        return True

    def prefill_tokens(self, budget: int) -> int:
        """See `Batcher`."""
        return budget

    def stalled(self) -> bool:
        """See `Batcher`."""
        return False
