"""The decoder layers of a Transformers model and the parameters that belong to one layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.errors import UnsupportedModel

ALIGNMENT_BYTES = 256  # of each tensor in a slot: the least alignment of device allocators


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A parameter and its location in the bytes of its layer.

    Attributes:
        parameter: parameter of the model; its storage changes, the object does not.
        start: its first byte.
        dtype, shape: dtype and shape of the parameter when it was registered.
    """

    parameter: nn.Parameter
    start: int
    dtype: torch.dtype
    shape: torch.Size

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return self.shape.numel() * self.dtype.itemsize

    def within(self, whole: Tensor) -> Tensor:
        """View of its elements in the bytes of a layer, uint8 [num_bytes]."""
        part = whole[self.start : self.start + self.num_bytes]
        return part.view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """A decoder layer and its own parameters.

    Attributes:
        module: module of the model.
        held: its parameters, in storage order.
        num_bytes: bytes of all parameters, each rounded up to the alignment.
    """

    module: nn.Module
    held: tuple[Held, ...]
    num_bytes: int


def layer_weights(model: nn.Module, num_layers: int) -> tuple[LayerWeights, ...]:
    """Find the decoder layers and their own parameters.

    Buffers, parameters shared with other modules (a head tied to embeddings, shared layers) and
    non-contiguous parameters are not a layer's own: they stay on the device.

    Raises:
        UnsupportedModel: the layers are not in one list, each with its index.
    """
    modules = decoder_layers(model, num_layers)
    shared = _shared(model, modules)
    return tuple(_own(module, shared) for module in modules)


def decoder_layers(model: nn.Module, num_layers: int) -> Sequence[nn.Module]:
    """The list of decoder layers in execution order.

    Raises:
        UnsupportedModel: there is no such list.
    """
    for module in model.modules():
        if (
            isinstance(module, nn.ModuleList)
            and len(module) == num_layers
            and all(_numbers(child) == {number} for number, child in enumerate(module))
        ):
            return tuple(module)
    raise UnsupportedModel(
        f"{type(model).__name__} does not keep its {num_layers} decoder layers in one list, so "
        "their weights cannot be offloaded; leave out --weights-memory"
    )


def _numbers(module: nn.Module) -> set[int]:
    """Layer indices of the modules inside a module."""
    found = (getattr(part, "layer_idx", None) for part in module.modules())
    return {int(number) for number in found if number is not None}


def _shared(model: nn.Module, modules: Sequence[nn.Module]) -> set[int]:
    """Ids of parameters that more than one layer, or another module, uses."""
    owner: Mapping[int, int] = {
        id(part): number for number, layer in enumerate(modules) for part in layer.modules()
    }
    owners: dict[int, set[int]] = {}
    for part in model.modules():
        for parameter in part._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), set()).add(owner.get(id(part), -1))
    return {number for number, found in owners.items() if len(found) > 1}


def _own(module: nn.Module, shared: set[int]) -> LayerWeights:
    held: list[Held] = []
    start = 0
    for parameter in module.parameters():
        if id(parameter) in shared or not parameter.is_contiguous() or not parameter.numel():
            continue
        found = Held(parameter, start, parameter.dtype, parameter.shape)
        held.append(found)
        start += -(-found.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return LayerWeights(module, tuple(held), start)
