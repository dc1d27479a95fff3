"""The baseline: every sequence reserves a contiguous piece of one maximum length.

Sequences, bytes, order of arrival and scheduler are those of the paged run, with the store
`contiguous_max`, and waste means the same in both: allocated slots without a token, over allocated
slots, over time. Nothing is shared: a contiguous piece has one holder.
"""

from dataclasses import dataclass, replace
from typing import Final

from quire.sim.run import SimConfig, simulate
from quire.sim.simulator import SimResult
from quire.sim.traces.base import Trace

STORE: Final = "contiguous_max"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContiguousRun:
    """A trace served from contiguous pieces.

    Attributes:
        max_tokens: of every piece.
        num_dropped: requests longer than that, which such an allocator cannot serve.
        waste_fraction: over time, of pieces held at the same time.
        request_waste_fraction: over requests: slots without a token when each request ends.
        result: of the requests that are not too long; None where none is left.
    """

    max_tokens: int
    num_dropped: int
    waste_fraction: float
    request_waste_fraction: float
    result: SimResult | None


def longest_tokens(trace: Trace) -> int:
    """Length of a trace's longest request: the maximum that drops nothing."""
    return max(request.tokens for request in trace.requests)


def run_contiguous(trace: Trace, config: SimConfig, max_tokens: int) -> ContiguousRun:
    """Serve a trace from pieces of `max_tokens` slots in the same bytes.

    Raises:
        ConfigError: not one piece fits into the memory.
    """
    kept = tuple(r for r in trace.requests if r.tokens <= max_tokens)
    num_dropped = len(trace.requests) - len(kept)
    if not kept:
        return ContiguousRun(
            max_tokens=max_tokens,
            num_dropped=num_dropped,
            waste_fraction=0.0,
            request_waste_fraction=0.0,
            result=None,
        )
    served = replace(trace, requests=kept, num_dropped=trace.num_dropped + num_dropped)
    kv = replace(config.kv, store=STORE, store_tokens=max_tokens, enable_prefix_caching=False)
    result = simulate(served, replace(config, kv=kv))
    return ContiguousRun(
        max_tokens=max_tokens,
        num_dropped=num_dropped,
        waste_fraction=result.gauges.waste_fraction,
        request_waste_fraction=request_waste(result, max_tokens),
        result=result,
    )


def request_waste(result: SimResult, piece_tokens: int) -> float:
    """Slots without a token when each request ends, over the slots of its pieces.

    Args:
        result: of a run.
        piece_tokens: slots of a page or of a contiguous piece.
    """
    # the last token of an answer is never written
    lengths = [r.prompt_tokens + r.answer_tokens - 1 for r in result.records if r.finished]
    slots = sum(-(-length // piece_tokens) * piece_tokens for length in lengths)
    return 1 - sum(lengths) / slots if slots else 0.0
