"""API keys: which of them speaks for which tenant. The operator says so in a file, never a client.

# tenants.toml: a key, or a list of keys, for each tenant
a = ["sk-a-2f0c77d1", "sk-a-9b2e4410"]
b = "sk-b-51d09a3e"
"""

import hashlib
import tomllib
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.config.generation_request import DEFAULT_TENANT
from quire.errors import ConfigError, UnknownName
from quire.serve.errors import Unauthorized, error_response
from quire.tenancy.tenants import TenantSpec, check_tenant_name

LEAST_KEY_CHARACTERS = 8


class TenantKeys:
    """From the `Authorization` header of a request to its tenant.

    Keys are kept as digests, so that the time a look-up takes says nothing about them.

    Args:
        keys: the keys of each tenant.
        specs: the tenants of the engine; without any, every tenant is taken.

    Raises:
        ConfigError: a bad or unknown tenant, a short key, one that two tenants have, or tenants of
            which nobody could speak for any.
    """

    def __init__(
        self, keys: Mapping[str, tuple[str, ...]] | None = None, specs: tuple[TenantSpec, ...] = ()
    ) -> None:
        known = {spec.name for spec in specs}
        self._tenants: dict[bytes, str] = {}
        for tenant, own in (keys or {}).items():
            check_tenant_name(tenant)
            if known and tenant not in known:
                raise UnknownName("tenant with an API key", tenant, known)
            for key in own:
                self._add(tenant, key)
        self._takes_anybody = DEFAULT_TENANT in known or not (known or self._tenants)
        if not self._tenants and not self._takes_anybody:
            raise ConfigError(
                f"--tenants names {', '.join(sorted(known))}, and no API key says who is who: "
                f"give --tenant-keys FILE, or name {DEFAULT_TENANT!r}, whose requests without a "
                "key are"
            )

    def _add(self, tenant: str, key: str) -> None:
        if len(key) < LEAST_KEY_CHARACTERS or not key.isascii() or not key.isprintable():
            raise ConfigError(
                f"an API key of tenant {tenant!r}: expected {LEAST_KEY_CHARACTERS} printable ASCII "
                f"characters or more, got {len(key)} characters"
            )
        holder = self._tenants.setdefault(_digest(key), tenant)
        if holder != tenant:
            raise ConfigError(f"tenants {holder!r} and {tenant!r} have the same API key")

    @property
    def tells_tenants_apart(self) -> bool:
        """Whether any tenant has a key."""
        return bool(self._tenants)

    def tenant_of(self, authorization: str | None) -> str:
        """The tenant of a request; without keys, the header is not read.

        Once tenants have keys, a request without one is refused, unless the tenants of the engine
        name `default`: that one needs no key.

        Args:
            authorization: the header, `Bearer KEY`; None where there is none.

        Raises:
            Unauthorized: a key nobody has, or none where one is needed.
        """
        if self._tenants and authorization is not None:
            scheme, _, key = authorization.partition(" ")
            tenant = self._tenants.get(_digest(key.strip()))
            if scheme.lower() != "bearer" or tenant is None:
                raise Unauthorized("the API key is not known here")
            return tenant
        if not self._takes_anybody:
            raise Unauthorized("an API key is needed: send it as Authorization: Bearer KEY")
        return DEFAULT_TENANT


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def read_tenant_keys(path: Path) -> dict[str, tuple[str, ...]]:
    """The keys of each tenant, from a TOML file.

    Raises:
        ConfigError: a file that cannot be read, is no TOML, or holds something else.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read --tenant-keys {path}: {error.strerror}") from None
    except ValueError as error:  # TOML's own, and UTF-8's
        raise ConfigError(f"--tenant-keys {path} is no TOML file: {error}") from None
    return {tenant: _keys_of(tenant, value) for tenant, value in table.items()}


def _keys_of(tenant: str, value: object) -> tuple[str, ...]:
    keys = [value] if isinstance(value, str) else value
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ConfigError(f"tenant {tenant!r}: expected an API key or a list of API keys as texts")
    return tuple(keys)


# ---- key guard -----------------------------------------------------------------------------------

# Refuses requests without a known API key before anything of them is read.
#
# Every path needs a key once tenants have keys, except `OPEN_PATHS`: a path that is added later
# needs one too.

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
