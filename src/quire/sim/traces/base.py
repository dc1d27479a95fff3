"""Data classes of traces: requests with times, lengths and the identity of their tokens."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, no_type_check

from quire.errors import ConfigError
from quire.layout.options import check_options, option

DEFAULT_TENANT = "default"
MAX_COPIES = 10_000


class TraceSegment(NamedTuple):
    """A segment of a prompt or output; equal contents have equal tokens at equal offsets."""

    content: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One recorded request."""

    line: int  # for errors and for the request's name
    arrival_s: float  # only differences count
    prompt: tuple[TraceSegment, ...]  # at least one token
    answer: TraceSegment  # may have 0 tokens
    tenant: str = DEFAULT_TENANT
    priority: int = 0  # lower values are scheduled first within a tenant
    deadline_s: float | None = None  # seconds from arrival

    @property
    def prompt_tokens(self) -> int:
        return sum(segment.tokens for segment in self.prompt)

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.answer.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests in the order of their arrival, the first one at 0 s."""

    name: str  # of the file
    format: str
    requests: tuple[TraceRequest, ...]
    num_dropped: int = 0  # requests that exceed the maximum length

    @property
    def tenants(self) -> tuple[str, ...]:
        return tuple(sorted({request.tenant for request in self.requests}))


def own_prompt(line: int, tokens: int) -> tuple[TraceSegment, ...]:
    """A prompt that shares no content with other requests."""
    return (TraceSegment(-2 * line - 1, tokens),)


def own_answer(line: int, tokens: int) -> TraceSegment:
    """An output that no prompt repeats."""
    return TraceSegment(-2 * line - 2, tokens)


# User options that change a trace before it is simulated.

AUTO = "auto"
TraceName = Literal["auto", "azure", "mooncake", "sharegpt", "vidur"]


@no_type_check  # run-time type checks in tests must not replace Quire's own errors
@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """How a trace is read, thinned and stretched."""

    format: TraceName = option(
        AUTO,
        help="format of the trace; auto: detected from the file",
        flag="trace-format",
        common=True,
    )
    requests: int | None = option(
        None, help="number of requests, the first by arrival time; unset: all", common=True
    )
    time_scale: float = option(
        1.0, help="scale factor of the times between arrivals; 0.5 doubles the request rate"
    )
    length_scale: float = option(1.0, help="scale factor of prompt and output lengths")
    max_tokens: int | None = option(
        None,
        help="maximum length of a request, prompt and output; longer requests are skipped and "
        "counted",
        unit="tokens",
        flag="max-length",
    )
    request_rate: float | None = option(
        None,
        help="Poisson arrivals at this rate; unset: arrival times of the trace, or all requests "
        "at once if the trace has none",
        unit="requests per second",
        common=True,
    )
    copies: int = option(
        1,
        help="copies of the trace with other contents, shifted in time: multiplies the load",
        flag="trace-copies",
    )
    tenants: str = option(
        "",
        help="tenants of the requests: column:NAME, round_robin:a,b or share:a=0.9,b=0.1",
        flag="trace-tenants",
    )
    seed: int = option(0, help="seed of random arrivals and tenants", flag="trace-seed")

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("requests", "max_tokens", "copies"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"expected {name} of 1 or more, got {value}")
        if self.copies > MAX_COPIES:
            raise ConfigError(f"expected copies of at most {MAX_COPIES:,}, got {self.copies:,}")
        if not 0 <= self.time_scale < math.inf:
            raise ConfigError(f"expected time_scale of 0 or more, got {self.time_scale}")
        if not 0 < self.length_scale < math.inf:
            raise ConfigError(f"expected length_scale above 0, got {self.length_scale}")
        if self.request_rate is not None and not 0 < self.request_rate < math.inf:
            raise ConfigError(f"expected request_rate above 0, got {self.request_rate}")
