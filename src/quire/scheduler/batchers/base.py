"""The seam of batchers: what each of them is asked at every step.

    begin        once, before anything of the step is planned
    decoding     which rows decode of those that could
    candidate    whom to let in, where somebody may enter
    reads        who may get tokens beside the decoding rows
    stalled      nobody got anything: may those that were held back move?

A batcher moves no KV itself and never counts pages: admission, limits and preemption go on as they
are under every one of them, and one that has nobody in must let somebody in.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from quire.scheduler.request import Request
from quire.tenancy.fair_queue import FairQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchState:
    """What a batcher may look at.

    Attributes:
        running: all that hold KV; the scheduler's own list.
        waiting: those that do not; the scheduler's own queue.
        max_num_seqs: rows of a batch.
        max_num_batched_tokens: tokens of a step at most.
        chunk_tokens: tokens of one prompt that a step reads at most.
        urgent: priority from which on, downwards, a request does not wait for others; None: none.
    """

    running: list[Request]
    waiting: FairQueue[Request]
    max_num_seqs: int
    max_num_batched_tokens: int
    chunk_tokens: int
    urgent: int | None = None

    def is_urgent(self, request: Request) -> bool:
        """Whether it takes the place of others."""
        return self.urgent is not None and request.priority <= self.urgent


@dataclass(frozen=True, slots=True)
class Moves:
    """KV of prefilled requests to be moved before a step, as far as there is room.

    Attributes:
        out: running requests; their KV waits on the host.
        back: waiting requests whose KV does.
    """

    out: Sequence[Request] = ()
    back: Sequence[Request] = ()


class Batcher(ABC):
    """One scheduler's batch."""

    @abstractmethod
    def begin(self) -> Moves | None:
        """Note who has ended, left or come since the last step, and fill rows that are free.

        Returns:
            What is to be moved; None for nothing.
        """

    @abstractmethod
    def decoding(self, ready: list[Request]) -> list[Request]:
        """Those that decode in this step.

        Args:
            ready: running requests that lack the KV of one token only.
        """

    @abstractmethod
    def candidate(self, head: Request, budget: int) -> Request | None:
        """Whom to try to let in; None where nobody of this tenant may enter now.

        Args:
            head: the first in line of its tenant, or the first that was never in.
            budget: tokens that the step has left to read.
        """

    @abstractmethod
    def entered(self, request: Request) -> None:
        """A request has entered the KV memory, for the first time or again."""

    @abstractmethod
    def reads(self, request: Request) -> bool:
        """Whether a running request that is not in the plan may get tokens of this step."""

    @abstractmethod
    def prefill_tokens(self, budget: int) -> int:
        """Tokens of prompts this step reads.

        Args:
            budget: what the decoding rows leave of a step.
        """

    @abstractmethod
    def stalled(self) -> bool:
        """Nobody could be planned: whether more requests may decode now than before."""


class BatcherRule(ABC):
    """A batcher as it is configured: its fields are its options, with defaults.

    Final classes are frozen dataclasses.
    """

    name: ClassVar[str]

    @property
    def holds_on_host(self) -> bool:
        """Whether KV of prefilled requests waits on the host."""
        return False

    @abstractmethod
    def num_rows(self, max_num_seqs: int) -> int:
        """Rows of KV memory it uses, where a batch has `max_num_seqs`."""

    @abstractmethod
    def make(self, state: BatchState) -> Batcher:
        """The batcher of one scheduler."""
