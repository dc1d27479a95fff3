"""API keys, rate limits and eviction rules of tenants, from a TOML file.

# tenants.toml: one key or a list of keys for each tenant, or a table with keys and rate limits
a = ["sk-a-2f0c77d1", "sk-a-9b2e4410"]
b = "sha256:9b31c0f2..."   # the SHA-256 digest of a key in hexadecimal digits

[c]
keys = "sk-c-51d09a3e"
requests_per_minute = 60
tokens_per_minute = 40000
evict = "h2o:cap=512"      # default rule of its requests
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from quire.config.generation_request import DEFAULT_TENANT
from quire.errors import ConfigError
from quire.layout.values import read_toml
from quire.serve.config import KEY_VARIABLE, ServerConfig
from quire.serve.rate_limits import RateLimit
from quire.tenancy.tenants import TenantSpec


@dataclass(frozen=True, slots=True)
class TenantFile:
    """Contents of a file of tenants.

    Attributes:
        keys: API keys of each tenant.
        rate_limits: limits of the tenants that have their own.
        evict: default eviction rule of the tenants that have their own.
    """

    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rate_limits: Mapping[str, RateLimit] = field(default_factory=dict)
    evict: Mapping[str, str] = field(default_factory=dict)


def read_tenant_keys(path: Path) -> TenantFile:
    """Read the keys, rate limits and eviction rule of each tenant from a TOML file.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or has other contents.
    """
    table = read_toml(path, "--tenant-keys")
    entries = {tenant: _entry(tenant, value) for tenant, value in table.items()}
    return TenantFile(
        {tenant: keys for tenant, (keys, _, _) in entries.items()},
        {tenant: limit for tenant, (_, limit, _) in entries.items() if limit is not None},
        {tenant: rule for tenant, (_, _, rule) in entries.items() if rule is not None},
    )


_LIMITS = ("requests_per_minute", "tokens_per_minute")


def _entry(tenant: str, value: object) -> tuple[tuple[str, ...], RateLimit | None, str | None]:
    """Keys, rate limit and eviction rule of one tenant."""
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

    Args:
        found: contents of the file, with the keys of `with_default_keys`.
        path: the file, for the error.

    Raises:
        ConfigError: a tenant without a key, or no key at all.
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
    """The keys, rate limits and rules of tenants: of options, file and environment.

    Args:
        config: options of the server.
        specs: tenants of the engine.

    Raises:
        ConfigError: invalid keys, or a file that cannot be read.
    """
    path = None if config.tenant_keys is None else Path(config.tenant_keys)
    found = TenantFile() if path is None else read_tenant_keys(path)
    found = with_default_keys(found, _default_keys(config, specs))
    if path is not None:
        require_keys(found, path)
    return found


def _default_keys(config: ServerConfig, specs: Sequence[TenantSpec]) -> tuple[str, ...]:
    """Keys of the default tenant: those of `--api-key` and of the environment.

    Raises:
        ConfigError: the engine has other tenants only.
    """
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
    return keys
