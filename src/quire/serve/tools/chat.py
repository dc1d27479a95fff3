"""The tools of one chat: what the template gets, the structure of the output, and its parser."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.config.structured_outputs import StructuredOutputs
from quire.errors import RequestError
from quire.serve.structured import STRUCTURE_FIELDS, read_structure
from quire.serve.tools.definitions import ToolChoice
from quire.serve.tools.detect import ToolParsers
from quire.serve.tools.messages import CallWriter, new_call_id

_WHITESPACE_OF_CALLS = r"[ \t\r\n]{1,8}"
"""Whitespace between the elements of a forced call: enough for a short indentation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTools:
    """The tools of one chat.

    Attributes:
        choice: tools and choice of the request; None without tools.
        parsers: the parser of the model.
        in_prompt: whether the chat template writes the tools into the prompt.
    """

    choice: ToolChoice | None
    parsers: ToolParsers
    in_prompt: bool

    @classmethod
    def of(
        cls, choice: ToolChoice | None, parsers: ToolParsers, *, template_reads_tools: bool
    ) -> "ChatTools":
        """Check that the model supports the choice.

        A forced call needs no support of the model, since a grammar determines the output.

        Raises:
            RequestError: `tool_choice` auto for a model whose template does not use tools, or whose
                format of calls is not known.
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
        """The tools for the chat template; None without tools."""
        return self.choice.definitions if self.choice is not None and self.in_prompt else None

    def sampling_options(self, structure: Mapping[str, Any]) -> dict[str, Any]:
        """Sampling options that the tools set.

        Args:
            structure: fields of the body that set a structure of the output.

        Raises:
            RequestError: both the tools and the body determine the format of the output.
        """
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
