"""Tenant specifications: a name, a weight and guaranteed KV bytes.

Format: `name:option=value,option=value`; tenants are separated by semicolons:

    a:weight=2,guaranteed=64MiB,burst=32MiB; b:weight=1
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from quire.errors import ConfigError, UnknownName
from quire.layout.sizes import parse_size

PUBLIC = "public"
"""The account of public prefixes, which all tenants share; it belongs to no tenant."""

OPTIONS = ("weight", "guaranteed", "burst")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSpec:
    """Weight, guarantee and limit of one tenant.

    Attributes:
        name: the tenant's name in requests.
        weight: its fraction of served tokens and of unguaranteed memory, relative to the weights
            of the other active tenants.
        guaranteed_bytes: KV bytes that it can always use; other tenants' requests are preempted if
            they hold them.
        burst_bytes: KV bytes that it may hold above its guarantee; None for no limit.
    """

    name: str
    weight: float = 1.0
    guaranteed_bytes: int = 0
    burst_bytes: int | None = None

    def __post_init__(self) -> None:
        check_tenant_name(self.name)
        if not (self.weight > 0 and math.isfinite(self.weight)):
            raise ConfigError(
                f"tenant {self.name!r}: expected a weight above 0, got {self.weight}: leave the "
                "tenant out to refuse its requests"
            )
        for option, held in (("guaranteed", self.guaranteed_bytes), ("burst", self.burst_bytes)):
            if held is not None and held < 0:
                raise ConfigError(f"tenant {self.name!r}: expected {option} >= 0, got {held:,} B")

    @property
    def limit_bytes(self) -> int | None:
        return None if self.burst_bytes is None else self.guaranteed_bytes + self.burst_bytes


def check_tenant_name(name: str, kind: str = "tenant") -> None:
    """Check the name of a tenant, or of another account."""
    if _NAME.fullmatch(name) is None:
        raise ConfigError(
            f"expected a {kind} name of 1 to 64 letters, digits, '_', '.' or '-' that begins "
            f"with a letter or digit, got {name[:80]!r}"
        )
    if name == PUBLIC:
        raise ConfigError(
            f"{kind} name {PUBLIC!r} is reserved for prefixes that all tenants share: choose "
            "another name"
        )


def parse_tenants(text: str) -> tuple[TenantSpec, ...]:
    """Parse a list of tenants; an empty text returns none, and then any tenant name is accepted."""
    specs = tuple(_parse_tenant(part) for part in text.split(";") if part.strip())
    check_distinct(spec.name for spec in specs)
    return specs


def check_distinct(names: Iterable[str]) -> None:
    """Check that no tenant name is repeated."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConfigError(f"tenant {name!r} is repeated: list all its options once")
        seen.add(name)


def _parse_tenant(text: str) -> TenantSpec:
    name, _, rest = text.strip().partition(":")
    options = _parse_options(name.strip(), rest) if rest else {}
    burst = options.get("burst")
    return TenantSpec(
        name=name.strip(),
        weight=_weight(name, options.get("weight", "1")),
        guaranteed_bytes=parse_size(options.get("guaranteed", "0")),
        burst_bytes=None if burst is None else parse_size(burst),
    )


def _parse_options(name: str, text: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in text.split(","):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if not key or not value:
            raise ConfigError(
                f"tenant {name!r}: expected option=value such as guaranteed=64MiB, got {part!r}"
            )
        if key not in OPTIONS:
            raise UnknownName(f"option of tenant {name!r}", key, OPTIONS)
        if key in options:
            raise ConfigError(f"tenant {name!r}: option {key!r} is repeated: keep one")
        options[key] = value
    return options


def _weight(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"tenant {name!r}: expected a weight such as 2, got {text!r}") from None
