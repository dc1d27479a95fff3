"""Parses JSON bodies, reports the position of errors, and names ignored fields in responses."""

import json
import re
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from quire.layout.values import find_fault
from quire.serve.errors import InvalidBody, InvalidField, bounded
from quire.serve.fields import MAX_EXTRA_FIELDS
from quire.serve.tenant_keys import tenant_of

IGNORED_HEADER = "X-Ignored-Fields"

MAX_INLINE_BYTES = 1 << 16
"""Larger bodies are parsed and validated in the tokenizer threads, with fair scheduling."""

MAX_NODES = 1 << 17
"""Limit of arrays, objects and members of objects in a large body: the parser holds the GIL, and
takes many times longer for one of them than for a number."""

_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""Strings. The last may be open: a search for its end from each quote would take quadratic time."""

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class JsonRequest(Request):
    """A request whose body is JSON."""

    model: type[BaseModel] | None = None

    async def json(self) -> Any:
        """Parse the body; a large body is also validated and returned as an object of its model."""
        raw = await self.body()
        if len(raw) <= MAX_INLINE_BYTES or self.model is None:
            return _parsed(raw)
        texts, model = self.app.state.service.texts, self.model
        return await texts.in_turn_of(tenant_of(self), lambda: read_large(raw, model))


class JsonRoute(APIRoute):
    """A route with JSON bodies."""

    def get_route_handler(self) -> Handler:
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


def read_large(raw: bytes, model: type[BaseModel]) -> object:
    """Parse and validate a large body without blocking other threads for long."""
    with _naming_the_position():
        refuse_many_nodes(raw.decode(json.detect_encoding(raw), "surrogatepass"))
    value = _parsed(raw)
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


def _parsed(raw: bytes) -> object:
    """Parse JSON, and refuse values that no endpoint can use, so that none checks its strings."""
    with _naming_the_position():
        value = parse_json(raw)
    fault = find_fault(value)
    if fault is not None:
        raise InvalidBody([InvalidField(path=fault.path, message=fault.problem)])
    return value


def parse_json(raw: bytes) -> object:
    """Parse JSON with the result and errors of `json.loads`, in less time."""
    try:
        return from_json(raw)
    except ValueError:  # or halves of surrogate pairs, more than 200 levels, UTF-16
        return json.loads(raw)


def refuse_many_nodes(text: str) -> None:
    """Refuse more than `MAX_NODES` before they are parsed."""
    if _count_nodes(text) > MAX_NODES and _count_nodes(_STRING.sub("", text)) > MAX_NODES:
        raise HTTPException(
            HTTPStatus.BAD_REQUEST,
            f"the body has more than {MAX_NODES:,} arrays, objects and members of objects: split "
            "it into several requests",
        )


def _count_nodes(text: str) -> int:
    return text.count("[") + text.count("{") + text.count(":")


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
