"""API keys of tenants, and the middleware that checks them."""

import hashlib
import hmac
import re
from collections.abc import Collection, Mapping
from http import HTTPStatus

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.config.generation_request import DEFAULT_TENANT
from quire.errors import ConfigError, UnknownName
from quire.serve.config import check_key
from quire.serve.errors import Unauthorized, error_response
from quire.tenancy.tenants import TenantSpec, check_tenant_name

DIGEST_PREFIX = "sha256:"
_DIGEST = re.compile(r"sha256:[0-9a-fA-F]{64}")


class TenantKeys:
    """Maps the `Authorization` header of a request to its tenant.

    Only digests of the keys are stored. They are compared in constant time, so that the time of a
    lookup reveals nothing about a key.

    Args:
        keys: the keys of each tenant.
        specs: tenants of the engine; empty: every tenant is allowed.

    Raises:
        ConfigError: an invalid or unknown tenant, a short key, a key of two tenants, or tenants
            that no request could use.
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
        allows_default = DEFAULT_TENANT in known and not (keys or {}).get(DEFAULT_TENANT)
        self._allows_no_key = allows_default or not (known or self._tenants)
        if not self._tenants and not self._allows_no_key:
            raise ConfigError(
                f"--tenants names {', '.join(sorted(known))}, but no tenant has an API key: give "
                f"--tenant-keys FILE, or add tenant {DEFAULT_TENANT!r} for requests without a key"
            )

    def _add(self, tenant: str, key: str) -> None:
        if key.startswith(DIGEST_PREFIX):
            self._add_digest(tenant, _parsed_digest(tenant, key))
            return
        check_key(key, f"an API key of tenant {tenant!r}")
        self._add_digest(tenant, _digest(key))

    def _add_digest(self, tenant: str, digest: bytes) -> None:
        holder = self._tenants.setdefault(digest, tenant)
        if holder != tenant:
            raise ConfigError(f"tenants {holder!r} and {tenant!r} have the same API key")

    @property
    def tells_tenants_apart(self) -> bool:
        """Whether any tenant has a key."""
        return bool(self._tenants)

    def tenant_of(self, authorization: str | None) -> str:
        """The tenant of a request; if no tenant has a key, the header is not read.

        If tenants have keys, a request without a key is refused, unless the tenants of the engine
        include `default` and `default` has no key.

        Args:
            authorization: the header, `Bearer KEY`; None if missing.

        Raises:
            Unauthorized: an unknown key, or a missing key.
        """
        if self._tenants and authorization is not None:
            key = bearer_key(authorization)
            tenant = None if key is None else self._holder(_digest(key))
            if tenant is None:
                raise Unauthorized("unknown API key")
            return tenant
        if not self._allows_no_key:
            raise Unauthorized("missing API key: send it as Authorization: Bearer KEY")
        return DEFAULT_TENANT

    def _holder(self, digest: bytes) -> str | None:
        """The tenant of a digest; every known digest is compared, whether one matches or not."""
        found = None
        for known, tenant in self._tenants.items():
            if hmac.compare_digest(known, digest):
                found = tenant
        return found


def bearer_key(authorization: str) -> str | None:
    """The key of a header `Bearer KEY`; None for another scheme."""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


def _parsed_digest(tenant: str, text: str) -> bytes:
    if _DIGEST.fullmatch(text) is None:
        raise ConfigError(
            f"an API key of tenant {tenant!r}: expected {DIGEST_PREFIX} and 64 hexadecimal digits, "
            f"got {len(text) - len(DIGEST_PREFIX)} characters"
        )
    return bytes.fromhex(text.removeprefix(DIGEST_PREFIX))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


# ---- key guard -----------------------------------------------------------------------------------

# Refuses requests without a known API key before their body is read.
#
# If tenants have keys, every path except `OPEN_PATHS` needs one, including paths added later.

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/ping"})
"""Paths without authentication, for the probes of a load balancer."""

_POLICY_VIOLATION = 1008  # RFC 6455, section 7.4.1


class KeyGuard:
    """ASGI middleware that checks API keys.

    The tenant of a request is stored in `request.state.tenant`.

    Args:
        app: the application.
        keys: API keys of the tenants.
        open_paths: paths that need no key.
    """

    def __init__(
        self, app: ASGIApp, keys: TenantKeys, open_paths: Collection[str] = OPEN_PATHS
    ) -> None:
        self._app, self._keys, self._open_paths = app, keys, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request, or refuse it with status 401."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        try:
            tenant = self._keys.tenant_of(authorization_of(scope))
        except Unauthorized as error:
            if scope["path"] not in self._open_paths:
                await _refuse(error, scope, receive, send)
                return
            tenant = ""
        scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)


def tenant_of(request: Request) -> str:
    """The tenant of a request that passed `KeyGuard`."""
    tenant = request.state.tenant
    assert isinstance(tenant, str)
    return tenant


def authorization_of(scope: Scope) -> str | None:
    """The header `Authorization`, or the key of Anthropic's clients (`x-api-key`) as one."""
    values = {name: value.decode("latin-1") for name, value in reversed(scope["headers"])}
    own_key = values.get(b"x-api-key")
    return values.get(b"authorization") or (None if own_key is None else f"Bearer {own_key}")


async def _refuse(error: Unauthorized, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await receive()  # the connection request
        await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": str(error)})
        return
    response = error_response(
        HTTPStatus.UNAUTHORIZED, str(error), headers=_CHALLENGE, path=scope["path"]
    )
    await response(scope, receive, send)


_CHALLENGE = {"WWW-Authenticate": "Bearer"}
