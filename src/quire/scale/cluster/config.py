"""Options of a simulated cluster."""

import math
from dataclasses import dataclass
from typing import no_type_check

from quire.errors import ConfigError
from quire.layout.options import check_options, option

MAX_REPLICAS = 4096


@no_type_check  # run-time type checks in tests must not replace Quire's own errors
@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Options of a simulated cluster."""

    replicas: int = option(1, help="simulated engines behind the router", common=True)
    kv_events: bool = option(
        True,
        help="the router follows the KV events of the replicas; otherwise it remembers the blocks "
        "that it sent",
        flag="router-kv-events",
    )
    report_interval_s: float = option(
        0.0,
        help="time in seconds between load reports of a replica; 0: the router always knows the "
        "current load",
        unit="seconds",
        flag="router-report-interval",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if not 1 <= self.replicas <= MAX_REPLICAS:
            raise ConfigError(f"expected 1 to {MAX_REPLICAS} replicas, got {self.replicas}")
        if not 0 <= self.report_interval_s < math.inf:
            raise ConfigError(
                f"expected --router-report-interval from 0, got {self.report_interval_s}"
            )
