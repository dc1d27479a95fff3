"""Load a trace from a file and options."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from quire.errors import ConfigError, TraceError
from quire.sim.traces.base import Trace, TraceOptions, TraceRequest, TraceSegment
from quire.sim.traces.formats import find_format


def with_copies(requests: list[TraceRequest], copies: int) -> list[TraceRequest]:
    """Requests of a trace and of its copies, by arrival time.

    Copy k of n starts at k / n of the trace and goes on with the beginning of the trace after its
    end. Copies share no content.
    """
    if copies == 1:
        return requests
    found = [request for copy in range(copies) for request in _copy(requests, copy, copies)]
    return sorted(found, key=lambda request: request.arrival_s)


def _copy(requests: list[TraceRequest], copy: int, copies: int) -> Iterator[TraceRequest]:
    span_s = requests[-1].arrival_s
    shift_s = span_s * copy / copies
    last_line = max(request.line for request in requests)
    for request in requests:
        later_s = request.arrival_s - shift_s
        yield replace(
            request,
            line=request.line + copy * last_line,
            arrival_s=later_s if later_s >= 0 else later_s + span_s,
            prompt=tuple(_moved(segment, copy, copies) for segment in request.prompt),
            answer=_moved(request.answer, copy, copies),
        )


def _moved(segment: TraceSegment, copy: int, copies: int) -> TraceSegment:
    """The segment with a content of its own; contents of one request stay negative."""
    content = segment.content
    moved = content * copies + copy if content >= 0 else (content + 1) * copies - copy - 1
    return segment._replace(content=moved)


def load_trace(path: Path, options: TraceOptions | None = None) -> Trace:
    """Read a trace: the first `requests` by arrival, scaled, without requests that are too long."""
    options = options or TraceOptions()
    column = tenant_column(options.tenants)
    found = find_format(options.format, path)
    recorded = sorted(found.read(path, column), key=lambda request: request.arrival_s)
    if not recorded:
        raise TraceError(f"{path.name} has no requests: expected one or more")
    recorded = recorded[: options.requests]
    scaled = [_stretched(request, options.length_scale) for request in recorded]
    kept = [r for r in scaled if options.max_tokens is None or r.tokens <= options.max_tokens]
    if not kept:
        raise TraceError(
            f"{path.name}: all {len(scaled):,} requests are longer than "
            f"max_tokens={options.max_tokens} (--max-length): raise it"
        )
    timed = with_copies(_timed(kept, options), options.copies)
    return Trace(
        name=path.name,
        format=found.name,
        requests=tuple(assign_tenants(timed, options.tenants, seed=options.seed)),
        num_dropped=len(scaled) - len(kept),
    )


def _stretched(request: TraceRequest, factor: int | float) -> TraceRequest:
    """A request with the lengths of all segments scaled; equal segments remain equal."""
    if factor == 1.0:
        return request
    return replace(
        request,
        prompt=tuple(_scaled(segment, factor) for segment in request.prompt),
        answer=_scaled(request.answer, factor),
    )


def _scaled(segment: TraceSegment, factor: int | float) -> TraceSegment:
    """A segment with a scaled length; a non-empty segment keeps at least one token."""
    return segment._replace(tokens=max(min(1, segment.tokens), round(segment.tokens * factor)))


def _timed(requests: Sequence[TraceRequest], options: TraceOptions) -> list[TraceRequest]:
    """Return the requests with arrival times from 0 s on."""
    times: Iterator[float]
    if options.request_rate is not None:
        draws = random.Random(options.seed)
        times = itertools.accumulate(
            (draws.expovariate(options.request_rate) for _ in itertools.count()), initial=0.0
        )
    else:
        first_s = requests[0].arrival_s
        times = ((r.arrival_s - first_s) * options.time_scale for r in requests)
    return [
        replace(request, arrival_s=arrival_s)
        for request, arrival_s in zip(requests, times, strict=False)
    ]


# Assignment of requests to tenants.
#
# column:NAME                 read from the file's column or key of this name
# round_robin:a,b,c           assigned in rotation
# share:big=0.95,small=0.05   random with these probabilities

COLUMN, ROUND_ROBIN, SHARE = "column", "round_robin", "share"
_FORMS = "column:NAME, round_robin:a,b or share:a=0.9,b=0.1"


def tenant_column(text: str) -> str | None:
    """The column that names the tenant; None if the file has no tenants."""
    kind, _, rest = text.partition(":")
    if not text:
        return None
    if kind not in (COLUMN, ROUND_ROBIN, SHARE) or not rest.strip():
        raise ConfigError(f"expected tenants as {_FORMS}, got {text!r}")
    return rest.strip() if kind == COLUMN else None


def assign_tenants(
    requests: Sequence[TraceRequest], text: str, *, seed: int
) -> Sequence[TraceRequest]:
    """Assign tenants to requests in the order of arrival; "" and `column` do not change them."""
    kind, _, rest = text.partition(":")
    if kind not in (ROUND_ROBIN, SHARE):
        return requests
    names = _round_robin(rest) if kind == ROUND_ROBIN else _drawn(rest, seed)
    return [replace(request, tenant=name) for request, name in zip(requests, names, strict=False)]


def _round_robin(rest: str) -> Iterator[str]:
    return itertools.cycle(_distinct([name.strip() for name in rest.split(",")]))


def _drawn(rest: str, seed: int) -> Iterator[str]:
    parts = [part.partition("=") for part in rest.split(",")]
    names = _distinct([name.strip() for name, _, _ in parts])
    shares = [_share(name, value) for name, (_, _, value) in zip(names, parts, strict=True)]
    draws = random.Random(seed)
    return (draws.choices(names, shares)[0] for _ in itertools.count())


def _distinct(names: list[str]) -> list[str]:
    if not all(names) or len(set(names)) != len(names):
        raise ConfigError(f"expected tenants as {_FORMS}, each named once, got {','.join(names)!r}")
    return names


def _share(name: str, text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < float("inf"):
        raise ConfigError(f"expected a share above 0 for tenant {name!r}, got {text!r}")
    return share
