"""Load of the rebatch bench: BATON's two workloads and a recorded trace, with scaled lengths."""

import csv
import random
from dataclasses import dataclass
from importlib.resources import as_file, files

from quire.sim.traces.base import TraceOptions
from quire.sim.traces.loading import load_trace

_LENGTHS, _TRACE = "rebatch_lengths.csv", "azure_conversation.csv.gz"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceQuery:
    """One query.

    Attributes:
        prompt_tokens: length of the prompt.
        new_tokens: length of the output, which never ends early.
        arrival_s: arrival time in seconds.
        priority: lower values run first.
    """

    prompt_tokens: int
    new_tokens: int
    arrival_s: float = 0.0
    priority: int = 1

    @property
    def final_tokens(self) -> int:
        """Tokens of prompt and output."""
        return self.prompt_tokens + self.new_tokens


Load = tuple[TraceQuery, ...]


def workload(name: str, scale: float, queries: int | None = None) -> Load:
    """A workload of BATON's section 5.1; its lengths were drawn once and ship with Quire.

    w1: 120 queries, long-in short-out : short-in long-out : short-short = 1:1:2; long 4,680 to
    5,720 tokens (4,000 words +/- 10 %, 1.3 tokens per word), short 40 to 520. w2: 30 queries, both
    lengths 40 to 260.

    Args:
        name: w1 or w2.
        scale: factor on all lengths; scaled lengths are at least 2.
        queries: number of leading queries; None: all.
    """
    text = files("quire").joinpath("assets", _LENGTHS).read_text(encoding="utf-8")
    rows = [row for row in csv.DictReader(text.splitlines()) if row["workload"] == name]
    return tuple(
        TraceQuery(
            prompt_tokens=_scaled(row["prompt_tokens"], scale),
            new_tokens=_scaled(row["new_tokens"], scale),
        )
        for row in rows[:queries]
    )


def _scaled(tokens: str, scale: float) -> int:
    return max(2, round(int(tokens) * scale))


def recorded(requests: int, length_scale: float, span_s: float, urgent_every: int) -> Load:
    """The first requests of the Azure conversation trace.

    Args:
        requests: number of requests.
        length_scale: factor on lengths.
        span_s: time from the first arrival to the last, in seconds.
        urgent_every: one of this many requests has priority 0, the others 1.
    """
    options = TraceOptions(requests=requests, length_scale=length_scale)
    with as_file(files("quire").joinpath("assets", _TRACE)) as path:
        trace = load_trace(path, options)
    last_s = trace.requests[-1].arrival_s or 1.0
    return tuple(
        TraceQuery(
            prompt_tokens=max(2, request.prompt_tokens),
            new_tokens=max(2, request.answer.tokens),
            arrival_s=request.arrival_s / last_s * span_s,
            priority=int(number % urgent_every != urgent_every - 1),
        )
        for number, request in enumerate(trace.requests)
    )


def prompt_ids(load: Load, vocab_size: int) -> list[list[int]]:
    """Random prompt token ids; equal in every process."""
    rng = random.Random(0)
    return [[rng.randrange(vocab_size) for _ in range(query.prompt_tokens)] for query in load]
