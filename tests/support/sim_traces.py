"""Traces and machine rates for tests of the simulator; paths of recorded traces."""

from pathlib import Path

import pytest

from quire.sim.machine import Rates
from quire.sim.traces.base import Trace, TraceRequest, TraceSegment, own_answer, own_prompt

RECORDED = Path(__file__).parents[3] / "shared" / "data" / "traces"

RATES = Rates(read_bytes_per_s=1e11, flops_per_s=1e13, copy_bytes_per_s=1e10, overhead_s=0.001)


def recorded(name: str) -> Path:
    """The path of a recorded trace; the test is skipped if it is not available."""
    path = RECORDED / name
    if not path.is_file():
        pytest.skip(f"the trace {name} is not available")
    return path


def request(line, arrival_s, prompt, output, *, tenant="default", shared=()):
    """A request of `prompt` unique tokens after shared segments (content, tokens)."""
    unique = own_prompt(line, prompt) if prompt else ()
    return TraceRequest(
        line=line,
        arrival_s=float(arrival_s),
        prompt=(*(TraceSegment(*piece) for piece in shared), *unique),
        answer=own_answer(line, output),
        tenant=tenant,
    )


def trace(*requests):
    return Trace(name="by hand", format="test", requests=requests)
