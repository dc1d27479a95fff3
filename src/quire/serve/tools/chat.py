"""The tools of one chat: what the template gets, the structure of the output, and its parser."""

import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.config.structured_outputs import StructuredOutputs
from quire.errors import RequestError
from quire.serve.structured import STRUCTURE_FIELDS, read_structure
from quire.serve.tools.definitions import ToolChoice
from quire.serve.tools.parsers import CallStart, Content, ToolParser, ToolParsers

MessagePart = dict[str, Any]

_MISTRAL_ID = 9  # characters: the templates of Mistral refuse other ids
_ALPHABET = string.ascii_letters + string.digits


def new_call_id(model_parser: str | None = None) -> str:
    """A random id of a call, in the format that the template of the model's parser accepts."""
    if model_parser == "mistral":
        return "".join(secrets.choice(_ALPHABET) for _ in range(_MISTRAL_ID))
    return f"call_{secrets.token_hex(12)}"


@dataclass(slots=True, kw_only=True)
class CallWriter:
    """Writes the tool calls of one output as OpenAI's deltas or message."""

    parser: ToolParser
    choice: ToolChoice
    new_id: Callable[[], str] = new_call_id
    _num_calls: int = 0

    def deltas(self, text: str, *, is_last: bool) -> list[MessagePart]:
        events = self.parser.push(text) + (self.parser.finish() if is_last else [])
        deltas: list[MessagePart] = []
        for event in events:
            if isinstance(event, Content):
                deltas.append({"content": event.text})
                continue
            self._num_calls += isinstance(event, CallStart)
            if self._num_calls == 1 or self.choice.parallel:
                deltas.append({"tool_calls": [self._call(event)]})
        return deltas

    def message(self, text: str) -> MessagePart:
        content, calls = "", []
        for delta in self.deltas(text, is_last=True):
            content += delta.get("content", "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    calls.append({key: call[key] for key in ("id", "type", "function")})
                else:
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        return {"content": content or (None if calls else ""), "tool_calls": calls or None}

    def finish_reason(self, reason: str | None) -> str | None:
        """The finish reason of the choice: `tool_calls` if the model chose to call tools.

        A named choice ends with `stop`, as in OpenAI's API.
        """
        calls = self._num_calls and self.choice.mode != "named"
        return "tool_calls" if reason == "stop" and calls else reason

    def _call(self, event: Any) -> MessagePart:
        index = self._num_calls - 1
        if not isinstance(event, CallStart):
            return {"index": index, "function": {"arguments": event.text}}
        return {
            "index": index,
            "id": self.new_id(),
            "type": "function",
            "function": {"name": event.name, "arguments": ""},
        }


_WHITESPACE_OF_CALLS = r"[ \t\r\n]{1,8}"
"""Whitespace between the elements of a forced call: enough for a short indentation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTools:
    """The tools of one chat."""

    choice: ToolChoice | None
    parsers: ToolParsers
    in_prompt: bool  # whether the chat template writes the tools into the prompt

    @classmethod
    def of(
        cls, choice: ToolChoice | None, parsers: ToolParsers, *, template_reads_tools: bool
    ) -> "ChatTools":
        """Check that the model supports the choice.

        A forced call needs no support of the model, since a grammar determines the output.
        """
        if choice is not None and choice.mode == "auto":
            if not template_reads_tools:
                raise RequestError(
                    "the model's chat template does not use tools, so the model cannot choose one: "
                    'leave out `tools`, or set `tool_choice` to "required", a function or "none"',
                    param="tools",
                )
            if parsers.name is None:
                raise RequestError(
                    "the format of the model's tool calls is not known: start the server with "
                    '--tool-parser, or set `tool_choice` to "required", a function or "none"',
                    param="tools",
                )
        return cls(choice=choice, parsers=parsers, in_prompt=template_reads_tools)

    @property
    def definitions(self) -> tuple[Mapping[str, Any], ...] | None:
        return self.choice.definitions if self.choice is not None and self.in_prompt else None

    def sampling_options(self, structure: Mapping[str, Any]) -> dict[str, Any]:
        if self.choice is None or self.choice.mode == "none":
            return {}
        if read_structure(structure) is not None:
            name = next(n for n in sorted(STRUCTURE_FIELDS) if structure.get(n) is not None)
            raise RequestError(
                f"`{name}` and tools that may be called both determine the format of the output: "
                'leave one of them out, or set `tool_choice` to "none"',
                param=name,
            )
        if self.choice.is_forced:
            wanted = StructuredOutputs(
                json=self.choice.schema(), whitespace_pattern=_WHITESPACE_OF_CALLS
            )
            return {"structured_outputs": wanted}
        return {"skip_special_tokens": False} if self.parsers.marker_is_special else {}

    def writer(self) -> CallWriter | None:
        """Create the writer of the calls of one output; None if all of its text is content."""
        parser = None if self.choice is None else self.parsers.create(self.choice)
        if self.choice is None or parser is None:
            return None
        new_id = partial(new_call_id, self.parsers.name)
        return CallWriter(parser=parser, choice=self.choice, new_id=new_id)
