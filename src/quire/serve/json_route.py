"""Reads JSON bodies and says where they are wrong; names ignored fields in the response."""

import json
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from quire.serve.errors import InvalidBody, bounded
from quire.serve.fields import MOST_EXTRA_FIELDS
from quire.serve.json_slices import MOST_NODES, TooManyNodes, loads_in_slices
from quire.serve.key_guard import tenant_of

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
