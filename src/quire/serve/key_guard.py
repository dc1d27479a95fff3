"""Refuses requests without a known API key before anything of them is read.

Every path needs a key once tenants have keys, except `OPEN_PATHS`: a path that is added later
needs one too.
"""

from http import HTTPStatus

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.serve.errors import Unauthorized, error_response
from quire.serve.tenant_keys import TenantKeys

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Paths that answer without a key: probes of a load balancer have none."""

_POLICY_VIOLATION = 1008  # RFC 6455, section 7.4.1


class KeyGuard:
    """ASGI middleware around the whole application.

    It puts the tenant of a request into `request.state.tenant`.

    Args:
        app: the application.
        keys: the keys of the tenants.
    """

    def __init__(self, app: ASGIApp, keys: TenantKeys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it with status 401."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        try:
            tenant = self._keys.tenant_of(_authorization(scope))
        except Unauthorized as error:
            if scope["path"] not in OPEN_PATHS:
                await _refuse(error, scope, receive, send)
                return
            tenant = ""
        scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)


def tenant_of(request: Request) -> str:
    """The tenant that the guard found."""
    tenant = request.state.tenant
    assert isinstance(tenant, str)
    return tenant


def _authorization(scope: Scope) -> str | None:
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    return values[0].decode("latin-1") if values else None


async def _refuse(error: Unauthorized, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await receive()  # the request to connect
        await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": str(error)})
        return
    response = error_response(HTTPStatus.UNAUTHORIZED, str(error), headers=_CHALLENGE)
    await response(scope, receive, send)


_CHALLENGE = {"WWW-Authenticate": "Bearer"}
