"""What a trace is: requests with times and lengths, and which of their tokens are the same."""

from dataclasses import dataclass
from typing import NamedTuple

DEFAULT_TENANT = "default"


class Segment(NamedTuple):
    """A run of tokens inside a prompt or an answer.

    Attributes:
        content: segments of equal content hold equal tokens, as far as both reach. What loaders
            read is 0 or more; text that belongs to one request alone is negative.
        tokens: length.
    """

    content: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One recorded request.

    Attributes:
        line: where it stands in its file, for errors and for its name.
        arrival_s: seconds; only differences count.
        prompt: what it asks, piece by piece; at least one token.
        answer: what was generated; 0 tokens where nothing was.
        tenant: on whose account.
        priority: lower goes first, within its tenant.
        deadline_s: seconds from its arrival in which its answer is wanted; None: whenever.
    """

    line: int
    arrival_s: float
    prompt: tuple[Segment, ...]
    answer: Segment
    tenant: str = DEFAULT_TENANT
    priority: int = 0
    deadline_s: float | None = None

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return sum(segment.tokens for segment in self.prompt)

    @property
    def tokens(self) -> int:
        """Length at its end."""
        return self.prompt_tokens + self.answer.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests in the order of their arrival, the first one at 0 s.

    Attributes:
        name: of the file.
        format: how it was written.
        requests: at least one.
        num_dropped: requests left out because they are longer than was asked for.
    """

    name: str
    format: str
    requests: tuple[TraceRequest, ...]
    num_dropped: int = 0

    @property
    def tenants(self) -> tuple[str, ...]:
        """Names of the tenants, sorted."""
        return tuple(sorted({request.tenant for request in self.requests}))


def own_prompt(line: int, tokens: int) -> tuple[Segment, ...]:
    """A prompt that shares nothing with any other request's."""
    return (Segment(-2 * line - 1, tokens),)


def own_answer(line: int, tokens: int) -> Segment:
    """An answer that no prompt repeats."""
    return Segment(-2 * line - 2, tokens)
