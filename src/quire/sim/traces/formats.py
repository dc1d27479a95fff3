"""Formats of recorded requests, and detection of a file's format.

azure     Azure's LLM inference service: Patel et al., "Splitwise", 2024, and its data (CC-BY 4.0)
mooncake  Qin et al., "Mooncake", 2024, section 4, and its published traces. Each of the `hash_ids`
          stands for a block of 512 tokens and everything before it, so prompts whose lists have a
          common prefix share the tokens of that prefix.
sharegpt  Conversations without times or token counts. No tokenizer is loaded here: a text counts as
          one token for each 4 bytes of its UTF-8, rounded up, the usual ratio for English text with
          current vocabularies.
vidur     Agrawal et al., "Vidur", 2024, and the traces published with it (MIT)
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quire.errors import TraceError, UnknownName
from quire.sim.traces.base import (
    AUTO,
    DEFAULT_TENANT,
    TraceRequest,
    TraceSegment,
    own_answer,
    own_prompt,
)
from quire.sim.traces.reading import TraceRow, csv_rows, json_rows, opened

_HEAD_CHARACTERS = 4096
BLOCK_TOKENS = 512  # of Mooncake
BYTES_PER_TOKEN = 4
_MILLISECONDS = 1000
_TIME = "TIMESTAMP"
_AZURE = ("ContextTokens", "GeneratedTokens")  # columns of prompt and output tokens
_MOONCAKE = ("input_length", "output_length")
_VIDUR = ("num_prefill_tokens", "num_decode_tokens")
_ANSWERS = frozenset({"gpt", "assistant", "chatgpt", "model", "bot"})
_TURNS_AT_MOST = 1 << 16  # per conversation, so that contents of conversations differ

Reader = Callable[[Path, str | None], Iterator[TraceRequest]]  # (file, column of the tenant)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFormat:
    """A trace format."""

    name: str
    about: str
    timed: bool  # whether the format has arrival times
    recognises: Callable[[str], bool]  # from the beginning of a file
    read: Reader  # in file order


def find_format(name: str, path: Path) -> TraceFormat:
    """A format by its name, or `auto`: the one that recognises the file."""
    if name != AUTO:
        if name not in FORMATS:
            raise UnknownName("trace format", name, (AUTO, *FORMATS))
        return FORMATS[name]
    with opened(path) as file:
        head = file.read(_HEAD_CHARACTERS).lstrip()
    if not head:
        raise TraceError(f"{path.name} is empty: expected requests")
    for found in FORMATS.values():
        if found.recognises(head):
            return found
    raise TraceError(
        f"{path.name} is in no known format ({', '.join(FORMATS)}): it begins with "
        f"{head.splitlines()[0][:60]!r}; name the format with --trace-format"
    )


def _columns(head: str) -> set[str]:
    return {name.strip() for name in head.splitlines()[0].split(",")}


def _requests(
    rows: Iterable[TraceRow],
    tenant_column: str | None,
    lengths: tuple[str, str],
    arrival_s: Callable[[TraceRow], float] = lambda row: 0.0,
    prompt: Callable[[TraceRow, int], tuple[TraceSegment, ...]] | None = None,
) -> Iterator[TraceRequest]:
    """Yield a request for each row; `lengths` are the columns of prompt and output tokens."""
    for row in rows:
        tokens = row.count(lengths[0], least=1)
        yield TraceRequest(
            line=row.line,
            arrival_s=arrival_s(row),
            prompt=own_prompt(row.line, tokens) if prompt is None else prompt(row, tokens),
            answer=own_answer(row.line, row.count(lengths[1], least=0)),
            tenant=row.text(tenant_column) if tenant_column else DEFAULT_TENANT,
        )


def _read_azure(path: Path, tenant_column: str | None) -> Iterator[TraceRequest]:
    rows = csv_rows(path, _TIME, *_AZURE, *filter(None, (tenant_column,)))
    return _requests(rows, tenant_column, _AZURE, _seconds)


def _read_vidur(path: Path, tenant_column: str | None) -> Iterator[TraceRequest]:
    rows = csv_rows(path, *_VIDUR, *filter(None, (tenant_column,)))
    return _requests(rows, tenant_column, _VIDUR)


def _read_mooncake(path: Path, tenant_column: str | None) -> Iterator[TraceRequest]:
    def arrival_s(row: TraceRow) -> float:
        return row.number("timestamp") / _MILLISECONDS

    return _requests(json_rows(path), tenant_column, _MOONCAKE, arrival_s, _blocks)


def _seconds(row: TraceRow) -> float:
    text = row.text(_TIME)
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise row.error(f"a date and time {_TIME}", text) from None
    # a time without a zone is read as UTC: only differences count
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


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


def _read_sharegpt(path: Path, tenant_column: str | None) -> Iterator[TraceRequest]:
    """Yield a request for each response of a JSON list of conversations, all at 0 s.

    The prompt of a response is all earlier turns, so later requests of a conversation share real
    prefixes.
    """
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


_ALL = (
    TraceFormat(
        name="azure",
        about="CSV with TIMESTAMP, ContextTokens, GeneratedTokens",
        timed=True,
        recognises=lambda head: {_TIME, _AZURE[0]} <= _columns(head),
        read=_read_azure,
    ),
    TraceFormat(
        name="mooncake",
        about="JSON lines with timestamp (ms), input_length, output_length, hash_ids",
        timed=True,
        recognises=lambda head: head.startswith("{") and '"input_length"' in head.splitlines()[0],
        read=_read_mooncake,
    ),
    TraceFormat(
        name="sharegpt",
        about='JSON list of {"conversations": [{"from", "value"}, ...]}; lengths are estimated',
        timed=False,
        recognises=lambda head: head.startswith("[") and '"conversations"' in head,
        read=_read_sharegpt,
    ),
    TraceFormat(
        name="vidur",
        about="CSV with num_prefill_tokens, num_decode_tokens",
        timed=False,
        recognises=lambda head: set(_VIDUR) <= _columns(head),
        read=_read_vidur,
    ),
)
FORMATS: Mapping[str, TraceFormat] = {found.name: found for found in _ALL}
