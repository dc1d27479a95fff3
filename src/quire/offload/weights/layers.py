"""The decoder layers of a Transformers model, and which weights are a layer's own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.errors import UnsupportedModel

ALIGNMENT_BYTES = 256  # of every tensor in a slot, as a device's own allocator does at least


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A parameter and its place in its layer's bytes.

    Attributes:
        parameter: of the model; where it lies changes, what it is does not.
        start: its first byte.
        dtype, shape: what it was when it was found.
    """

    parameter: nn.Parameter
    start: int
    dtype: torch.dtype
    shape: torch.Size

    @property
    def num_bytes(self) -> int:
        """Of its numbers."""
        return self.shape.numel() * self.dtype.itemsize

    def within(self, whole: Tensor) -> Tensor:
        """Its numbers in the bytes of a layer, uint8 [num_bytes], as a view."""
        part = whole[self.start : self.start + self.num_bytes]
        return part.view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """A decoder layer and what is its own.

    Attributes:
        module: of the model.
        held: its parameters, one behind the other.
        num_bytes: of all of them, each rounded up.
    """

    module: nn.Module
    held: tuple[Held, ...]
    num_bytes: int


def layer_weights(model: nn.Module, num_layers: int) -> tuple[LayerWeights, ...]:
    """Find the layers.

    Not a layer's own: buffers, parameters that something else has too (a head tied to embeddings,
    layers that share), and those that do not lie in one piece. They stay on the device.

    Raises:
        UnsupportedModel: the layers are not in one list, each with its number.
    """
    modules = decoder_layers(model, num_layers)
    shared = _shared(model, modules)
    return tuple(_own(module, shared) for module in modules)


def decoder_layers(model: nn.Module, num_layers: int) -> Sequence[nn.Module]:
    """The list of decoder layers, in the order in which they run.

    Raises:
        UnsupportedModel: there is none.
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
        "their weights cannot be brought one by one; leave out --weights-memory"
    )


def _numbers(module: nn.Module) -> set[int]:
    """What numbers of layers the modules inside of one carry."""
    found = (getattr(part, "layer_idx", None) for part in module.modules())
    return {int(number) for number in found if number is not None}


def _shared(model: nn.Module, modules: Sequence[nn.Module]) -> set[int]:
    """Ids of parameters that are not one layer's alone."""
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
