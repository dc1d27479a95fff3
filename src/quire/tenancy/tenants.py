"""Who the tenants are: a name, a weight, and the KV bytes each may count on.

Written `name:option=value,option=value`, several with semicolons between them:

    a:weight=2,guaranteed=64MiB,burst=32MiB; b:weight=1
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from quire.errors import ConfigError, UnknownName
from quire.layout.sizes import parse_size

PUBLIC = "public"
"""Nobody's account: prefixes that all tenants share are charged to it."""

OPTIONS = ("weight", "guaranteed", "burst")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSpec:
    """What one tenant may count on.

    Attributes:
        name: as requests say it.
        weight: its part of served tokens and of unguaranteed memory, against others' weights.
        guaranteed_bytes: KV bytes it gets back from whoever borrowed them, whenever it asks.
        burst_bytes: KV bytes it may borrow above its guarantee; None bounds nothing.
    """

    name: str
    weight: float = 1.0
    guaranteed_bytes: int = 0
    burst_bytes: int | None = None

    def __post_init__(self) -> None:
        check_tenant_name(self.name)
        if not (self.weight > 0 and math.isfinite(self.weight)):
            raise ConfigError(
                f"tenant {self.name!r}: expected a weight above 0, got {self.weight}; a tenant "
                "that should get nothing is left out"
            )
        for option, held in (("guaranteed", self.guaranteed_bytes), ("burst", self.burst_bytes)):
            if held is not None and held < 0:
                raise ConfigError(f"tenant {self.name!r}: expected {option} >= 0, got {held:,} B")

    @property
    def limit_bytes(self) -> int | None:
        """Most KV bytes it may ever hold; None where nothing bounds them."""
        return None if self.burst_bytes is None else self.guaranteed_bytes + self.burst_bytes


def check_tenant_name(name: str, kind: str = "tenant") -> None:
    """Refuse what cannot be the name of a tenant, or of somebody of another `kind`.

    Raises:
        ConfigError: an empty, long or odd name, or the one of the shared account.
    """
    if _NAME.fullmatch(name) is None:
        raise ConfigError(
            f"expected a {kind}'s name of 1 to 64 letters, digits, '_', '.' or '-' that begins "
            f"with a letter or digit, got {name[:80]!r}"
        )
    if name == PUBLIC:
        raise ConfigError(
            f"no {kind} can be called {PUBLIC!r}: prefixes that all tenants share are charged to "
            "that account; choose another name"
        )


def parse_tenants(text: str) -> tuple[TenantSpec, ...]:
    """Tenants of a text; none of an empty one, and then every name is taken as it comes.

    Raises:
        UnknownName: an option that does not exist; offers the nearest.
        ConfigError: a bad or repeated name, an option without a value or given twice, a value that
            is no number or size, a weight of 0.
    """
    specs = tuple(_parse_tenant(part) for part in text.split(";") if part.strip())
    check_distinct(spec.name for spec in specs)
    return specs


def check_distinct(names: Iterable[str]) -> None:
    """Refuse a list that names somebody twice.

    Raises:
        ConfigError: with the name.
    """
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConfigError(f"tenant {name!r} stands twice; give each its options once")
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
            raise ConfigError(f"tenant {name!r}: option {key!r} stands twice")
        options[key] = value
    return options


def _weight(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"tenant {name!r}: expected a weight such as 2, got {text!r}") from None
