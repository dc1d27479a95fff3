"""The tools of a chat and the choice among them, in OpenAI's format.

tools         [{"type": "function", "function": {"name", "description", "parameters"}}]
tool_choice   "none", "auto", "required", or {"type": "function", "function": {"name"}}
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quire.config.structured_outputs import MAX_NESTING, nesting_depth
from quire.errors import RequestError

MAX_TOOLS = 128
"""Limit of the tools of a request, as in OpenAI's API."""

MAX_CALLS = 32
"""Limit of the calls of one output with `tool_choice` required."""

_NAME = re.compile(r"[a-zA-Z0-9_][a-zA-Z0-9_.:/-]{0,127}")

ToolMode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any]  # JSON schema of the arguments
    definition: Mapping[str, Any]  # as in the request, for the chat template


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """The tools of a chat and which of them the model must call."""

    mode: ToolMode  # none and auto as in OpenAI's API
    tools: tuple[Tool, ...]
    definitions: tuple[Mapping[str, Any], ...]  # all tools of the request, for the chat template
    parallel: bool = True  # whether an output may have several calls

    @property
    def is_forced(self) -> bool:
        """Whether the output must be calls, so that a grammar determines its format."""
        return self.mode in ("required", "named")

    def schema(self) -> dict[str, Any]:
        """The JSON schema of a forced output, in vLLM's format.

        It is the arguments of the named tool, or a list of {"name", "parameters"}.
        """
        definitions = {
            f"tool{number}": _Mover.to(f"#/$defs/tool{number}", tool.parameters).schema(
                tool.parameters
            )
            for number, tool in enumerate(self.tools)
        }
        if self.mode == "named":
            return {"$ref": "#/$defs/tool0", "$defs": definitions}
        calls = [_call(tool.name, number) for number, tool in enumerate(self.tools)]
        return {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_CALLS if self.parallel else 1,
            "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
            "$defs": definitions,
        }


def read_tools(
    tools: Sequence[object] | None, choice: object, *, parallel: bool | None
) -> ToolChoice | None:
    """Read the fields `tools`, `tool_choice` and `parallel_tool_calls`; None without tools."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise RequestError("`tool_choice` needs `tools`: add them", param="tool_choice")
        return None
    known = [_tool(tool, number) for number, tool in enumerate(tools)]
    names = [tool.name for tool in known]
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise RequestError(
            f"expected tools with different names, got {repeated!r} twice", param="tools"
        )
    mode, callable_tools = _choice(choice, known)
    return ToolChoice(
        mode=mode,
        tools=tuple(callable_tools),
        definitions=tuple(tool.definition for tool in known),
        parallel=parallel is not False,
    )


def _tool(value: object, number: int) -> Tool:
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or value.get("type") != "function":
        raise RequestError(
            'expected a tool {"type": "function", "function": {"name": ..., "parameters": {...}}}',
            param=f"tools.{number}",
        )
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            "expected a function with a name of 1 to 128 letters, digits and the characters _ - . "
            f": /, got {_shown(name)}",
            param=f"tools.{number}.function.name",
        )
    for key, kind, expected in (("description", str, "a text"), ("strict", bool, "true or false")):
        if not isinstance(function.get(key), kind | None):
            raise RequestError(
                f"expected {key} to be {expected}, got {type(function[key]).__name__}",
                param=f"tools.{number}.function.{key}",
            )
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping | None):
        raise RequestError(
            f"expected parameters to be a JSON schema (an object), got {type(parameters).__name__}",
            param=f"tools.{number}.function.parameters",
        )
    if nesting_depth(parameters) > MAX_NESTING:
        raise RequestError(
            f"expected parameters nested at most {MAX_NESTING} levels deep, got more",
            param=f"tools.{number}.function.parameters",
        )
    return Tool(name=name, parameters=parameters or {"type": "object"}, definition=value)


def _choice(choice: object, tools: list[Tool]) -> tuple[ToolMode, list[Tool]]:
    if choice is None or choice == "auto":
        return "auto", tools
    if choice == "none":
        return "none", tools
    if choice == "required":
        return "required", tools
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(choice, Mapping) or choice.get("type") != "function" or name is None:
        raise RequestError(
            'expected `tool_choice` to be "none", "auto", "required" or {"type": "function", '
            f'"function": {{"name": ...}}}}, got {_shown(choice)}',
            param="tool_choice",
        )
    found = [tool for tool in tools if tool.name == name]
    if not found:
        raise RequestError(
            f"`tool_choice` names {_shown(name)}, which is not one of the tools",
            param="tool_choice",
        )
    return "named", found


def _shown(value: object) -> str:
    return repr(value[:40]) if isinstance(value, str) else type(value).__name__


def _call(name: str, number: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/tool{number}"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


_SCHEMAS_BY_NAME = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")


@dataclass(frozen=True, slots=True)
class _Mover:
    """Prepares the schema of a tool for its place in the schema of a forced output."""

    place: str  # such as "#/$defs/tool0"
    closes: bool  # objects have only the listed properties

    @classmethod
    def to(cls, place: str, schema: Mapping[str, Any]) -> "_Mover":
        """Create a mover; parts of `allOf` must stay open, since each lists other properties."""
        return cls(place, closes="allOf" not in json.dumps(schema))

    def schema(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return [self.schema(inner) for inner in schema]
        if not isinstance(schema, Mapping):
            return schema
        moved = {
            key: self._member(key, value)
            for key, value in schema.items()
            # not the keywords that the model reads in the prompt
            if key not in ("$comment", "default", "description", "examples", "title")
        }
        is_open = not moved.keys() & {"additionalProperties", "patternProperties"}
        if self.closes and is_open and isinstance(moved.get("properties"), Mapping):
            moved["additionalProperties"] = False
        return moved

    def _member(self, key: str, value: Any) -> Any:
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            return self.place + value[1:]
        if key in ("const", "enum"):
            return value
        if key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            return {name: self.schema(inner) for name, inner in value.items()}
        return self.schema(value)
