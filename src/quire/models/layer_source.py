"""The interface of weight offload: how models and engines see layers that are not on the device.

    load_model --- check, place ---> LayerPlacer ---> LayerSource ---> TransformersDecoder, engine

`quire.offload.weights` implements both; a model whose layers are all on the device uses neither.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from quire.errors import UnsupportedModel
from quire.models.own_attention import number_layers
from quire.plan.weights import WeightsPlacement


@runtime_checkable
class LayerSource(Protocol):
    """Prefetches weights of layers that are not on the device, by hooks on the layers."""

    @property
    def place(self) -> WeightsPlacement:
        """Placement of the weights."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The decoder layers."""

    @property
    def device_s(self) -> float:
        """Device compute time of all passes so far in seconds, waiting excluded."""

    @property
    def copied_s(self) -> float:
        """Time of all copies so far in seconds."""

    @property
    def num_bytes(self) -> int:
        """Bytes transferred so far."""

    @property
    def stalled_s(self) -> float:
        """Time that computation has waited for weights so far in seconds."""

    def arrive(self, layer: int) -> None:
        """Wait until the next computation can use a layer's weights, in any order of layers."""

    def arrive_kv(self, layer: int) -> None:
        """Wait until the next computation can use a layer's W_K and W_V, which arrive first."""

    def shared_by(self, batches: int) -> AbstractContextManager[None]:
        """Run this many forwards layer by layer; a layer is freed after the last of them."""


@runtime_checkable
class LayerPlacer(Protocol):
    """Places a model on its device and offloads the weights of some layers."""

    def check(
        self, config: PreTrainedConfig, *, dtype: torch.dtype | None, trust_remote_code: bool
    ) -> None:
        """Refuse a model that cannot be placed, from its shapes, before any weight is read."""

    def place(
        self, model: PreTrainedModel, device: torch.device
    ) -> tuple[WeightsPlacement, LayerSource | None]:
        """Place a model on its device.

        Args:
            model: on the CPU, in its final dtype; no other object references its weights yet.
            device: device on which the model runs.

        Returns:
            The placement of the weights, and the source that prefetches offloaded layers; None if
            all layers are on the device.
        """


def decoder_layers(model: nn.Module, num_layers: int) -> Sequence[nn.Module]:
    """The list of decoder layers in execution order.

    Raises:
        UnsupportedModel: there is no such list.
    """
    number_layers(model)
    for module in model.modules():
        if (
            isinstance(module, nn.ModuleList)
            and len(module) == num_layers
            and all(_numbers(child) == {number} for number, child in enumerate(module))
        ):
            return tuple(module)
    raise UnsupportedModel(
        f"{type(model).__name__} does not keep its {num_layers} decoder layers in one list, so "
        "they cannot be run one by one; leave out --weights-memory"
    )


def _numbers(module: nn.Module) -> set[int]:
    """Layer indices of the modules inside a module."""
    found = (getattr(part, "layer_idx", None) for part in module.modules())
    return {int(number) for number in found if number is not None}
