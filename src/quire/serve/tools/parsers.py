"""Finds tool calls in the output: by the format of the model's chat template, or by grammar.

A parser reads text as it arrives and returns text and calls. A forced call is read as JSON.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from quire.serve.config import ToolParserName
from quire.serve.tools.definitions import ToolChoice

WHITESPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class CallStart:
    """The begin of a call: the name of its function is known."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """Text of the arguments of the call that began last."""

    text: str


CallEvent = CallStart | Arguments


class ValueEnd:
    """Finds the end of one JSON value, character by character.

    The value is not validated: brackets are counted outside of strings.
    """

    __slots__ = ("_depth", "_escaped", "_in_string", "_is_bare")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = self._is_bare = False

    def feed(self, character: str) -> Literal["inside", "last", "after"]:
        """Process a character: it is inside the value, its last one, or after a bare value.

        The first character must not be whitespace.
        """
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                return "inside" if self._depth else "last"
            return "inside"
        if character in ",]} \t\r\n" and not self._depth:
            return "after"  # of a number, true, false or null
        if character == '"':
            self._in_string = True
        elif character in "[{":
            self._depth += 1
        elif character in "]}":
            self._depth -= 1
            return "inside" if self._depth else "last"
        return "inside"


_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset({*_ARGUMENTS, "name", "type", "id"})
_OTHERS = r'(?:"(?:type|id)"\s*:\s*"[^"\\]*"\s*,\s*)*'
_HEAD = re.compile(
    rf'\s*\{{\s*{_OTHERS}"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*{_OTHERS}'
    rf'"(?:{"|".join(_ARGUMENTS)})"\s*:\s*\{{'
)
"""The text up to the first character of the arguments, in the usual order of keys."""
_FIRST_KEY = re.compile(r'\s*\{\s*(?:"([^"\\]*)"|[^\s"}])')


class CallReader:
    """Reads one call, such as {"name": "f", "arguments": {...}}, character by character.

    Arguments after the name are passed on as they arrive, others when the object ends.
    """

    def __init__(self) -> None:
        self.raw = ""
        self.state: Literal["reading", "done", "failed"] = "reading"
        self.has_started = False
        self._object = ValueEnd()
        self._arguments: ValueEnd | None = None  # while they are passed on

    def feed(self, character: str) -> list[CallEvent]:
        if not self.has_started:
            self.raw += character
            if not self.raw.strip(WHITESPACE):
                return []
        is_last = self._object.feed(character) != "inside"
        if self.has_started:
            self.state = "done" if is_last else "reading"
            if self._arguments is None:
                return []
            if self._arguments.feed(character) == "last":
                self._arguments = None
            return [Arguments(character)]
        head = _HEAD.fullmatch(self.raw) if character == "{" else None
        if head is not None and isinstance(name := _decoded(head[1]), str):
            self.has_started, self._arguments = True, ValueEnd()
            self._arguments.feed(character)
            return [CallStart(name), Arguments(character)]
        key = _FIRST_KEY.match(self.raw)
        if not self.raw.lstrip(WHITESPACE).startswith("{") or (key and key[1] not in _KEYS):
            self.state = "failed"
        return self._whole() if is_last else []

    def _whole(self) -> list[CallEvent]:
        """The call of an object that has ended."""
        found: Any = _decoded(self.raw)
        name = found.get("name") if isinstance(found, dict) else None
        named = isinstance(found, dict) and isinstance(name, str) and bool(name)
        if not named or found.keys() - _KEYS:
            self.state = "failed"
            return []
        self.state, self.has_started = "done", True
        value = next((found[key] for key in _ARGUMENTS if key in found), None)
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return [CallStart(found["name"]), Arguments(text if value else "{}")]


def _decoded(text: str) -> object:
    """The value of a JSON text; None if it is invalid."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the message."""

    text: str


Event = Content | CallEvent


class ToolParser(ABC):
    """Finds the tool calls in the text of one output.

    A subclass handles the part of the text in `_buffer` that belongs to its current mode.
    """

    marker: str = ""
    """Text that begins calls; "" if calls have no marker."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._buffer = ""
        self._space = ""  # whitespace that precedes a call or content
        self._events: list[Event] = []
        self._reader: CallReader | None = None

    def push(self, text: str) -> list[Event]:
        self._buffer += text
        while self._buffer and self._advance():
            pass
        return self._taken()

    def finish(self) -> list[Event]:
        rest, self._buffer = self._pending() + self._buffer, ""
        if self._reader is not None and not self._reader.has_started:
            rest = self._opening() + self._reader.raw + rest
        self._reader = None
        if rest:
            self._add_content(rest)
        if self._space and not self.num_calls:
            self._events.append(Content(self._space))
        return self._taken()

    @abstractmethod
    def _advance(self) -> bool:
        """Process a part of the buffer; False if more text is needed."""

    def _pending(self) -> str:
        """Text outside of the buffer that is content if the output ends now."""
        return ""

    def _opening(self) -> str:
        """Text before an object that is content if the object is no call."""
        return ""

    def _on_call_end(self) -> None:
        return

    def _on_failure(self) -> None:
        """Choose the mode after an object that is no call."""
        return

    # ---- parts of the formats ------------------------------------------------------------------

    def _add_content(self, text: str) -> None:
        text = self._space + text
        shown = text.rstrip(WHITESPACE)
        self._space = text[len(shown) :]
        if shown:
            self._events.append(Content(shown))

    def _find_marker(self) -> bool:
        """Pass on content up to a marker, and drop the marker; whether one was found."""
        before, found, after = self._buffer.partition(self.marker)
        if found:
            self._add_content(before)
            self._buffer = after
            return True
        longest = min(len(self._buffer), len(self.marker) - 1)
        held = next(
            (n for n in range(longest, 0, -1) if self.marker.startswith(self._buffer[-n:])), 0
        )
        self._add_content(self._buffer[: len(self._buffer) - held])
        self._buffer = self._buffer[len(self._buffer) - held :]
        return False

    def _skip_space(self) -> str:
        """Drop whitespace at the start of the buffer; return the next character or ""."""
        self._buffer = self._buffer.lstrip(WHITESPACE)
        return self._buffer[:1]

    def _read_call(self) -> bool:
        """Read characters of a call; True if it ended or failed."""
        reader = self._reader
        if reader is None:
            reader = self._reader = CallReader()
        for count, character in enumerate(self._buffer, start=1):
            had_started = reader.has_started
            self._events += reader.feed(character)
            if reader.has_started and not had_started:
                self._count_call()
            if reader.state != "reading":
                self._buffer, self._reader = self._buffer[count:], None
                if reader.state == "failed":
                    self._add_content(self._opening() + reader.raw)
                    self._on_failure()
                else:
                    self._on_call_end()
                return True
        self._buffer = ""
        return False

    def _count_call(self) -> None:
        self.num_calls += 1
        self._space = ""

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return merged(events)


def merged(events: Sequence[Event]) -> list[Event]:
    """Join adjacent texts of one kind."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Arguments) and isinstance(last, Arguments):
            joined[-1] = Arguments(last.text + event.text)
        elif isinstance(event, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + event.text)
        else:
            joined.append(event)
    return joined


class RequiredParser(ToolParser):
    """Output of `tool_choice` required: a list of {"name", "parameters"}, without any marker."""

    def _advance(self) -> bool:
        if self._reader is None:
            self._buffer = self._buffer.lstrip(WHITESPACE + "[,]")
            if not self._buffer:
                return False
        return self._read_call()


class NamedParser(ToolParser):
    """Output of a named `tool_choice`: the arguments of the function."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def _advance(self) -> bool:
        if not self.num_calls:
            self.num_calls = 1
            self._events.append(CallStart(self._name))
        self._events.append(Arguments(self._buffer))
        self._buffer = ""
        return False


_MAX_HEADER = 256  # characters between the marker of Mistral and the arguments


class HermesParser(ToolParser):
    """Format of Hermes 2 Pro and Qwen 2.5 and 3."""

    marker = "<tool_call>"
    _END = "</tool_call>"

    def __init__(self) -> None:
        super().__init__()
        self._mode: Literal["content", "call", "end"] = "content"

    def _advance(self) -> bool:
        if self._mode == "call":
            return self._read_call()
        if self._mode == "end":
            if not self._skip_space():
                return False
            if self._buffer.startswith(self._END):
                self._buffer = self._buffer.removeprefix(self._END)
            elif self._END.startswith(self._buffer):
                return False
            self._mode = "content"
            return True
        if not self._find_marker():
            return False
        self._mode = "call"
        return True

    def _pending(self) -> str:
        return self.marker if self._mode == "call" and self._reader is None else ""

    def _opening(self) -> str:
        return self.marker

    def _on_call_end(self) -> None:
        self._mode = "end"

    def _on_failure(self) -> None:
        self._mode = "content"


class Llama3Parser(ToolParser):
    """Format of Llama 3.1 and later: objects at the start of the output, or after the marker."""

    marker = "<|python_tag|>"

    def __init__(self) -> None:
        super().__init__()
        self._mode: Literal["between", "call", "content"] = "between"

    def _advance(self) -> bool:
        if self._mode == "call":
            return self._read_call()
        if self._mode == "content":
            if not self._find_marker():
                return False
            self._mode = "call"
            return True
        return self._begin()

    def _begin(self) -> bool:
        """At the start, or after a call: is the next text a call?"""
        skipped = WHITESPACE + (";," if self.num_calls else "")
        rest = self._buffer.lstrip(skipped)
        self._space += self._buffer[: len(self._buffer) - len(rest)]
        self._buffer = rest
        if rest.startswith(self.marker):
            self._buffer = rest.removeprefix(self.marker)
            self._mode = "call"
        elif rest.startswith("{"):
            self._mode = "call"
        elif self.marker.startswith(rest):  # also if it is empty
            return False
        else:
            self._mode = "content"
        return True

    def _on_call_end(self) -> None:
        self._mode = "between"

    def _on_failure(self) -> None:
        self._mode = "content"


class MistralParser(ToolParser):
    """Formats of Mistral: a list of objects, or names followed by arguments."""

    marker = "[TOOL_CALLS]"
    _HEADER = re.compile(r"\s*([\w.:/-]+)\s*(\[CALL_ID\][^\[{]*)?(\[ARGS\])?\s*")

    def __init__(self) -> None:
        super().__init__()
        self._mode: Literal["content", "start", "object", "next", "name", "arguments"] = "content"
        self._end = ValueEnd()
        self._is_first = True  # object of its list

    def _advance(self) -> bool:
        if self._mode == "content":
            if not self._find_marker():
                return False
            self._mode = "start"
            return True
        return {
            "start": self._start,
            "object": self._read_call,
            "next": self._next,
            "name": self._read_name,
            "arguments": self._read_arguments,
        }[self._mode]()

    def _start(self) -> bool:
        character = self._skip_space()
        if not character:
            return False
        if character == "[":
            self._buffer, self._is_first, self._mode = self._buffer[1:], True, "object"
        else:
            self._mode = "name"
        return True

    def _next(self) -> bool:
        character = self._skip_space()
        if not character:
            return False
        self._buffer = self._buffer[1:] if character in ",]" else self._buffer
        self._is_first = False
        self._mode = "object" if character == "," else "content"
        return True

    def _read_name(self) -> bool:
        header, brace, _ = self._buffer.partition("{")
        if not brace and len(header) <= _MAX_HEADER:
            return False
        match = self._HEADER.fullmatch(header) if brace else None
        if match is None:
            self._add_content(self.marker)
            self._mode = "content"
            return True
        self._events.append(CallStart(match[1]))
        self._count_call()
        self._buffer, self._end, self._mode = self._buffer[len(header) :], ValueEnd(), "arguments"
        return True

    def _read_arguments(self) -> bool:
        for count, character in enumerate(self._buffer, start=1):
            if self._end.feed(character) == "last":
                self._events.append(Arguments(self._buffer[:count]))
                self._buffer, self._mode = self._buffer[count:], "content"
                return True
        self._events.append(Arguments(self._buffer))
        self._buffer = ""
        return False

    def _pending(self) -> str:
        if self._mode == "object" and self._reader is None:
            return self._opening()
        return self.marker if self._mode in ("start", "name") else ""

    def _opening(self) -> str:
        return f"{self.marker}[" if self._is_first else ""

    def _on_call_end(self) -> None:
        self._mode = "next"

    def _on_failure(self) -> None:
        self._mode = "content"


PARSERS: Mapping[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3Parser,
    "mistral": MistralParser,
}


class ToolParsers:
    """The parser of a model."""

    def __init__(self, name: ToolParserName, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.name = _detected(tokenizer) if name == "auto" else name
        kind = None if self.name is None else PARSERS[self.name]
        special = () if tokenizer is None else tokenizer.all_special_tokens
        self.marker_is_special = kind is not None and kind.marker in special

    def create(self, choice: ToolChoice) -> ToolParser | None:
        """Create the parser of one output; None if the output has no calls or no known format."""
        if choice.mode == "named":
            return NamedParser(choice.tools[0].name)
        if choice.mode == "required":
            return RequiredParser()
        if choice.mode == "none" or self.name is None:
            return None
        return PARSERS[self.name]()


def _detected(tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    if tokenizer is None:
        return None
    template = tokenizer.chat_template or ""
    texts = list(template.values()) if isinstance(template, dict) else [template]
    # these use a marker of PARSERS for another format
    if any(other in text for text in texts for other in ("<function=", "<arg_key>")):
        return None
    for name, kind in PARSERS.items():
        if any(kind.marker in text for text in texts):
            return name
    known = tokenizer.get_vocab() if any("tools" in text for text in texts) else {}
    return next((name for name, kind in PARSERS.items() if kind.marker in known), None)
