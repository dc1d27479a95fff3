"""From a file and options to a trace that can be run."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from quire.errors import TraceError
from quire.sim.traces.base import Segment, Trace, TraceRequest
from quire.sim.traces.options import TraceOptions
from quire.sim.traces.registry import find_format
from quire.sim.traces.tenants import assign_tenants, tenant_column


def load_trace(path: Path, options: TraceOptions | None = None) -> Trace:
    """Read a trace: the first `requests` by arrival, stretched, without those that are too long.

    Args:
        path: of the file.
        options: what to change.

    Raises:
        TraceError: the file cannot be read, or nothing of it is left.
        ConfigError: an option that cannot be.
    """
    options = options or TraceOptions()
    column = tenant_column(options.tenants)
    found = find_format(options.format, path)
    recorded = sorted(found.read(path, column), key=lambda request: request.arrival_s)
    if not recorded:
        raise TraceError(f"{path.name} holds no requests: expected one or more")
    recorded = recorded[: options.requests]
    scaled = [_stretched(request, options.length_scale) for request in recorded]
    kept = [r for r in scaled if options.max_tokens is None or r.tokens <= options.max_tokens]
    if not kept:
        raise TraceError(
            f"{path.name}: all {len(scaled):,} requests are longer than "
            f"max_tokens={options.max_tokens} (--max-length): raise it"
        )
    timed = _timed(kept, options)
    return Trace(
        name=path.name,
        format=found.name,
        requests=tuple(assign_tenants(timed, options.tenants, seed=options.seed)),
        num_dropped=len(scaled) - len(kept),
    )


def _stretched(request: TraceRequest, factor: int | float) -> TraceRequest:
    """A request with every piece longer or shorter; equal pieces stay equal."""
    if factor == 1.0:
        return request
    return replace(
        request,
        prompt=tuple(_scaled(segment, factor) for segment in request.prompt),
        answer=_scaled(request.answer, factor),
    )


def _scaled(segment: Segment, factor: int | float) -> Segment:
    """What had a token keeps one."""
    return segment._replace(tokens=max(min(1, segment.tokens), round(segment.tokens * factor)))


def _timed(requests: Sequence[TraceRequest], options: TraceOptions) -> list[TraceRequest]:
    """Requests whose times begin at 0 s."""
    times: Iterator[float]
    if options.request_rate is not None:
        times = _poisson(options.request_rate, options.seed)
    else:
        first_s = requests[0].arrival_s
        times = ((r.arrival_s - first_s) * options.time_scale for r in requests)
    return [
        replace(request, arrival_s=arrival_s)
        for request, arrival_s in zip(requests, times, strict=False)
    ]


def _poisson(rate: int | float, seed: int) -> Iterator[float]:
    draws = random.Random(seed)
    return itertools.accumulate((draws.expovariate(rate) for _ in itertools.count()), initial=0.0)
