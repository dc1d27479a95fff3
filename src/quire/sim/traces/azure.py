"""The traces of Azure's LLM inference service: a CSV of times and two lengths.

Source: Patel et al., "Splitwise", 2024, and the data published with it (CC-BY 4.0).
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from quire.sim.traces.base import DEFAULT_TENANT, TraceRequest, own_answer, own_prompt
from quire.sim.traces.reading import TraceRow, csv_rows
from quire.sim.traces.registry import trace_format

TIME, PROMPT, ANSWER = "TIMESTAMP", "ContextTokens", "GeneratedTokens"


@trace_format(
    "azure",
    about="CSV with TIMESTAMP, ContextTokens, GeneratedTokens",
    timed=True,
    recognises=lambda head: TIME in head.splitlines()[0] and PROMPT in head.splitlines()[0],
)
def read_azure(path: Path, tenant_column: str | None) -> Iterator[TraceRequest]:
    """Requests of an Azure trace."""
    columns = (TIME, PROMPT, ANSWER, *([tenant_column] if tenant_column else []))
    for row in csv_rows(path, *columns):
        yield TraceRequest(
            line=row.line,
            arrival_s=_seconds(row),
            prompt=own_prompt(row.line, row.count(PROMPT, least=1)),
            answer=own_answer(row.line, row.count(ANSWER, least=0)),
            tenant=row.text(tenant_column) if tenant_column else DEFAULT_TENANT,
        )


def _seconds(row: TraceRow) -> float:
    text = row.text(TIME)
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise row.error(f"a date and time {TIME}", text) from None
    # a time without a zone is read as UTC: only differences count
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
