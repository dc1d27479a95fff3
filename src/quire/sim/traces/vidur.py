"""Vidur's traces: a CSV of lengths, without times.

Source: Agrawal et al., "Vidur", 2024, and the traces published with it (MIT).
"""

from collections.abc import Iterator
from pathlib import Path

from quire.sim.traces.base import DEFAULT_TENANT, TraceRequest, own_answer, own_prompt
from quire.sim.traces.reading import csv_rows
from quire.sim.traces.registry import trace_format

PROMPT, ANSWER = "num_prefill_tokens", "num_decode_tokens"


@trace_format(
    "vidur",
    about="CSV with num_prefill_tokens, num_decode_tokens",
    timed=False,
    recognises=lambda head: PROMPT in head.splitlines()[0] and ANSWER in head.splitlines()[0],
)
def read_vidur(path: Path, tenant_column: str | None) -> Iterator[TraceRequest]:
    """Requests of a Vidur trace, all at 0 s."""
    columns = (PROMPT, ANSWER, *([tenant_column] if tenant_column else []))
    for row in csv_rows(path, *columns):
        yield TraceRequest(
            line=row.line,
            arrival_s=0.0,
            prompt=own_prompt(row.line, row.count(PROMPT, least=1)),
            answer=own_answer(row.line, row.count(ANSWER, least=0)),
            tenant=row.text(tenant_column) if tenant_column else DEFAULT_TENANT,
        )
