"""Conversations in the shape of ShareGPT: a JSON list of turns, without times or token counts.

Every response in a conversation is one request. Its prompt is all earlier turns, so later
requests of a conversation share real prefixes.

Texts have no token counts, and no tokenizer is loaded here: a text counts as one token for each 4
bytes of its UTF-8, rounded up, the usual ratio for English text with current vocabularies.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quire.errors import TraceError
from quire.sim.traces.base import DEFAULT_TENANT, TraceRequest, TraceSegment
from quire.sim.traces.reading import opened
from quire.sim.traces.registry import trace_format

BYTES_PER_TOKEN = 4
_ANSWERS = frozenset({"gpt", "assistant", "chatgpt", "model", "bot"})
_TURNS_AT_MOST = 1 << 16  # per conversation, so that contents of conversations differ


@trace_format(
    "sharegpt",
    about='JSON list of {"conversations": [{"from", "value"}, ...]}; lengths are estimated',
    timed=False,
    recognises=lambda head: head.startswith("[") and '"conversations"' in head,
)
def read_sharegpt(path: Path, tenant_column: str | None) -> Iterator[TraceRequest]:
    """Yield a request for each response, all at 0 s, conversation by conversation."""
    with opened(path) as file:
        try:
            conversations = json.load(file)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path.name}: not JSON ({error})") from error
    if not isinstance(conversations, list):
        raise TraceError(f"{path.name}: expected a JSON list of conversations")
    line = 0
    for number, conversation in enumerate(conversations, start=1):
        where = f"{path.name}, conversation {number}"
        tenant = _tenant(where, conversation, tenant_column)
        for prompt, answer in _answers(number, _turns(where, conversation)):
            line += 1
            yield TraceRequest(
                line=line, arrival_s=0.0, prompt=prompt, answer=answer, tenant=tenant
            )


def estimated_tokens(text: str) -> int:
    """Tokens a text counts as: one for each 4 bytes of its UTF-8, rounded up."""
    return -(-len(text.encode("utf-8", errors="replace")) // BYTES_PER_TOKEN)


def _turns(where: str, conversation: object) -> list[Mapping[str, Any]]:
    turns = conversation.get("conversations") if isinstance(conversation, dict) else None
    if not isinstance(turns, list) or len(turns) >= _TURNS_AT_MOST:
        raise TraceError(f'{where}: expected a list "conversations", got {_short(conversation)}')
    for turn in turns:
        named = isinstance(turn, dict) and isinstance(turn.get("from"), str)
        if not named or not isinstance(turn.get("value"), str):
            raise TraceError(f'{where}: expected turns {{"from", "value"}}, got {_short(turn)}')
    return turns


def _tenant(where: str, conversation: object, column: str | None) -> str:
    if column is None:
        return DEFAULT_TENANT
    tenant = conversation.get(column) if isinstance(conversation, dict) else None
    if not isinstance(tenant, str) or not tenant:
        raise TraceError(f"{where}: expected a text {column!r}, got {tenant!r}")
    return tenant


def _answers(
    number: int, turns: list[Mapping[str, Any]]
) -> Iterator[tuple[tuple[TraceSegment, ...], TraceSegment]]:
    """Yield prompt and output of every response that has a prompt."""
    before: list[TraceSegment] = []
    for i, turn in enumerate(turns):
        segment = TraceSegment(number * _TURNS_AT_MOST + i, estimated_tokens(turn["value"]))
        if turn["from"] in _ANSWERS and any(said.tokens for said in before):
            yield tuple(before), segment
        before.append(segment)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
