"""The lines of `quire batch`: from a line of the input to a request, and from an answer to a line.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "..."}}
    {"id": "a", "prompt": "...", "max_tokens": 8}         plain: a prompt or messages, and options

Lines in OpenAI's batch format are answered in its output format, plain lines plainly. Both kinds of
answer carry `line`, the number of the input line: this is how a run that was killed knows what is
done. Nothing here needs torch or knows where lines are kept.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from quire.engine.sampling_params import SamplingParams
from quire.errors import QuireError, UnknownName

T = TypeVar("T")
LineKind = Literal["plain", "completions", "chat"]

_URLS: dict[str, LineKind] = {"/v1/completions": "completions", "/v1/chat/completions": "chat"}
_REPORTS = {"logprobs", "prompt_logprobs", "top_logprobs"}  # what a record has no place for
SAMPLING_FIELDS = frozenset(f.name for f in fields(SamplingParams)) - _REPORTS
_OF_ENGINE = ("evict", "record_evictions", "cache_salt", "priority", "deadline_s")
_NOTES = frozenset({"model", "user", "metadata", "service_tier", "store"})
"""Members of a body that say nothing about the answer."""
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "stream": (False,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
}
"""Members that are accepted where they ask for nothing."""


class BatchError(QuireError):
    """A line that is no request. It gets an error record; the others run.

    Attributes:
        head: what is known of the line, for its record.
    """

    def __init__(self, message: str, head: "LineHead") -> None:
        super().__init__(message)
        self.head = head


@dataclass(frozen=True, slots=True, kw_only=True)
class LineHead:
    """Which line a record belongs to.

    Attributes:
        number: of the input line, from 1.
        kind: decides the shape of its record.
        name: its `custom_id` or `id`; None where it has none.
    """

    number: int
    kind: LineKind = "plain"
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLine:
    """One request.

    Attributes:
        head: which line.
        prompt: text or token ids; None when there are messages.
        messages: a chat; None when there is a prompt.
        sampling: options this line sets, by the names of SamplingParams.
        evict: which of its tokens stay; None where it does not say.
        record_evictions: whether its record is to say which tokens stayed.
        cache_salt: only lines with the same one share KV; none shares with all that have none.
        priority: lower goes first, among the lines that have been read.
        deadline_s: seconds from then on in which its answer is wanted; None: whenever it comes.
    """

    head: LineHead
    prompt: str | list[int] | None = None
    messages: list[dict[str, str]] | None = None
    evict: str | None = None
    record_evictions: bool | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    cache_salt: str = ""
    priority: int = 0
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFormat:
    """How plain lines are read.

    Attributes:
        prompt_key: where the prompt stands. Anything but "prompt" makes lines data rows, of which
            only this key and `id` are read.
        prefix: put before every text prompt.
    """

    prompt_key: str = "prompt"
    prefix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTask:
    """What is to be run.

    Attributes:
        source: the input file.
        form: how its plain lines are read.
        sampling: of lines that say nothing else.
        with_prompt: repeat prompts in the records of plain lines.
    """

    source: Path
    form: LineFormat
    sampling: SamplingParams
    with_prompt: bool = False


def parse_line(raw: bytes, number: int, form: LineFormat) -> BatchLine:
    """Read one line of the input.

    Args:
        raw: the line, with or without its end.
        number: of the line, from 1.
        form: how plain lines are read.

    Raises:
        BatchError: it is no request; says why.
    """
    head = LineHead(number=number)
    try:
        value = json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
    except json.JSONDecodeError as error:  # its own text counts lines and would name line 1 or 2
        message = f"the line is not JSON: {error.msg} at character {error.pos + 1}"
        raise BatchError(message, head) from error
    except (ValueError, RecursionError) as error:
        raise BatchError(f"the line is not JSON: {error}", head) from error
    if not isinstance(value, dict):
        raise BatchError(f"expected a JSON object, got a {type(value).__name__}", head)
    if "body" in value or "url" in value:
        return _openai_line(value, number, form)
    return _plain_line(value, number, form)


# ---- OpenAI's format ---------------------------------------------------------------------------


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
        raise BatchError(f"expected a text as custom_id, got {name!r}", head)
    if not isinstance(body, dict):
        raise BatchError(f"expected a JSON object as body, got {body!r}", head)
    asked: Literal["messages", "prompt"] = "messages" if kind == "chat" else "prompt"
    return _line(body, head, asked, form)


def _line(
    body: Mapping[str, Any], head: LineHead, asked: Literal["messages", "prompt"], form: LineFormat
) -> BatchLine:
    others = {k: v for k, v in body.items() if k != asked and k not in _OF_ENGINE}
    line = BatchLine(
        head=head,
        evict=_typed(body, "evict", str, head),
        record_evictions=_typed(body, "record_evictions", bool, head),
        sampling=_sampling(others, head),
        # its length and characters are looked at by the engine, as for a request over HTTP
        cache_salt=_typed(body, "cache_salt", str, head) or "",
        priority=_typed(body, "priority", int, head) or 0,
        deadline_s=_typed(body, "deadline_s", float, head),
    )
    if asked == "messages":
        return replace(line, messages=_messages(body.get(asked), head))
    return replace(line, prompt=_prompt(body.get(asked), head, form))


def _typed(body: Mapping[str, Any], key: str, kind: type[T], head: LineHead) -> T | None:
    value = body.get(key)
    if kind is float and type(value) is int:
        value = float(value)
    if value is None or type(value) is kind:  # True is no number of these
        return value
    raise BatchError(f"expected {key} to be a {kind.__name__}, got {_short(value)}", head)


def _sampling(body: Mapping[str, Any], head: LineHead) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in body.items():
        if key == "max_completion_tokens":
            key = "max_tokens"  # OpenAI's newer name of the same thing
        if value is None or key in _NOTES or _asks_nothing(key, value):
            continue
        if key in _NEUTRAL or key in _REPORTS:
            raise BatchError(f"{key}={value!r} is not answered in a batch: leave it out", head)
        if key not in SAMPLING_FIELDS:
            raise BatchError(str(UnknownName("member", key, (*SAMPLING_FIELDS, *_OF_ENGINE))), head)
        if key in found:
            raise BatchError("both max_tokens and max_completion_tokens are given", head)
        found[key] = _token_keys(value) if key == "logit_bias" else value
    return found


def _asks_nothing(key: str, value: Any) -> bool:
    # 0 is not False here: logprobs=0 asks for the chosen token's
    return any(type(value) is type(idle) and value == idle for idle in _NEUTRAL.get(key, ()))


def _token_keys(value: Any) -> Any:
    # JSON has text keys only; whatever is no number is refused with the other options
    if not isinstance(value, dict):
        return value
    return {int(k) if k.isdecimal() and k.isascii() else k: v for k, v in value.items()}


def _prompt(value: Any, head: LineHead, form: LineFormat) -> str | list[int]:
    if isinstance(value, str) and (form.prefix or value):
        return form.prefix + value
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return value
    raise BatchError(
        f"expected a prompt, a text or a list of token ids that is not empty, got {_short(value)}",
        head,
    )


def _messages(value: Any, head: LineHead) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise BatchError(f"expected a list of messages, got {_short(value)}", head)
    return [_message(message, head) for message in value]


def _message(value: Any, head: LineHead) -> dict[str, str]:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise BatchError(f"expected a message with a role, got {_short(value)}", head)
    content = value.get("content")
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise BatchError(f"expected text as content of a message, got {_short(content)}", head)
    return {"role": value["role"], "content": content}


def _is_text_part(part: Any) -> bool:
    is_text = isinstance(part, dict) and part.get("type") == "text"
    return is_text and isinstance(part.get("text"), str)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# ---- plain lines -------------------------------------------------------------------------------


def _plain_line(value: Mapping[str, Any], number: int, form: LineFormat) -> BatchLine:
    name = value.get("id")
    if isinstance(name, int) and not isinstance(name, bool):
        name = str(name)
    head = LineHead(number=number, name=name if isinstance(name, str) else None)
    if name is not None and head.name is None:
        raise BatchError(f"expected a text or a whole number as id, got {_short(name)}", head)
    if form.prompt_key != "prompt":
        if form.prompt_key not in value:
            raise BatchError(f"the line has no {form.prompt_key!r}, which --prompt-key names", head)
        return BatchLine(head=head, prompt=_prompt(value[form.prompt_key], head, form))
    if ("prompt" in value) == ("messages" in value):
        raise BatchError("expected either a prompt or messages in the line", head)
    asked: Literal["messages", "prompt"] = "messages" if "messages" in value else "prompt"
    return _line({k: v for k, v in value.items() if k != "id"}, head, asked, form)
