"""Puts a model on its device with some layers' weights outside of it."""

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from quire.errors import ConfigError
from quire.layout.model import ModelSpec
from quire.layout.sizes import format_size
from quire.models.linear_weights import widen_linears
from quire.models.weights import weight_bytes
from quire.offload.weights.layers import LayerWeights, layer_weights
from quire.offload.weights.links import make_link
from quire.offload.weights.stream import WeightStream
from quire.plan.offload.resident import SLOTS, WeightsPlacement, place_weights


def check_budget(
    config: PreTrainedConfig,
    budget_bytes: int,
    *,
    dtype: torch.dtype | None,
    trust_remote_code: bool = False,
) -> None:
    """Refuse a budget that is too small before a weight is read, from the model's shapes alone.

    Args:
        config: of the model.
        budget_bytes: for weights on the device.
        dtype: of the weights; None: as config says.
        trust_remote_code: run the code the folder brings.

    Raises:
        ConfigError: too small; names the least budget.
        UnsupportedModel: the layers' weights cannot be brought one by one.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config,
            dtype=dtype or config.dtype or torch.float32,
            trust_remote_code=trust_remote_code,
        )
    _place(model, layer_weights(model, _num_layers(model)), budget_bytes)


def stream_weights(
    model: PreTrainedModel, budget_bytes: int, device: torch.device
) -> tuple[WeightsPlacement, WeightStream | None]:
    """Put a model on its device, with as many layers as the budget holds.

    Args:
        model: on the CPU, in its final dtype; nobody has looked for its weights yet.
        budget_bytes: for weights on the device, slots included.
        device: where the model runs.

    Returns:
        Where weights lie, and what brings those that are not on the device; None where all are.

    Raises:
        ConfigError: too small a budget, or no room on the device or outside of it; nothing has
            been moved then.
        UnsupportedModel: the layers' weights cannot be brought one by one.
    """
    if device.type == "cpu":
        widen_linears(model)  # what is brought is what is multiplied
    layers = layer_weights(model, _num_layers(model))
    place = _place(model, layers, budget_bytes)
    _check_room(place, device)
    if not place.brought:
        nn.Module.to(model, device)
        return place, None
    with torch.inference_mode(False):
        link = make_link(device, place.host_bytes)
        for number in place.brought:
            link.take_home(number, layers[number])
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
            f"weights of {format_size(place.device_bytes)} are more than the "
            f"{format_size(free_bytes)} that are free on {device}; lower --weights-memory"
        )
