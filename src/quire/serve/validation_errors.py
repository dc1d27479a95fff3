"""Errors of pydantic in plain words: the invalid field of the body, the expected and given value.

Pydantic reports every branch of a union, and has the branch in the location of the error. Here a
union has one error, whose location only has fields of the body.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from quire.serve.errors import bounded, error_response

MAX_VALIDATION_ERRORS = 4
MOST_SHOWN = 60  # characters of a value that is wrong
_MOST_PATH = 100  # characters of a path: clients choose the keys
_COUNTED = re.compile(r"should have (at (?:least|most) \d+ items?)")
_EXPECTED = "Input should be "
_OBJECTS = frozenset({"model_attributes_type", "model_type", "dict_type"})
"""Kinds of pydantic's errors for a value that is no JSON object."""

_KEY = "[key]"  # pydantic's marker for an invalid key of an object


class InvalidBody(HTTPException):
    """A JSON body with invalid fields.

    Attributes:
        fields: the invalid fields.
    """

    def __init__(self, fields: Sequence["InvalidField"]) -> None:
        super().__init__(HTTPStatus.BAD_REQUEST)
        self.fields = fields

    @classmethod
    def of(cls, error: ValidationError, body: object) -> "InvalidBody":
        """The error for a body that fails validation."""
        found = error.errors(include_url=False, include_context=False)
        located = [part | {"loc": ("body", *part["loc"])} for part in found]
        return cls(invalid_fields(located, {"body": body}))


@dataclass(frozen=True, slots=True, kw_only=True)
class InvalidField:
    """An invalid field.

    Attributes:
        path: path in the body, such as messages.0.content; empty for the body itself.
        message: what is wrong.
    """

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path or 'body'}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Located:
    """An error of pydantic with its location in the body.

    Attributes:
        error: the error.
        path: fields and indices.
        union: path of the outermost union around the field; None without one.
    """

    error: Mapping[str, Any]
    path: tuple[str, ...]
    union: tuple[str, ...] | None


def install_validation_handlers(app: FastAPI) -> None:
    """Install handlers that return errors of validation in the format of the API."""
    app.add_exception_handler(RequestValidationError, _handle_validation_error)
    app.add_exception_handler(InvalidBody, _handle_validation_error)


async def _handle_validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError | InvalidBody)
    if isinstance(error, InvalidBody):
        fields = error.fields
    else:
        fields = invalid_fields(error.errors(), {"body": error.body})
    parts = [str(field) for field in fields[:MAX_VALIDATION_ERRORS]]
    if len(fields) > len(parts):
        parts.append(f"and {len(fields) - len(parts)} more")
    path = request.url.path
    return error_response(
        HTTPStatus.BAD_REQUEST, "; ".join(parts), fields[0].path or None, path=path
    )


def invalid_fields(errors: Sequence[Mapping[str, Any]], value: object) -> list[InvalidField]:
    """The invalid fields of a value, each with one error.

    Args:
        errors: errors of pydantic.
        value: the value to which their locations apply.
    """
    unions: dict[object, list[_Located]] = {}
    for number, error in enumerate(errors):
        found = _located(error, value)
        unions.setdefault(number if found.union is None else found.union, []).append(found)
    return [_field(branches) for branches in unions.values()]


def _located(error: Mapping[str, Any], value: object) -> _Located:
    """Separate the fields in the location of an error from pydantic's names of branches."""
    path: list[str] = []
    union = None
    location, is_missing = error["loc"], error["type"] == "missing"
    for index, step in enumerate(location, start=1):
        if (isinstance(value, dict) and step in value) or (
            isinstance(value, list) and isinstance(step, int) and step < len(value)
        ):
            value = value[step]
        elif step == _KEY:
            continue
        elif location[0] == "body" and not (is_missing and index == len(location)):
            union = tuple(path) if union is None else union
            continue
        path.append(str(step))
    return _Located(error=error, path=tuple(path), union=union)


def _field(branches: Sequence[_Located]) -> InvalidField:
    """The error of the branch of a union that fits the value best."""
    deepest = max(len(branch.path) for branch in branches)
    best = [branch for branch in branches if len(branch.path) == deepest]
    kinds_fit = [branch for branch in best if not branch.error["msg"].startswith(_EXPECTED)]
    first = (kinds_fit or best)[0]
    errors = [branch.error for branch in best if branch.path == first.path]
    message = _what_is_wrong(first.error) if kinds_fit else _not_expected(errors)
    return InvalidField(path=bounded(".".join(first.path[1:]), _MOST_PATH), message=message)


def _what_is_wrong(error: Mapping[str, Any]) -> str:
    """Rewrite pydantic's message as expected and given value; a long value is truncated."""
    text = str(error["msg"]).removeprefix("Value error, ")
    if error.get("type") == "missing":
        return "required" if len(error["loc"]) > 1 else "expected a JSON object, got nothing"
    counted = _COUNTED.search(text)
    if counted and isinstance(error.get("input"), list | dict):
        return f"expected {counted[1]}, got {len(error['input']):,}"
    return text


def _not_expected(errors: Sequence[Mapping[str, Any]]) -> str:
    """The message for a value of which all branches of a union expect another kind."""
    *others, last = dict.fromkeys(_expected(error) for error in errors)
    expected = f"{', '.join(others)} or {last}" if others else last
    return f"expected {expected}, got {_shown(errors[0].get('input'))}"


def _expected(error: Mapping[str, Any]) -> str:
    if error.get("type") in _OBJECTS:
        return "a JSON object"
    expected = str(error["msg"]).removeprefix(_EXPECTED).partition(", ")[0]
    return f"a number {expected}" if expected.startswith(("less", "greater")) else expected


def _shown(given: object) -> str:
    if isinstance(given, list | dict):
        return "a list" if isinstance(given, list) else "an object"
    if isinstance(given, str):  # truncated first: the value may have megabytes
        return bounded(json.dumps(given[: MOST_SHOWN + 1], ensure_ascii=False), MOST_SHOWN)
    return bounded(json.dumps(given, default=repr), MOST_SHOWN)
