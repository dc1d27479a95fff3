"""Reads JSON bodies and says where they are wrong; names ignored fields in the response."""

import json
import re
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from quire.serve.errors import InvalidBody, bounded
from quire.serve.fields import MOST_EXTRA_FIELDS
from quire.serve.tenant_keys import tenant_of

IGNORED_HEADER = "X-Ignored-Fields"

MOST_INLINE_BYTES = 1 << 16
"""A larger body is parsed and validated in the threads that tokenize, in turns of the tenants."""

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class JsonRequest(Request):
    """A request whose body is JSON.

    Attributes:
        model: of the body; None for a path that takes none.
    """

    model: type[BaseModel] | None = None

    async def json(self) -> Any:
        """The body: as JSON gives it or, where it is large, as an object of its model.

        Raises:
            HTTPException: 400 for a body that is not JSON, with the position.
            InvalidBody: a large one that is not what its model expects.
        """
        raw = await self.body()
        if len(raw) <= MOST_INLINE_BYTES or self.model is None:
            with _naming_the_position():
                return json.loads(raw)
        texts, model = self.app.state.service.texts, self.model
        return await texts.in_turn_of(tenant_of(self), lambda: _read_large(raw, model))


class JsonRoute(APIRoute):
    """A path whose POST bodies are JSON."""

    def get_route_handler(self) -> Handler:
        """The handler of the path, with `JsonRequest` as its request."""
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
            return response

        return handle


def _read_large(raw: bytes, model: type[BaseModel]) -> object:
    """The object of a large body. Nothing in it keeps other threads waiting for long."""
    with _naming_the_position():
        value = loads_in_slices(raw)
    if isinstance(value, dict) and len(value) > MOST_EXTRA_FIELDS + len(model.model_fields):
        raise HTTPException(
            HTTPStatus.BAD_REQUEST,
            f"the body has {len(value)} fields, of which {MOST_EXTRA_FIELDS} may be unknown at "
            "most: leave them out",
        )
    try:
        return model.model_validate(value, from_attributes=True)  # as FastAPI does it
    except ValidationError as error:
        raise InvalidBody(error) from None


@contextmanager
def _naming_the_position() -> Iterator[None]:
    try:
        yield
    except json.JSONDecodeError as error:
        place = f"character {error.pos + 1} (line {error.lineno}, column {error.colno})"
        raise _not_json(f"{error.msg} at {place}") from None
    except UnicodeDecodeError as error:
        raise _not_json(f"byte {error.start + 1} is not {error.encoding}") from None
    except RecursionError:
        raise _not_json("its brackets are nested too deep") from None
    except TooManyNodes:
        raise HTTPException(
            HTTPStatus.BAD_REQUEST,
            f"the body has more than {MOST_NODES:,} arrays, objects and members of objects: send "
            "it in parts",
        ) from None
    except ValueError:  # Python's limit of digits
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


# ---- json slices ---------------------------------------------------------------------------------

# Reads large JSON in slices, so that the thread that does it lets others run in between.
#
# `json.loads` is one call into C. However many threads there are, all of them wait until it
# returns: 0.4 s for 8 MiB of token ids. Here Python code walks through arrays and objects, and
# gives at most `_MOST_SCALARS` numbers and texts of an array at a time to `json.loads`.

MOST_NODES = 1 << 17
"""Arrays, objects and members of objects in one body: each is handled one by one."""

_MOST_SCALARS = 4096
_SCALAR = r'(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"|[^\s"\[\]{},:]++)'
_SPACE = r"[ \t\n\r]*+"
_SCALARS = re.compile(rf"(?:{_SPACE}{_SCALAR}{_SPACE},){{1,{_MOST_SCALARS}}}+")
_SPACES = re.compile(_SPACE)
_decode = json.JSONDecoder().raw_decode


class TooManyNodes(ValueError):
    """JSON with more arrays, objects and members than `MOST_NODES`."""


def loads_in_slices(raw: bytes) -> object:
    """The value that JSON stands for, as `json.loads` gives it.

    Raises:
        ValueError: where `json.loads` raises one, and the same one.
        RecursionError: brackets that are nested too deep.
        TooManyNodes: more than `MOST_NODES`.
    """
    text = raw.decode(json.detect_encoding(raw), "surrogatepass")
    reader = _Reader(text)
    value, end = reader.value(_skip(text, 0))
    end = _skip(text, end)
    if end != len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


class _Reader:
    """Reads values of one text; each method returns a value and the index after it."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._nodes = 0

    def value(self, start: int) -> tuple[object, int]:
        """Any value. `start` is where it begins."""
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
        """Append the numbers and texts that a comma follows; where the rest begins."""
        while (run := _SCALARS.match(self._text, start)) is not None:
            try:
                values += json.loads(f"[{run[0][:-1]}]")
            except json.JSONDecodeError as error:
                place = start + error.pos - 1
                raise json.JSONDecodeError(error.msg, self._text, place) from None
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
        """The index after a comma or a closing bracket, and whether it was that."""
        end = _skip(self._text, end)
        found = self._text[end : end + 1]
        if found not in (",", closing):
            raise json.JSONDecodeError("Expecting ',' delimiter", self._text, end)
        return end + 1, found == closing

    def _is_closed(self, start: int, closing: str) -> bool:
        return self._text.startswith(closing, _skip(self._text, start))

    def _count(self) -> None:
        self._nodes += 1
        if self._nodes > MOST_NODES:
            raise TooManyNodes


def _skip(text: str, start: int) -> int:
    """The index after white space."""
    space = _SPACES.match(text, start)
    return start if space is None else space.end()
