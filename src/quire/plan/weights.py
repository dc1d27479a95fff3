"""Placement of layers' weights: resident within a budget, or offloaded and prefetched each pass.

    device    | embeddings, norm, head | resident layers | slot | slot |    device_bytes <= budget
    host      | offloaded layers, contiguous |                              host_bytes

While a layer computes, the next offloaded layer is transferred to the other slot. Resident layers
are spread evenly between offloaded ones, so that transfers overlap their computation too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quire.errors import ConfigError
from quire.layout.model import ModelSpec
from quire.layout.sizes import format_size

SLOTS = 2
"""One slot for the layer that computes, one for the layer in transfer."""

MAX_BATCHES = 8
"""Most batches of one step that share offloaded layers: the hidden states of all are held."""

MAX_CHUNKS = 256
"""Most chunks of prompts that are computed layer by layer; the hidden states of all are held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPlacement:
    """Placement of a model's weights."""

    other_bytes: int  # weights outside of layers: embeddings, norms, head, buffers
    layer_bytes: tuple[int, ...]
    offloaded_layers: tuple[int, ...] = ()  # prefetched in every pass

    @property
    def slot_bytes(self) -> int:
        """Size of one slot: the largest offloaded layer."""
        return max((self.layer_bytes[layer] for layer in self.offloaded_layers), default=0)

    @property
    def host_bytes(self) -> int:
        """Bytes outside of the device, transferred in every pass."""
        return sum(self.layer_bytes[layer] for layer in self.offloaded_layers)

    @property
    def mean_layer_bytes(self) -> int:
        return self.host_bytes // len(self.layer_bytes)

    @property
    def total_bytes(self) -> int:
        return self.other_bytes + sum(self.layer_bytes)

    @property
    def device_bytes(self) -> int:
        return self.total_bytes - self.host_bytes + SLOTS * self.slot_bytes

    @property
    def text(self) -> str:
        if not self.offloaded_layers:
            return f"weights: all {format_size(self.total_bytes)} on the device"
        return (
            f"weights: {format_size(self.device_bytes)} of {format_size(self.total_bytes)} on the "
            f"device, {len(self.offloaded_layers)} of {len(self.layer_bytes)} layers offloaded "
            f"through {SLOTS} slots of {format_size(self.slot_bytes)}"
        )


def place_weights(
    layer_bytes: Sequence[int], other_bytes: int, budget_bytes: int | None = None
) -> WeightsPlacement:
    """Keep as many layers on the device as fit in addition to the slots."""
    all_stay = WeightsPlacement(other_bytes=other_bytes, layer_bytes=tuple(layer_bytes))
    if budget_bytes is None or all_stay.total_bytes <= budget_bytes:
        return all_stay
    found = [all_stay]
    for count in range(SLOTS + 1, len(layer_bytes) + 1):
        place = WeightsPlacement(
            other_bytes=other_bytes,
            layer_bytes=all_stay.layer_bytes,
            offloaded_layers=tuple(len(layer_bytes) * i // count for i in range(count)),
        )
        if place.device_bytes <= budget_bytes:
            return place
        found.append(place)
    least = min(place.device_bytes for place in found)
    raise ConfigError(
        f"weights memory of {budget_bytes:,} B is too small: the model's weights outside of layers "
        f"({other_bytes:,} B) and {SLOTS} slots for its {len(layer_bytes)} layers need at least "
        f"{least:,} B ({format_size(least)}), all weights {all_stay.total_bytes:,} B; raise "
        "--weights-memory"
    )


def planned_weights(
    model: ModelSpec, bytes_per_value: int | float, budget_bytes: int | None
) -> WeightsPlacement:
    """Place weights by a model's dimensions, with layers of equal size."""
    total_bytes = model.weight_bytes(bytes_per_value)
    each_bytes = int(model.layer_parameters * bytes_per_value) // model.num_layers
    other_bytes = total_bytes - model.num_layers * each_bytes
    return place_weights([each_bytes] * model.num_layers, other_bytes, budget_bytes)


def best_batches(copy_s: float, batch_s: float, max_batches: int = MAX_BATCHES) -> int:
    """The fewest batches of a pass that hide the copy of its weights, at most `max_batches`.

    A pass of n batches takes max(copy_s, n * batch_s).
    """
    return max(1, min(math.ceil(copy_s / batch_s), max_batches))
