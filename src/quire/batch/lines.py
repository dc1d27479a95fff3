"""Input lines of `quire batch`: parses a line into a request.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "..."}}
    {"id": "a", "prompt": "...", "max_tokens": 8}         plain: a prompt or messages, and options

A line in OpenAI's batch format gets a record in OpenAI's output format, a plain line a plain
record. Both have `line`, the number of the input line; a resumed run skips lines with a record.
This module does not import torch and does not access files.
"""

import codecs
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, cast

from quire.batch.prompts import no_prompt, read_prompt, read_prompts, shown
from quire.config.chat_messages import Message, read_messages
from quire.config.generation_request import OPTION_KINDS, RequestOptions, checked_option
from quire.config.sampling_params import SamplingParams
from quire.errors import QuireError, RequestError, UnknownName
from quire.layout.values import find_fault, is_count
from quire.serve.fields import IGNORED, INSTEAD, UNSUPPORTED, temperature_of
from quire.serve.structured import STRUCTURE_FIELDS, read_structure

LineKind = Literal["plain", "completions", "chat"]

_URLS: dict[str, LineKind] = {"/v1/completions": "completions", "/v1/chat/completions": "chat"}
_REPORTS = {"logprobs", "prompt_logprobs", "top_logprobs", "pooling"}  # records have no such fields
SAMPLING_FIELDS = frozenset(f.name for f in fields(SamplingParams)) - _REPORTS
_SEED_RANGE = 2**63
_OF_ENGINE = OPTION_KINDS.keys() - {"tenant", "request_id"}  # a batch belongs to one tenant
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **UNSUPPORTED,
    "stream": (False,),
    "stream_options": (),
    "logprobs": (False,),
}
"""Unsupported members of a batch line, with the values that are accepted as no request."""


class BatchError(QuireError):
    """An invalid line. It gets an error record; the other lines run."""

    def __init__(self, message: str, head: "LineHead") -> None:
        super().__init__(message)
        self.head = head


@dataclass(frozen=True, slots=True, kw_only=True)
class LineHead:
    """Identity of an input line."""

    number: int
    kind: LineKind = "plain"  # determines the format of the record
    name: str | None = None  # `custom_id` or `id`


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLine:
    """The request of one line."""

    head: LineHead
    prompt: str | list[int] | None = None  # the first one; None for a chat
    more_prompts: tuple[str | list[int], ...] = ()  # of a line for /v1/completions
    messages: list[Message] | None = None
    # options of SamplingParams set by this line
    sampling: Mapping[str, Any] = field(default_factory=dict)
    # of `GenerationRequest`; deadlines count from submission
    options: RequestOptions = field(default_factory=RequestOptions)

    @property
    def prompts(self) -> tuple[str | list[int] | None, ...]:
        """All prompts; a single None for a chat."""
        return (self.prompt, *self.more_prompts)


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFormat:
    """Format of plain lines."""

    # other than "prompt": data rows, of which only this key and `id` are read
    prompt_key: str = "prompt"
    prefix: str = ""  # of every text prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTask:
    """A batch to run."""

    source: Path
    form: LineFormat
    sampling: SamplingParams
    with_prompt: bool = False  # include prompts in the records of plain lines


def parse_line(raw: bytes, number: int, form: LineFormat) -> BatchLine:
    """Parse one line of the input."""
    value = json_object(raw, number)
    if "body" in value or "url" in value:
        return _openai_line(value, number, form)
    return _plain_line(value, number, form)


def line_seed(seed: int, raw: bytes, repeat: int = 0) -> int:
    """The seed of a line by its content: it stays when lines are inserted before it.

    Args:
        seed: seed of the run.
        raw: the line.
        repeat: number of equal lines before it.
    """
    content = raw.removeprefix(codecs.BOM_UTF8).strip()
    digest = hashlib.blake2b(b"%d %d %b" % (seed, repeat, content), digest_size=8).digest()
    return int.from_bytes(digest) % _SEED_RANGE


def json_object(raw: bytes, number: int) -> dict[str, Any]:
    """The JSON object of a line."""
    head = LineHead(number=number)
    try:
        value = json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
    except json.JSONDecodeError as error:  # str(error) has a line number relative to this line
        reason = error.msg.removesuffix(" at")
        message = f"the line is not JSON: {reason} at character {error.pos + 1}"
        raise BatchError(message, head) from error
    except (ValueError, RecursionError) as error:
        raise BatchError(f"the line is not JSON: {error}", head) from error
    if not isinstance(value, dict):
        raise BatchError(f"expected a JSON object, got {_json_kind(value)}", head)
    fault = find_fault(value)
    if fault is not None:
        raise BatchError(str(fault), _head(value, number))
    return value


def line_head(raw: bytes, number: int) -> LineHead:
    """The identity of a line, which may be invalid."""
    try:
        return _head(json_object(raw, number), number)
    except BatchError as error:
        return error.head


def _head(value: Mapping[str, Any], number: int) -> LineHead:
    if "body" not in value and "url" not in value:
        name = value.get("id")
        is_name = isinstance(name, str | int) and not isinstance(name, bool)
        return LineHead(number=number, name=str(name) if is_name else None)
    url, name = value.get("url"), value.get("custom_id")
    kind = _URLS.get(url, "completions") if isinstance(url, str) else "completions"
    return LineHead(number=number, kind=kind, name=name if isinstance(name, str) else None)


def _json_kind(value: object) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return "a list" if isinstance(value, list) else f"the bare value {json.dumps(value)[:40]}"


def _openai_line(value: Mapping[str, Any], number: int, form: LineFormat) -> BatchLine:
    url, name, body = value.get("url"), value.get("custom_id"), value.get("body")
    kind = _URLS.get(url) if isinstance(url, str) else None
    head = LineHead(
        number=number, kind=kind or "completions", name=name if isinstance(name, str) else None
    )
    if kind is None:
        raise BatchError(f"expected url {' or '.join(_URLS)}, got {url!r}", head)
    if value.get("method", "POST") != "POST":
        raise BatchError(f"expected method POST, got {value['method']!r}", head)
    if not isinstance(name, str) or not name:
        raise BatchError(f"expected a string as custom_id, got {name!r}", head)
    if not isinstance(body, dict):
        raise BatchError(f"expected a JSON object as body, got {body!r}", head)
    requested: Literal["messages", "prompt"] = "messages" if kind == "chat" else "prompt"
    return _line(body, head, requested, form)


def _line(
    body: Mapping[str, Any],
    head: LineHead,
    requested: Literal["messages", "prompt"],
    form: LineFormat,
) -> BatchLine:
    others = {k: v for k, v in body.items() if k != requested and k not in _OF_ENGINE}
    line = BatchLine(
        head=head,
        sampling=_sampling(others, head),
        options=_options(body, head),  # the engine checks their values
    )
    try:
        if requested == "messages":
            return replace(line, messages=read_messages(body.get(requested)))
        prompt, *more = read_prompts(body.get(requested), form.prefix, several=head.kind != "plain")
    except RequestError as error:
        raise BatchError(str(error), head) from None
    if more and line.options.get("record_evictions"):
        raise BatchError("expected one prompt with record_evictions, got a list of several", head)
    return replace(line, prompt=prompt, more_prompts=tuple(more))


def _options(body: Mapping[str, Any], head: LineHead) -> RequestOptions:
    found = {name: body[name] for name in sorted(_OF_ENGINE) if body.get(name) is not None}
    try:
        found = {name: checked_option(name, value) for name, value in found.items()}
    except RequestError as error:
        raise BatchError(str(error), head) from None
    return cast("RequestOptions", found)


def _sampling(body: Mapping[str, Any], head: LineHead) -> dict[str, Any]:
    try:
        structure = read_structure(body)
    except RequestError as error:
        raise BatchError(str(error), head) from None
    found = {} if structure is None else {"structured_outputs": structure}
    for key, value in body.items():
        if (
            key in STRUCTURE_FIELDS
            or value is None
            or key in IGNORED | {"model", "do_sample"}
            or _asks_nothing(key, value)
        ):
            continue
        if key in _NEUTRAL or key in _REPORTS:
            other = INSTEAD.get(key)
            instead = f"use {other}" if other in SAMPLING_FIELDS else "leave it out"
            raise BatchError(f"{key}={shown(value)} is not supported in a batch: {instead}", head)
        name = "max_tokens" if key == "max_completion_tokens" else key  # OpenAI's newer name
        if name not in SAMPLING_FIELDS:
            raise BatchError(str(UnknownName("member", key, (*SAMPLING_FIELDS, *_OF_ENGINE))), head)
        if name == key and name in found:
            continue  # max_completion_tokens takes precedence over max_tokens
        found[name] = _token_keys(value) if key == "logit_bias" else value
    if "do_sample" in body:
        found |= _greedy(body, head)
    return found


def _greedy(body: Mapping[str, Any], head: LineHead) -> dict[str, Any]:
    try:
        temperature = temperature_of(body["do_sample"], body.get("temperature"))
    except RequestError as error:
        raise BatchError(str(error), head) from None
    return {} if temperature is None else {"temperature": temperature}


def _asks_nothing(key: str, value: Any) -> bool:
    # 0 is not False here: logprobs=0 requests the log-probability of the sampled token
    return any(
        isinstance(value, bool) == isinstance(idle, bool) and value == idle
        for idle in _NEUTRAL.get(key, ())
    )


def _token_keys(value: Any) -> Any:
    # JSON keys are strings; keys that are not numbers are refused with the other options
    if not isinstance(value, dict):
        return value
    return {int(k) if is_count(k) else k: v for k, v in value.items()}


def _plain_line(value: Mapping[str, Any], number: int, form: LineFormat) -> BatchLine:
    name = value.get("id")
    if isinstance(name, int) and not isinstance(name, bool):
        name = str(name)
    head = LineHead(number=number, name=name if isinstance(name, str) else None)
    if name is not None and head.name is None:
        raise BatchError(f"expected a string or an integer as id, got {shown(name)}", head)
    if form.prompt_key != "prompt":
        if form.prompt_key not in value:
            raise BatchError(f"the line has no key {form.prompt_key!r} (--prompt-key)", head)
        try:
            return BatchLine(head=head, prompt=read_prompt(value[form.prompt_key], form.prefix))
        except RequestError as error:
            raise BatchError(str(error), head) from None
    if "custom_id" in value:
        raise BatchError(
            "custom_id belongs to a line with url and body, whose body is missing: add them, or "
            "name a line of a prompt with id",
            head,
        )
    if ("prompt" in value) == ("messages" in value):
        raise BatchError(no_prompt(value), head)
    requested: Literal["messages", "prompt"] = "messages" if "messages" in value else "prompt"
    return _line({k: v for k, v in value.items() if k != "id"}, head, requested, form)
