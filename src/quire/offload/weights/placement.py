"""Places a model on its device with the weights of some layers offloaded."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from quire.errors import ConfigError
from quire.layout.model import ModelSpec
from quire.layout.sizes import format_size, parse_size_or
from quire.models.layer_source import LayerPlacer, LayerSource
from quire.models.linear_weights import widen_linears
from quire.models.weights import weight_bytes
from quire.offload.weights.layers import LayerWeights, layer_weights
from quire.offload.weights.links import make_link
from quire.offload.weights.stream import WeightStream
from quire.plan.offload.resident import SLOTS, WeightsPlacement, place_weights

ALL_WEIGHTS = "all"


def place_beyond(memory: int | str | None) -> LayerPlacer | None:
    """Create the placement of layers for an amount of device memory.

    Args:
        memory: device memory for weights in bytes, or a size such as "4GiB"; "all" or None
            keeps all weights on the device.

    Returns:
        Placement for `load_model`; None if all weights stay on the device.

    Raises:
        ConfigError: `memory` is not a size.
    """
    try:
        budget_bytes = parse_size_or(ALL_WEIGHTS)(memory)
    except ConfigError as error:
        raise ConfigError(
            f"weights memory of {memory!r}: expected bytes, a size such as 4GiB, or {ALL_WEIGHTS}"
        ) from error
    return None if budget_bytes is None else WithinBudget(budget_bytes)


@dataclass(frozen=True, slots=True)
class WithinBudget(LayerPlacer):
    """Places a model on its device with as many layers as a budget holds.

    Attributes:
        budget_bytes: maximum bytes of weights on the device, slots included.
    """

    budget_bytes: int

    def check(
        self, config: PreTrainedConfig, *, dtype: torch.dtype | None, trust_remote_code: bool
    ) -> None:
        """See `LayerPlacer`."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config,
                dtype=dtype or config.dtype or torch.float32,
                trust_remote_code=trust_remote_code,
            )
        _place(model, layer_weights(model, _num_layers(model)), self.budget_bytes)

    def place(
        self, model: PreTrainedModel, device: torch.device
    ) -> tuple[WeightsPlacement, LayerSource | None]:
        """See `LayerPlacer`."""
        if device.type == "cpu":
            widen_linears(model)  # first: the offloaded bytes are those that are multiplied
        layers = layer_weights(model, _num_layers(model))
        place = _place(model, layers, self.budget_bytes)
        _check_room(place, device)
        if not place.offloaded_layers:
            nn.Module.to(model, device)
            return place, None
        with torch.inference_mode(False):
            link = make_link(device, place.host_bytes)
            for number in place.offloaded_layers:
                link.store(number, layers[number])
                for held in layers[number].held:  # free at once: the model may fill the memory
                    held.parameter.data = torch.empty(0, dtype=held.dtype)
            nn.Module.to(model, device)
            link.open(SLOTS, place.slot_bytes)
            return place, WeightStream(layers, place, link)


def _num_layers(model: PreTrainedModel) -> int:
    return ModelSpec.from_config(model.config.to_dict()).num_layers


def _place(
    model: PreTrainedModel, layers: tuple[LayerWeights, ...], budget_bytes: int
) -> WeightsPlacement:
    own_bytes = sum(held.num_bytes for layer in layers for held in layer.held)
    other_bytes = weight_bytes(model) - own_bytes
    return place_weights([layer.num_bytes for layer in layers], other_bytes, budget_bytes)


def _check_room(place: WeightsPlacement, device: torch.device) -> None:
    if device.type != "cuda":
        return
    free_bytes = torch.cuda.mem_get_info(device)[0]
    if place.device_bytes > free_bytes:
        raise ConfigError(
            f"weights on the device need {format_size(place.device_bytes)}, and "
            f"{format_size(free_bytes)} are free on {device}; lower --weights-memory"
        )
