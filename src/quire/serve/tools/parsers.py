"""Parsers of the formats in which models write tool calls, for whole and for streamed texts.

hermes        text <tool_call>{"name": "f", "arguments": {...}}</tool_call> ...   Hermes, Qwen
llama3_json   {"name": "f", "parameters": {...}}; {...}, also after <|python_tag|>
mistral       [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]
              [TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]g{...}                  newer tokenizers
"""

import re
from typing import Literal

from quire.serve.tools.json_text import WHITESPACE, Arguments, CallStart, ValueEnd
from quire.serve.tools.parser import ToolParser

_MOST_HEADER = 256  # characters between the marker of Mistral and the arguments


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
            return self._skip_end()
        if not self._find_marker():
            return False
        self._mode = "call"
        return True

    def _skip_end(self) -> bool:
        if not self._skip_space():
            return False
        if self._buffer.startswith(self._END):
            self._buffer = self._buffer.removeprefix(self._END)
        elif self._END.startswith(self._buffer):
            return False
        self._mode = "content"
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
        if not brace and len(header) <= _MOST_HEADER:
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
