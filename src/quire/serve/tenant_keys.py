"""API keys: which of them speaks for which tenant. The operator says so in a file, never a client.

# tenants.toml: a key, or a list of keys, for each tenant
a = ["sk-a-2f0c77d1", "sk-a-9b2e4410"]
b = "sk-b-51d09a3e"
"""

import hashlib
import tomllib
from collections.abc import Mapping
from pathlib import Path

from quire.config.generation_request import DEFAULT_TENANT
from quire.errors import ConfigError, UnknownName
from quire.serve.errors import Unauthorized
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
