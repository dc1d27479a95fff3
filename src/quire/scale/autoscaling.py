"""Number of replicas for a load: requests and KV memory. Used by Ray Serve's controller.

    by requests   running and waiting requests / target_ongoing
    by KV         KV of running requests, in arenas of one replica / target_kv

The larger number counts. Ray adds the limits of `--ray-replicas` and the delays.
"""

import math
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

KV_USED = "kv_used"
"""Name of a replica's statistic: fraction of its KV memory in use by running requests."""


@runtime_checkable
class ScalingContext(Protocol):
    """The part of Ray's `AutoscalingContext` that the policy reads."""

    @property
    def total_num_requests(self) -> int | float:
        """Requests that replicas have and requests that wait for one, averaged over time."""

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None:
        """Statistics of the replicas by name, averaged over time."""


class LoadScaling:
    """Autoscaling policy.

    Args:
        target_kv: fraction of KV memory in use that each replica should have.
        target_ongoing: requests that each replica should have.
    """

    def __init__(self, target_kv: float, target_ongoing: int | float) -> None:
        self._target_kv, self._target_ongoing = target_kv, target_ongoing

    def __call__(self, context: ScalingContext) -> tuple[int, dict[str, Any]]:
        metrics = context.aggregated_metrics or {}
        used_arenas = sum(metrics.get(KV_USED, {}).values())
        by_requests = context.total_num_requests / self._target_ongoing
        return math.ceil(max(by_requests, used_arenas / self._target_kv)), {}
