"""Parses JSON bodies, reports the position of errors, and names ignored fields in responses."""

import json
import re
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import cache
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from quire.layout.values import find_fault
from quire.serve.errors import InvalidBody, InvalidField, bounded
from quire.serve.fields import MAX_EXTRA_FIELDS
from quire.serve.tenant_keys import tenant_of

IGNORED_HEADER = "X-Ignored-Fields"

MAX_INLINE_BYTES = 1 << 16
"""Larger bodies are parsed and validated in the tokenizer threads, with fair scheduling."""

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class JsonRequest(Request):
    """A request whose body is JSON.

    Attributes:
        model: model of the body; None for a path without a body.
    """

    model: type[BaseModel] | None = None

    async def json(self) -> Any:
        """Parse the body; a large body is also validated and returned as an object of its model.

        Raises:
            HTTPException: 400 for a body that is not JSON, with the position.
            InvalidBody: an unusable value, or a large body that fails validation.
        """
        raw = await self.body()
        if len(raw) <= MAX_INLINE_BYTES or self.model is None:
            with _naming_the_position():
                value = json.loads(raw)
            _refuse_fault(value)
            return value
        texts, model = self.app.state.service.texts, self.model
        return await texts.in_turn_of(tenant_of(self), lambda: _read_large(raw, model))


class JsonRoute(APIRoute):
    """A route with JSON bodies."""

    def get_route_handler(self) -> Handler:
        """Create the handler of the route, with `JsonRequest` as its request."""
        handler = super().get_route_handler()
        field = self.body_field
        model: Any = None if field is None else field.field_info.annotation

        async def handle(request: Request) -> Response:
            if request.method == "POST":
                _check_content_type(request.headers.get("content-type"))
            json_request = JsonRequest(request.scope, request.receive)
            json_request.model = model
            response = await handler(json_request)
            ignored = getattr(request.state, "ignored_fields", "")
            if ignored:
                response.headers[IGNORED_HEADER] = ignored
            response.headers.update(getattr(request.state, "response_headers", {}))
            return response

        return handle


def _read_large(raw: bytes, model: type[BaseModel]) -> object:
    """Parse and validate a large body without blocking other threads for long."""
    with _naming_the_position():
        value = loads_in_slices(raw)
    _refuse_fault(value)
    if isinstance(value, dict) and len(value) > MAX_EXTRA_FIELDS + len(model.model_fields):
        raise HTTPException(
            HTTPStatus.BAD_REQUEST,
            f"the body has {len(value)} fields, of which at most {MAX_EXTRA_FIELDS} may be "
            "unknown: leave them out",
        )
    try:
        return model.model_validate(value, from_attributes=True)  # like FastAPI
    except ValidationError as error:
        raise InvalidBody.of(error, value) from None


def _refuse_fault(value: object) -> None:
    """Refuse a value that no endpoint can use, so that none of them checks its strings.

    Raises:
        InvalidBody: names the field.
    """
    fault = find_fault(value)
    if fault is not None:
        raise InvalidBody([InvalidField(path=fault.path, message=fault.problem)])


@contextmanager
def _naming_the_position() -> Iterator[None]:
    try:
        yield
    except json.JSONDecodeError as error:
        position = f"character {error.pos + 1} (line {error.lineno}, column {error.colno})"
        raise _not_json(f"{error.msg} at {position}") from None
    except UnicodeDecodeError as error:
        raise _not_json(f"byte {error.start + 1} is not {error.encoding}") from None
    except RecursionError:
        raise _not_json("brackets are nested too deeply") from None
    except TooManyNodes:
        raise HTTPException(
            HTTPStatus.BAD_REQUEST,
            f"the body has more than {MAX_NODES:,} arrays, objects and members of objects: split "
            "it into several requests",
        ) from None
    except ValueError:  # Python's limit on digits
        raise _not_json("an integer has more than 4,300 digits") from None


def _not_json(problem: str) -> HTTPException:
    return HTTPException(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {problem}")


def _check_content_type(content_type: str | None) -> None:
    media = (content_type or "").partition(";")[0].strip().lower()
    kind, _, subtype = media.partition("/")
    if kind == "application" and (subtype == "json" or subtype.endswith("+json")):
        return
    got = f"got {bounded(media, 80)!r}" if media else "got none"
    raise HTTPException(
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        f"expected a body of type application/json, {got}: send the header "
        "Content-Type: application/json",
    )


# Parses large JSON in slices, so that other threads can run in between.
#
# `json.loads` is one call into C that holds the GIL: 0.4 s for 8 MiB of token ids. Here Python code
# walks through arrays and objects, and passes at most `MAX_SCALARS` numbers and strings of an
# array to `json.loads` per call.

MAX_NODES = 1 << 17
"""Limit of arrays, objects and members of objects in one body: each is parsed in Python."""

MAX_SCALARS = 4096
"""Numbers and strings of an array that are parsed by one call of `json.loads`."""

_SCALAR = r'(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"|[^\s"\[\]{},:]++)'
_SPACE = r"[ \t\n\r]*+"
_SPACES = re.compile(_SPACE)
_decode = json.JSONDecoder().raw_decode


class TooManyNodes(ValueError):
    """JSON with more arrays, objects and members than `MAX_NODES`."""


def loads_in_slices(raw: bytes, *, max_scalars: int = MAX_SCALARS) -> object:
    """Parse JSON with the same result as `json.loads`.

    Args:
        raw: JSON in UTF-8, UTF-16 or UTF-32.
        max_scalars: most numbers and strings of an array that are parsed by one call.

    Raises:
        ValueError: the same errors as `json.loads`.
        RecursionError: brackets are nested too deeply.
        TooManyNodes: more than `MAX_NODES`.
    """
    text = raw.decode(json.detect_encoding(raw), "surrogatepass")
    reader = _Reader(text, _scalars(max_scalars))
    value, end = reader.value(_skip(text, 0))
    end = _skip(text, end)
    if end != len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


class _Reader:
    """Parser of one text; each method returns a value and the index after it."""

    def __init__(self, text: str, scalars: re.Pattern[str]) -> None:
        self._text = text
        self._run_of_scalars = scalars
        self._nodes = 0

    def value(self, start: int) -> tuple[object, int]:
        """Parse any value that begins at `start`."""
        opening = self._text[start : start + 1]
        if opening == "[":
            return self._array(start + 1)
        if opening == "{":
            return self._object(start + 1)
        return _decode(self._text, start)

    def _array(self, start: int) -> tuple[list[object], int]:
        self._count()
        values: list[object] = []
        if self._is_closed(start, "]"):
            return values, _skip(self._text, start) + 1
        while True:
            start = self._scalars(start, values)
            value, end = self.value(_skip(self._text, start))
            values.append(value)
            start, is_last = self._delimiter(end, "]")
            if is_last:
                return values, start

    def _object(self, start: int) -> tuple[dict[str, object], int]:
        self._count()
        members: dict[str, object] = {}
        if self._is_closed(start, "}"):
            return members, _skip(self._text, start) + 1
        while True:
            self._count()
            key, end = self._key(_skip(self._text, start))
            members[key], end = self.value(_skip(self._text, end))
            start, is_last = self._delimiter(end, "}")
            if is_last:
                return members, start

    def _scalars(self, start: int, values: list[object]) -> int:
        """Append numbers and strings that are followed by a comma; return the index after them."""
        while (run := self._run_of_scalars.match(self._text, start)) is not None:
            try:
                values += json.loads(f"[{run[0][:-1]}]")
            except json.JSONDecodeError as error:
                position = start + error.pos - 1
                raise json.JSONDecodeError(error.msg, self._text, position) from None
            start = run.end()
        return start

    def _key(self, start: int) -> tuple[str, int]:
        text = self._text
        if text[start : start + 1] != '"':
            raise json.JSONDecodeError(
                "Expecting property name enclosed in double quotes", text, start
            )
        key, end = _decode(text, start)
        end = _skip(text, end)
        if text[end : end + 1] != ":":
            raise json.JSONDecodeError("Expecting ':' delimiter", text, end)
        return key, end + 1

    def _delimiter(self, end: int, closing: str) -> tuple[int, bool]:
        """Index after a comma or closing bracket, and whether it was a closing bracket."""
        end = _skip(self._text, end)
        found = self._text[end : end + 1]
        if found not in (",", closing):
            raise json.JSONDecodeError("Expecting ',' delimiter", self._text, end)
        return end + 1, found == closing

    def _is_closed(self, start: int, closing: str) -> bool:
        return self._text.startswith(closing, _skip(self._text, start))

    def _count(self) -> None:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise TooManyNodes


@cache
def _scalars(most: int) -> re.Pattern[str]:
    """Pattern of one to `most` scalars, each followed by a comma."""
    return re.compile(rf"(?:{_SPACE}{_SCALAR}{_SPACE},){{1,{most}}}+")


def _skip(text: str, start: int) -> int:
    """Index after white space."""
    space = _SPACES.match(text, start)
    return start if space is None else space.end()
