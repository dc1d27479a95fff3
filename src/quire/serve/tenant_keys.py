"""API keys of tenants, and the middleware that checks them.

API keys, rate limits and eviction rules of tenants, from a TOML file.

# tenants.toml: one key or a list of keys for each tenant, or a table with keys and rate limits
a = ["sk-a-2f0c77d1", "sk-a-9b2e4410"]
b = "sha256:9b31c0f2..."   # the SHA-256 digest of a key in hexadecimal digits

[c]
keys = "sk-c-51d09a3e"
requests_per_minute = 60
tokens_per_minute = 40000
evict = "h2o:cap=512"      # default rule of its requests
"""

import hashlib
import hmac
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.config.generation_request import DEFAULT_TENANT
from quire.errors import ConfigError, UnknownName
from quire.layout.values import read_toml
from quire.serve.config import KEY_VARIABLE, ServerConfig, check_key
from quire.serve.errors import Unauthorized, error_response
from quire.serve.rate_limits import RateLimit
from quire.tenancy.tenants import TenantSpec, check_tenant_name

DIGEST_PREFIX = "sha256:"
_DIGEST = re.compile(r"sha256:[0-9a-fA-F]{64}")


class TenantKeys:
    """Maps the `Authorization` header of a request to its tenant.

    Only digests of the keys are stored. They are compared in constant time, so that the time of a
    lookup reveals nothing about a key.

    Args:
        specs: tenants of the engine; empty: every tenant is allowed.
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
        return bool(self._tenants)

    def tenant_of(self, authorization: str | None) -> str:
        """The tenant of a request; if no tenant has a key, the header is not read.

        If tenants have keys, a request without a key is refused, unless the tenants of the engine
        include `default` and `default` has no key.

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
    """

    def __init__(
        self, app: ASGIApp, keys: TenantKeys, open_paths: Collection[str] = OPEN_PATHS
    ) -> None:
        self._app, self._keys, self._open_paths = app, keys, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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


@dataclass(frozen=True, slots=True)
class TenantFile:
    """Contents of a file of tenants."""

    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # of the tenants that have their own
    rate_limits: Mapping[str, RateLimit] = field(default_factory=dict)
    evict: Mapping[str, str] = field(default_factory=dict)  # of the tenants that have their own


def read_tenant_keys(path: Path) -> TenantFile:
    """Read the keys, rate limits and eviction rule of each tenant from a TOML file."""
    table = read_toml(path, "--tenant-keys")
    entries = {tenant: _entry(tenant, value) for tenant, value in table.items()}
    return TenantFile(
        {tenant: keys for tenant, (keys, _, _) in entries.items()},
        {tenant: limit for tenant, (_, limit, _) in entries.items() if limit is not None},
        {tenant: rule for tenant, (_, _, rule) in entries.items() if rule is not None},
    )


_LIMITS = ("requests_per_minute", "tokens_per_minute")


def _entry(tenant: str, value: object) -> tuple[tuple[str, ...], RateLimit | None, str | None]:
    if not isinstance(value, dict):
        return _keys_of(tenant, value), None, None
    unknown = value.keys() - {"keys", "evict", *_LIMITS}
    if unknown:
        raise ConfigError(
            f"tenant {tenant!r}: expected keys, evict, {' and '.join(_LIMITS)}, got "
            f"{min(unknown)!r}"
        )
    rule = value.get("evict")
    if rule is not None and not isinstance(rule, str):
        raise ConfigError(f"tenant {tenant!r}: expected evict as a string, got {rule!r}")
    limits = {name: value[name] for name in _LIMITS if name in value}
    try:
        limit = RateLimit(**limits) if limits else None
    except ConfigError as error:
        raise ConfigError(f"tenant {tenant!r}: {error}") from None
    return _keys_of(tenant, value.get("keys", [])), limit, rule


def _keys_of(tenant: str, value: object) -> tuple[str, ...]:
    keys = [value] if isinstance(value, str) else value
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ConfigError(
            f"tenant {tenant!r}: expected an API key or a list of API keys, as strings"
        )
    return tuple(keys)


def require_keys(found: TenantFile, path: Path) -> None:
    """Refuse tenants that have no API key: no request could use them, or every request could.

    Tenant `default` may have none if another tenant has one: `--tenants` determines whether
    requests without a key belong to it.
    """
    for tenant, keys in found.keys.items():
        if not keys and tenant != DEFAULT_TENANT:
            raise ConfigError(
                f"--tenant-keys {path}: expected at least one API key of tenant {tenant!r}, got "
                "none: add keys, or remove the tenant"
            )
    if not any(found.keys.values()):
        raise ConfigError(
            f"--tenant-keys {path}: expected at least one API key, got none: the server would be "
            "open; add keys, or leave out --tenant-keys for a server without keys"
        )


def with_default_keys(found: TenantFile, keys: tuple[str, ...]) -> TenantFile:
    """Add API keys of the default tenant, from `--api-key` or the environment."""
    if not keys:
        return found
    own = (*found.keys.get(DEFAULT_TENANT, ()), *keys)
    return replace(found, keys={**found.keys, DEFAULT_TENANT: own})


def open_tenants(config: ServerConfig, specs: Sequence[TenantSpec]) -> TenantFile:
    """The keys, rate limits and rules of tenants: of options, file and environment."""
    path = None if config.tenant_keys is None else Path(config.tenant_keys)
    found = TenantFile() if path is None else read_tenant_keys(path)
    # keys of the default tenant
    own = os.environ.get(KEY_VARIABLE)
    keys = (*config.api_key, *([own] if own else []))
    names = [spec.name for spec in specs]
    if keys and names and DEFAULT_TENANT not in names:
        source = "--api-key" if config.api_key else f"the environment variable {KEY_VARIABLE}"
        raise ConfigError(
            f"{source} has a key of tenant {DEFAULT_TENANT!r}, but --tenants only names "
            f"{', '.join(sorted(names))}: put their keys into --tenant-keys FILE, or add "
            f"{DEFAULT_TENANT!r} to --tenants"
        )
    found = with_default_keys(found, keys)
    if path is not None:
        require_keys(found, path)
    return found
