"""Reads JSON bodies and says where they are wrong; names ignored fields in the response."""

import json
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute

from quire.serve.errors import bounded

IGNORED_HEADER = "X-Ignored-Fields"

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class JsonRequest(Request):
    """A request whose body is JSON."""

    async def json(self) -> Any:
        """The body.

        Raises:
            HTTPException: 400 for a body that is not JSON, with the position.
        """
        try:
            return json.loads(await self.body())
        except json.JSONDecodeError as error:
            place = f"character {error.pos + 1} (line {error.lineno}, column {error.colno})"
            raise _not_json(f"{error.msg} at {place}") from None
        except UnicodeDecodeError as error:
            raise _not_json(f"byte {error.start + 1} is not {error.encoding}") from None
        except RecursionError:
            raise _not_json("its brackets are nested too deep") from None
        except ValueError:  # Python's limit of digits
            raise _not_json("an integer has more than 4,300 digits") from None


class JsonRoute(APIRoute):
    """A path whose POST bodies are JSON."""

    def get_route_handler(self) -> Handler:
        """The handler of the path, with `JsonRequest` as its request."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            if request.method == "POST":
                _check_content_type(request.headers.get("content-type"))
            response = await handler(JsonRequest(request.scope, request.receive))
            ignored = getattr(request.state, "ignored_fields", "")
            if ignored:
                response.headers[IGNORED_HEADER] = ignored
            return response

        return handle


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
