"""Options of replicas on Ray and of simulated clusters."""

import math
import re
from dataclasses import dataclass
from typing import no_type_check

from quire.errors import ConfigError
from quire.layout.options import Size, check_options, option
from quire.layout.sizes import parse_size

_RANGE = re.compile(r"(\d{1,9})(?::(\d{1,9}))?")
_MIN_STORE_BYTES = 80 * 2**20
MAX_REPLICAS = 4096  # of a simulated cluster


@no_type_check  # run-time type checks in tests must not precede ConfigError
@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """Options of replicas on Ray."""

    enabled: bool = option(False, flag="ray", help="run the engine as replicas on Ray (extra ray)")
    replicas: str = option(
        "1",
        flag="ray-replicas",
        help="number of engines, such as 2, or MIN:MAX, such as 1:8, between which it follows the "
        "load",
    )
    address: str | None = option(
        None,
        flag="ray-address",
        help="address of a Ray cluster, such as auto or 10.0.0.1:6379; unset: start Ray on this "
        "machine and stop it at the end",
    )
    cpus: float = option(
        1.0, flag="ray-cpus", help="CPU cores that Ray reserves for each engine; may be 0.5"
    )
    gpus: float = option(0.0, flag="ray-gpus", help="GPUs that Ray reserves for each engine")
    object_store_memory: Size = option(
        "200MiB",
        flag="ray-object-store-memory",
        help="shared memory of a Ray that this command starts, for data between its processes",
        unit="bytes",
        parse=parse_size,
    )
    retries: int = option(
        3,
        flag="ray-retries",
        help="times that a request whose replica was lost before its first output is sent to "
        "another replica",
    )
    max_ongoing: int = option(
        512,
        flag="ray-max-ongoing",
        help="requests that a replica accepts, running and waiting; further ones wait for the next "
        "free replica",
    )
    target_kv: float = option(
        0.8,
        flag="ray-target-kv",
        help="fraction of KV memory in use (0 to 1) that autoscaling keeps on average",
    )
    target_ongoing: int = option(
        64,
        flag="ray-target-ongoing",
        help="running and waiting requests of each replica that autoscaling keeps on average",
    )
    upscale_delay_s: float = option(
        10.0,
        flag="ray-upscale-delay",
        help="time in seconds that the load must be above the target before a replica is added",
        unit="s",
    )
    downscale_delay_s: float = option(
        300.0,
        flag="ray-downscale-delay",
        help="time in seconds that the load must be below the target before a replica is removed",
        unit="s",
    )
    stats_period_s: float = option(
        1.0,
        flag="ray-stats-period",
        help="interval in seconds at which replicas report their load to the router",
        unit="s",
    )

    def __post_init__(self) -> None:
        check_options(self)
        least, most = self._range()
        if not 1 <= least <= most:
            raise ConfigError(
                f"expected ray-replicas as N or MIN:MAX with 1 <= MIN <= MAX, got {self.replicas!r}"
            )
        if self.object_store_memory < _MIN_STORE_BYTES:
            raise ConfigError(
                f"expected ray-object-store-memory of at least 80MiB, got "
                f"{self.object_store_memory} bytes"
            )
        if self.retries < 0:
            raise ConfigError(f"expected ray-retries >= 0, got {self.retries}")
        for name in ("max_ongoing", "target_ongoing"):
            if getattr(self, name) < 1:
                flag = f"ray-{name.replace('_', '-')}"
                raise ConfigError(f"expected {flag} >= 1, got {getattr(self, name)}")
        for name in ("cpus", "gpus", "upscale_delay_s", "downscale_delay_s"):
            if not 0 <= getattr(self, name) < math.inf:
                flag = f"ray-{name.removesuffix('_s').replace('_', '-')}"
                raise ConfigError(f"expected {flag} >= 0, got {getattr(self, name)}")
        if not 0 < self.stats_period_s < math.inf:
            raise ConfigError(f"expected ray-stats-period > 0 s, got {self.stats_period_s}")
        if not 0 < self.target_kv <= 1:
            raise ConfigError(f"expected ray-target-kv > 0 and <= 1, got {self.target_kv}")

    def _range(self) -> tuple[int, int]:
        found = _RANGE.fullmatch(self.replicas)
        if found is None:
            return 0, 0
        return int(found[1]), int(found[2] or found[1])

    @property
    def min_replicas(self) -> int:
        return self._range()[0]

    @property
    def max_replicas(self) -> int:
        return self._range()[1]


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
