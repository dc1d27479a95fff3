"""Fields of a request that set the structure of its output, in the formats of OpenAI and vLLM.

    response_format      {"type": "json_schema", "json_schema": {"name", "schema", "strict"}}
    structured_outputs   {"json": schema}, or regex, choice, grammar, json_object
    guided_*             the earlier names of vLLM

The server and `quire batch` use the same functions. A body may set one of these fields.
"""

from collections.abc import Callable, Mapping
from typing import Any

from quire.config.structured_outputs import FIELD, StructuredOutputs, as_structured_outputs
from quire.errors import RequestError

RESPONSE_FORMAT = "response_format"
_WHITESPACE = "guided_whitespace_pattern"
_GUIDED: Mapping[str, str] = {
    "guided_json": "json",
    "guided_json_object": "json_object",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
STRUCTURE_FIELDS = frozenset({RESPONSE_FORMAT, FIELD, _WHITESPACE, *_GUIDED})
"""All fields that set a structure."""

_FORMATS = ("text", "json_object", "json_schema")


def read_structure(body: Mapping[str, Any]) -> StructuredOutputs | None:
    """Read the structure that a body sets; None if it sets none."""
    found = _sources(body)
    if not found:
        if body.get(_WHITESPACE) is not None:
            raise RequestError(f"{_WHITESPACE} needs guided_json: leave it out", param=_WHITESPACE)
        return None
    if len(found) > 1:
        raise RequestError(
            f"expected one field that sets a structure, got {' and '.join(sorted(found))}: leave "
            "the others out",
            param=sorted(found)[0],
        )
    [options] = found.values()
    if body.get(_WHITESPACE) is not None:
        options = {**options, "whitespace_pattern": body[_WHITESPACE]}
    try:
        return as_structured_outputs(FIELD, options)
    except RequestError as error:
        error.param = param_of(body, error.param)
        raise


def param_of(body: Mapping[str, Any], param: str | None) -> str | None:
    """The field of a body that sets an option of `StructuredOutputs`."""
    if param is None or param.split(".")[0] != FIELD or body.get(FIELD) is not None:
        return param
    if param == f"{FIELD}.whitespace_pattern":
        return _WHITESPACE
    source = next(iter(_sources(body)), None)
    if source == RESPONSE_FORMAT:
        return f"{RESPONSE_FORMAT}.json_schema" if param == f"{FIELD}.json" else RESPONSE_FORMAT
    return source or param


def _sources(body: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    if body.get(FIELD) is not None:
        found[FIELD] = body[FIELD]
    for name, option in _GUIDED.items():
        if body.get(name) not in (None, False):
            found[name] = {option: body[name]}
    if body.get(RESPONSE_FORMAT) is not None:
        options = _response_format(body[RESPONSE_FORMAT])
        if options is not None:
            found[RESPONSE_FORMAT] = options
    return found


def _response_format(value: object) -> Mapping[str, Any] | None:
    """Options that a `response_format` sets; None for text."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind not in _FORMATS:
        raise RequestError(
            f"expected {RESPONSE_FORMAT} to be an object with a type of {', '.join(_FORMATS)}, got "
            f"{kind[:60] if isinstance(kind, str) else type(kind).__name__}",
            param=RESPONSE_FORMAT,
        )
    assert isinstance(value, Mapping)
    return _READERS[kind](value)


def _json_schema(value: Mapping[str, Any]) -> Mapping[str, Any]:
    wanted = value.get("json_schema")
    if not isinstance(wanted, Mapping) or not isinstance(wanted.get("schema"), Mapping):
        raise RequestError(
            f'expected {RESPONSE_FORMAT}.json_schema to be {{"name": ..., "schema": {{...}}}}',
            param=f"{RESPONSE_FORMAT}.json_schema",
        )
    if not isinstance(wanted.get("strict"), bool | None):
        raise RequestError(
            f"expected strict to be true or false, got {type(wanted['strict']).__name__}",
            param=f"{RESPONSE_FORMAT}.json_schema.strict",
        )
    return {"json": wanted["schema"]}


_READERS: Mapping[object, Callable[[Mapping[str, Any]], Mapping[str, Any] | None]] = {
    "text": lambda _: None,
    "json_object": lambda _: {"json_object": True},
    "json_schema": _json_schema,
}
