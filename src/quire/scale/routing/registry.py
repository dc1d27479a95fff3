"""Routers by name, and their options."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Literal, no_type_check

from quire.errors import ConfigError
from quire.layout.options import check_options, option
from quire.scale.routing.base import Router
from quire.scale.routing.policies import KvAware, LeastLoaded, RoundRobin

RouterName = Literal["kv_aware", "least_loaded", "round_robin"]


@no_type_check  # run-time type checks in tests must not replace Quire's own errors
@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Options of request routing."""

    name: RouterName = option(
        "kv_aware",
        help="how a replica is chosen: kv_aware: least expected work, which counts uncached prompt "
        "tokens, the queue and active KV; least_loaded: fewest requests; round_robin: in turn",
        flag="router",
    )
    prefix_weight: float = option(
        4.0,
        help="cost of an uncached prompt token for kv_aware, relative to a queued one",
        flag="router-prefix-weight",
    )
    kv_weight: float = option(
        4096.0,
        help="cost of a full KV memory for kv_aware",
        unit="prompt tokens",
        flag="router-kv-weight",
    )
    max_imbalance_tokens: int = option(
        512,
        help="additional cost up to which kv_aware keeps a session on its replica",
        unit="prompt tokens",
        flag="router-max-imbalance",
    )
    max_blocks: int = option(
        65536,
        help="blocks of each replica's prefix cache that kv_aware remembers",
        flag="router-max-blocks",
    )
    max_sessions: int = option(
        65536, help="sessions that kv_aware remembers", flag="router-max-sessions"
    )

    def __post_init__(self) -> None:
        check_options(self)
        for field in fields(self):
            value = getattr(self, field.name)
            least = 1 if field.name in ("max_blocks", "max_sessions") else 0
            if field.name != "name" and not least <= value < math.inf:
                raise ConfigError(
                    f"expected --{field.metadata['option'].flag} from {least}, got {value}"
                )


def make_router(config: RouterConfig, *, block_tokens: int) -> Router:
    """Create a router."""
    if block_tokens < 1:
        raise ConfigError(f"expected block_tokens of 1 or more, got {block_tokens}")
    return _MAKERS[config.name](config, block_tokens)


def _kv_aware(config: RouterConfig, block_tokens: int) -> Router:
    return KvAware(
        block_tokens=block_tokens,
        prefix_weight=config.prefix_weight,
        kv_weight=config.kv_weight,
        max_imbalance_tokens=config.max_imbalance_tokens,
        max_blocks=config.max_blocks,
        max_sessions=config.max_sessions,
    )


_MAKERS: Mapping[RouterName, Callable[[RouterConfig, int], Router]] = {
    "kv_aware": _kv_aware,
    "least_loaded": lambda config, block_tokens: LeastLoaded(),
    "round_robin": lambda config, block_tokens: RoundRobin(),
}
ROUTERS = tuple(_MAKERS)
