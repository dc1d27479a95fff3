"""Refuses requests for other host names: protection of local servers against DNS rebinding.

A web page of another origin can change the address of its own host name to 127.0.0.1. Its requests
then have the same origin as the page, so that the browser does not ask for permission (CORS). Their
header `Host` has the name of the page.
"""

from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.serve.config import is_loopback
from quire.serve.errors import bounded, error_response


class LocalHosts:
    """ASGI middleware that accepts only `localhost` and loopback addresses as `Host`.

    Args:
        app: the application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request, or refuse it with status 403."""
        given = None if scope["type"] != "http" else _host(scope)
        if given is None or _is_local(given):
            await self._app(scope, receive, send)
            return
        message = (
            f"expected localhost or a loopback address in the header Host, got "
            f"{bounded(given, 100)!r}: this server has no API key and accepts requests of this "
            "machine only; use http://localhost, or start the server with --api-key or --host"
        )
        response = error_response(HTTPStatus.FORBIDDEN, message, path=scope["path"])
        await response(scope, receive, send)


def _host(scope: Scope) -> str | None:
    """The header `Host`; None if the request has none, as in HTTP/1.0."""
    values = [value for name, value in scope["headers"] if name == b"host"]
    return values[0].decode("latin-1") if values else None


def _is_local(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:  # not a host
        return False
    return name.endswith(".localhost") or is_loopback(name)
