"""Seconds that a token of one layer takes on the link, on the device and on the host.

k = 2 * kv_heads * head_dim * p_kv / B     KV over the link
x = hidden * p_x / B                       its activation over the link
r = 4 * hidden * kv_heads * head_dim / v   keys and values from the activation
u = 2 * kv_heads * head_dim * p_kv / B_h   attention where the KV lies
c                                          the device's other work on a layer, all rows

xi = x / k = hidden * p_x / (2 * kv_heads * head_dim * p_kv)
rho = r / k = 2 * hidden * B / (p_kv * v), whatever the heads are
"""

import math
from dataclasses import dataclass, fields

from quire.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadRates:
    """Rates of one layer; tokens are those of all rows together.

    Attributes:
        kv_s: k, of a token's KV on the link.
        x_s: x, of its activation.
        recompute_s: r, of making the KV from the activation.
        host_s: u, of attending to it on the host; infinite where the host does not attend.
        other_s: c, of the device's other work on the layer in one step.
        link_s: of what else crosses the link for the layer in one step: weights, and stores
            where both directions share the wire.

    Raises:
        ConfigError: a rate below 0, or KV that takes no time.
    """

    kv_s: int | float
    x_s: int | float
    recompute_s: int | float
    host_s: int | float = math.inf
    other_s: int | float = 0.0
    link_s: int | float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value >= 0 or (value == math.inf and field.name != "host_s"):
                raise ConfigError(f"expected {field.name} of 0 seconds or more, got {value}")
        if not self.kv_s or not self.host_s:
            raise ConfigError(f"expected KV that takes time, got {self}")

    @property
    def x_ratio(self) -> float:
        """Xi: what an activation takes on the link, over its KV. It pays below 1."""
        return self.x_s / self.kv_s

    @property
    def recompute_ratio(self) -> float:
        """Rho: what recomputing takes, over carrying the KV."""
        return self.recompute_s / self.kv_s
