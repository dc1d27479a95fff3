"""Mooncake's traces: JSON lines whose `hash_ids` identify equal blocks of 512 tokens.

Each id stands for a block and everything before it, so prompts whose lists have a common
prefix share the tokens of that prefix.

Source: Qin et al., "Mooncake", 2024, section 4, and its published traces.
"""

from collections.abc import Iterator
from pathlib import Path

from quire.sim.traces.base import (
    DEFAULT_TENANT,
    TraceRequest,
    TraceSegment,
    own_answer,
    own_prompt,
)
from quire.sim.traces.reading import TraceRow, json_rows
from quire.sim.traces.registry import trace_format

BLOCK_TOKENS = 512
_MILLISECONDS = 1000


@trace_format(
    "mooncake",
    about="JSON lines with timestamp (ms), input_length, output_length, hash_ids",
    timed=True,
    recognises=lambda head: head.startswith("{") and '"input_length"' in head.splitlines()[0],
)
def read_mooncake(path: Path, tenant_column: str | None) -> Iterator[TraceRequest]:
    """Requests of a Mooncake trace."""
    for row in json_rows(path):
        yield TraceRequest(
            line=row.line,
            arrival_s=row.number("timestamp") / _MILLISECONDS,
            prompt=_blocks(row, row.count("input_length", least=1)),
            answer=own_answer(row.line, row.count("output_length", least=0)),
            tenant=row.text(tenant_column) if tenant_column else DEFAULT_TENANT,
        )


def _blocks(row: TraceRow, tokens: int) -> tuple[TraceSegment, ...]:
    if "hash_ids" not in row.values:
        return own_prompt(row.line, tokens)
    ids = row.values["hash_ids"]
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise row.error("hash_ids to be a list of whole numbers of 0 or more", ids)
    if len(ids) != -(-tokens // BLOCK_TOKENS):
        raise row.error(
            f"a hash id for each {BLOCK_TOKENS} of {tokens} tokens, the last ones included",
            f"{len(ids)} ids",
        )
    last = tokens - (len(ids) - 1) * BLOCK_TOKENS
    lengths = [BLOCK_TOKENS] * (len(ids) - 1) + [last]
    return tuple(map(TraceSegment, ids, lengths))
