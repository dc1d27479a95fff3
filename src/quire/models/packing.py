"""Weights of linear layers in the order in which the CPU's matrix product reads them.

oneDNN reorders a plain weight in every product; kept reordered, a product of 1 to 32 rows takes two
thirds to nine tenths of the time, larger ones the same or less, and gives the same bits. Torch's
inductor does the same with these operators when it freezes a model.
"""

from collections.abc import Iterable
from typing import TypeGuard

import torch
from jaxtyping import Float
from torch import Tensor, nn

_DTYPE = torch.bfloat16  # float32 gains nothing: its products are bound by arithmetic


class PackedLinear(nn.Module):
    """A linear layer whose weight is held reordered, and only so.

    Args:
        linear: in bfloat16 on a CPU.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._multiply = (
            torch.ops.mkldnn._linear_pointwise.default
        )  # found once: it is called often
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    @property
    def weight(self) -> Tensor:
        """A copy in the plain order, for code that looks at it."""
        return self._packed.to_dense()

    @property
    def packed_bytes(self) -> int:
        """Bytes of the weight."""
        return self.in_features * self.out_features * _DTYPE.itemsize

    def forward(self, rows: Float[Tensor, "... inner"]) -> Float[Tensor, "... outer"]:
        """Multiply, as `nn.Linear` does."""
        out: Tensor = self._multiply(rows, self._packed, self.bias, "none", [], "")
        return out


def can_pack() -> bool:
    """Whether this torch and this CPU multiply packed bfloat16 weights."""
    operators = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not all(hasattr(torch.ops.mkldnn, name) for name in operators):
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_linears(model: nn.Module, left_alone: Iterable[nn.Module] = ()) -> None:
    """Replace the linear layers of a model on a CPU by packed ones, where nothing else changes.

    One layer at a time: besides the model, memory is taken for the largest weight only.

    Left alone: weights that another module shares (a head tied to the embedding: it would be there
    twice), layers derived from `nn.Linear`, and layers with hooks.

    Args:
        model: on its final device.
        left_alone: modules in which nothing is packed.
    """
    if not can_pack():
        return
    alone = {id(part) for module in left_alone for part in module.modules()}
    owners: dict[int, int] = {}
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            owners[id(weight)] = owners.get(id(weight), 0) + 1
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            if id(child) in alone:
                continue
            if _is_packable(child) and owners[id(child.weight)] == 1:
                places.setdefault(id(child), []).append((parent, name))
    # nothing here may hold a plain layer: each must go before the next is packed
    for found in places.values():
        packed = PackedLinear(getattr(*found[0]))
        for parent, name in found:
            setattr(parent, name, packed)


def _is_packable(module: nn.Module) -> TypeGuard[nn.Linear]:
    return (
        type(module) is nn.Linear
        and module.weight.dtype == _DTYPE
        and module.weight.device.type == "cpu"
        and not (module._forward_hooks or module._forward_pre_hooks)
    )
