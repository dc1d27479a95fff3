"""Parsers of forced outputs, whose format a grammar determines; see `ToolChoice.schema`."""

from quire.serve.tools.json_text import WHITESPACE, Arguments, CallStart
from quire.serve.tools.parser import ToolParser


class RequiredParser(ToolParser):
    """Output of `tool_choice` required: a list of {"name", "parameters"}, without any marker."""

    def _advance(self) -> bool:
        if self._reader is None:
            self._buffer = self._buffer.lstrip(WHITESPACE + "[,]")
            if not self._buffer:
                return False
        return self._read_call()


class NamedParser(ToolParser):
    """Output of a named `tool_choice`: the arguments of the function.

    Args:
        name: name of the function.
    """

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
