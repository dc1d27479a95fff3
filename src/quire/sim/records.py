"""What a simulation remembers of each request."""

import math
from dataclasses import dataclass

from quire.sim.traces.base import TraceRequest

TOO_LONG = "context"
NEVER_FITS = "memory"


@dataclass(slots=True)
class RequestRecord:
    """One request's life, in virtual seconds; NaN where it never came so far.

    Attributes:
        line: of the trace.
        tenant: on whose account.
        arrival_s: when it came.
        prompt_tokens: of its prompt.
        answer_tokens: generated in the end; an answer of 0 tokens counts as 1, for a request that
            runs samples once.
        cut_tokens: of its recorded answer, left out because the context ended.
        refused: why it never ran: its prompt does not fit the model's context, or its KV the
            memory. None: it was answered.
        admitted_s: begin of the first step with it.
        first_token_s, finish_s: ends of the steps with its first and last token.
        cached_tokens: of its prompt, found in the cache when it entered.
        preemptions: times it was thrown out.
        deadline_s: seconds from its arrival in which its answer was wanted; None: whenever.
    """

    line: int
    tenant: str
    arrival_s: float
    prompt_tokens: int
    answer_tokens: int
    cut_tokens: int = 0
    refused: str | None = None
    admitted_s: float = math.nan
    first_token_s: float = math.nan
    finish_s: float = math.nan
    cached_tokens: int = 0
    preemptions: int = 0
    deadline_s: float | None = None

    @property
    def finished(self) -> bool:
        """Whether it was answered."""
        return not math.isnan(self.finish_s)

    @property
    def due_s(self) -> float:
        """When its answer is wanted; infinity where that does not matter."""
        return math.inf if self.deadline_s is None else self.arrival_s + self.deadline_s

    @property
    def in_time(self) -> bool:
        """Whether it was answered by then."""
        return self.finish_s <= self.due_s

    @property
    def queue_s(self) -> float:
        """From its arrival to its first step."""
        return self.admitted_s - self.arrival_s

    @property
    def ttft_s(self) -> float:
        """Time to its first token."""
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Time per token after the first; NaN for an answer of one token."""
        if self.answer_tokens < 2:
            return math.nan
        return (self.finish_s - self.first_token_s) / (self.answer_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """From its arrival to its end."""
        return self.finish_s - self.arrival_s


def open_record(request: TraceRequest, max_positions: int) -> RequestRecord:
    """The record of a request that has just come.

    An answer that would pass the model's context is cut there, as an engine cuts it; a prompt that
    leaves no room for a token is refused.
    """
    prompt, wanted = request.prompt_tokens, max(1, request.answer.tokens)
    room = max_positions - prompt
    answer = max(0, min(wanted, room))
    return RequestRecord(
        line=request.line,
        tenant=request.tenant,
        arrival_s=request.arrival_s,
        prompt_tokens=prompt,
        answer_tokens=answer,
        cut_tokens=wanted - answer,
        deadline_s=request.deadline_s,
        refused=None if answer else TOO_LONG,
    )
