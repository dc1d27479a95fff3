"""Continuous batching: whoever fits enters, prompts are read in chunks beside the decoding rows."""

from dataclasses import dataclass

from quire.scheduler.batchers.base import Batcher, BatchState, Moves, PagedRule
from quire.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class Continuous(PagedRule):
    """A step's tokens are shared by decoding rows, which come first, and chunks of prompts.

    Source: the schedulers of Sarathi-Serve (chunked prefill) and of vLLM.
    """

    name = "continuous"

    def make(self, state: BatchState) -> Batcher:
        """See `PagedRule`."""
        return EveryStep()


class EveryStep(Batcher):
    """Holds nobody back."""

    def begin(self) -> Moves | None:
        """See `Batcher`."""
        return None

    def decoding(self, ready: list[Request]) -> list[Request]:
        """See `Batcher`."""
        return ready

    def candidate(self, head: Request, budget: int) -> Request | None:
        """See `Batcher`."""
        return head

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
