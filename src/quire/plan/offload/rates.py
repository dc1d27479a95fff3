"""Seconds per token and layer on the link, on the device and on the CPU.

k = 2 * kv_heads * head_dim * p_kv / B     transfer of KV
x = hidden * p_x / B                       transfer of its activation
r = 4 * hidden * kv_heads * head_dim / v   keys and values from the activation
u = 2 * kv_heads * head_dim * p_kv / B_h   CPU attention to it
c                                          the device's other work on a layer, all rows

xi = x / k = hidden * p_x / (2 * kv_heads * head_dim * p_kv)
rho = r / k = 2 * hidden * B / (p_kv * v), independent of the heads
"""

import math
from dataclasses import dataclass, fields

from quire.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadRates:
    """Rates of one layer; tokens are those of all rows together.

    Attributes:
        kv_s: k, transfer of a token's KV.
        x_s: x, transfer of its activation.
        recompute_s: r, recompute of its KV from the activation.
        host_s: u, CPU attention to it; infinite without CPU attention.
        other_s: c, the device's other work on the layer in one step.
        link_s: other transfers for the layer in one step: weights, and stores if both directions
            share the link.

    Raises:
        ConfigError: a rate below 0, or a `kv_s` or `host_s` of 0.
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
            raise ConfigError(f"expected kv_s and host_s above 0, got {self}")

    @property
    def x_ratio(self) -> float:
        """Xi: transfer time of an activation over that of its KV. Activations pay below 1."""
        return self.x_s / self.kv_s

    @property
    def recompute_ratio(self) -> float:
        """Rho: recompute time of KV over its transfer time."""
        return self.recompute_s / self.kv_s
