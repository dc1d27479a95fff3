"""Traces for tests: built by hand, and where the recorded ones lie."""

from pathlib import Path

import pytest

from quire.sim.traces.base import Segment, Trace, TraceRequest, own_answer, own_prompt

RECORDED = Path(__file__).parents[4] / "shared" / "data" / "traces"


def recorded(name: str) -> Path:
    """A recorded trace beside the checkout; the test is skipped where there is none."""
    path = RECORDED / name
    if not path.is_file():
        pytest.skip(f"the trace {name} is not beside this checkout")
    return path


def request(line, arrival_s, prompt, answer, *, tenant="default", shared=()):
    """A request of `prompt` tokens of its own behind shared pieces (content, tokens)."""
    own = own_prompt(line, prompt) if prompt else ()
    return TraceRequest(
        line=line,
        arrival_s=float(arrival_s),
        prompt=(*(Segment(*piece) for piece in shared), *own),
        answer=own_answer(line, answer),
        tenant=tenant,
    )


def trace(*requests):
    """These requests as a trace."""
    return Trace(name="by hand", format="test", requests=requests)
