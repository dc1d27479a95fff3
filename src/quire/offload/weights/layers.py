"""The decoder layers of a Transformers model and the parameters that belong to one layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.errors import UnsupportedModel

KV_PART, REST = range(2)
"""Parts of a layer, in the order of their transfers: W_K and W_V, from which keys and values are
computed, with the other parameters that attention reads before; then all others."""

_AFTER_KV = ("q_proj", "o_proj", "out_proj", "dense", "c_proj")  # of an attention module

ALIGNMENT_BYTES = 256  # of each tensor in a slot: the least alignment of device allocators


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A parameter and its location in the bytes of its layer.

    Attributes:
        parameter: parameter of the model; its storage changes, the object does not.
        start: its first byte.
        dtype, shape: dtype and shape of the parameter when it was registered.
        part: KV_PART or REST, the transfer that it is part of.
    """

    parameter: nn.Parameter
    start: int
    dtype: torch.dtype
    shape: torch.Size
    part: int

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
        kv_bytes: those of KV_PART, which comes first.
    """

    module: nn.Module
    held: tuple[Held, ...]
    num_bytes: int
    kv_bytes: int = 0

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """First byte and end of KV_PART and of REST."""
        return (0, self.kv_bytes), (self.kv_bytes, self.num_bytes)


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
    start = kv_bytes = 0
    first = _kv_parameters(module)
    for parameter in sorted(module.parameters(), key=lambda p: id(p) not in first):
        if id(parameter) in shared or not parameter.is_contiguous() or not parameter.numel():
            continue
        part = KV_PART if id(parameter) in first else REST
        found = Held(parameter, start, parameter.dtype, parameter.shape, part)
        held.append(found)
        start += -(-found.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        kv_bytes = start if part == KV_PART else kv_bytes
    return LayerWeights(module, tuple(held), start, kv_bytes)


def _kv_parameters(module: nn.Module) -> set[int]:
    """Ids of the parameters that compute keys and values from the input of attention."""
    return {
        id(parameter)
        for part in module.modules()
        if "Attention" in type(part).__name__ and hasattr(part, "layer_idx")
        for name, parameter in part.named_parameters()
        if name.split(".")[0] not in _AFTER_KV
    }
