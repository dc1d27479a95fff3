"""CPU formats of linear layer weights: widened to float32, or packed for the matrix product.

Without instructions for bfloat16 (AVX-512 BF16, AMX), oneDNN's bfloat16 products run at a tenth of
the float32 rate. A widened layer multiplies in float32 and rounds once, as those instructions do.
Activations, keys and values keep their type and size; weights take four bytes each instead of two.
"""

import logging
import platform
from collections.abc import Iterable
from typing import TypeGuard

import psutil
import torch
from jaxtyping import Float
from torch import Tensor, nn

# Linear layers in half precision on CPUs that cannot multiply it: float32 copies of their weights.

_log = logging.getLogger(__name__)
_PART_OF_FREE = 0.5  # maximum fraction of the available memory for float32 copies of weights


class WidenedLinear(nn.Module):
    """A linear layer whose weight is stored and multiplied in float32."""

    def __init__(self, linear: nn.Linear, weight: nn.Parameter) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = weight
        bias = linear._parameters["bias"]
        self.bias = None if bias is None else nn.Parameter(bias.detach().float(), False)

    def forward(self, rows: Float[Tensor, "... inner"]) -> Float[Tensor, "... outer"]:
        wide = nn.functional.linear(rows.float(), self.weight, self.bias)
        return wide.to(rows.dtype)


def multiplies(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions for products of a type."""
    name = {
        torch.bfloat16: "_is_mkldnn_bf16_supported",
        torch.float16: "_is_mkldnn_fp16_supported",
    }.get(dtype)
    if name is None or platform.machine() not in ("x86_64", "AMD64"):
        return True  # other machines use other libraries; no slow type is known
    if not hasattr(torch.ops.mkldnn, name):
        return True
    return bool(getattr(torch.ops.mkldnn, name)())


def widen_linears(model: nn.Module) -> None:
    """Replace linear layers that this CPU multiplies slowly; log a warning if memory is short.

    Layers are replaced one at a time. Layers derived from `nn.Linear` and layers with hooks are
    not replaced. No layer is replaced if the float32 weights would take more than half of the
    available memory.
    """
    slow = [module for module in model.modules() if _is_slow(module)]
    weights = {id(linear.weight): linear.weight for linear in slow}
    more_bytes = sum(4 * weight.numel() for weight in weights.values())
    if more_bytes > _PART_OF_FREE * psutil.virtual_memory().available:
        _log.warning(
            "this CPU has no instructions for half precision, and the %s MiB of float32 weights "
            "exceed half of the free memory: products will take about ten times as long",
            more_bytes >> 20,
        )
        return
    del slow, weights
    wide: dict[int, nn.Parameter] = {}
    replaced: dict[int, WidenedLinear] = {}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # named_children() skips second names
            if child is None or not _is_slow(child):
                continue
            key = id(child.weight)
            if key not in wide:
                wide[key] = nn.Parameter(child.weight.detach().float(), requires_grad=False)
            if id(child) not in replaced:
                replaced[id(child)] = WidenedLinear(child, wide[key])
            setattr(parent, name, replaced[id(child)])


def _is_slow(module: nn.Module) -> TypeGuard[nn.Linear]:
    return (
        type(module) is nn.Linear
        and module.weight.device.type == "cpu"
        and not multiplies(module.weight.dtype)
        and not (module._forward_hooks or module._forward_pre_hooks)
    )


# Weights of linear layers in the order in which the CPU's matrix product reads them.
#
# oneDNN reorders a plain weight in every product. With a reordered weight, a product of 1 to 32
# rows takes two thirds to nine tenths of the time, and larger ones the same or less. The result is
# bit-identical.
# Torch's inductor does the same with these operators when it freezes a model.

_DTYPE = torch.bfloat16  # no gain for float32: its products are compute-bound


class ReorderedLinear(nn.Module):
    """A linear layer that stores its weight in reordered form only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._multiply = (
            torch.ops.mkldnn._linear_pointwise.default
        )  # looked up once, since it is called often
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    @property
    def weight(self) -> Tensor:
        return self._packed.to_dense()

    @property
    def reordered_bytes(self) -> int:
        return self.in_features * self.out_features * _DTYPE.itemsize

    def forward(self, rows: Float[Tensor, "... inner"]) -> Float[Tensor, "... outer"]:
        out: Tensor = self._multiply(rows, self._packed, self.bias, "none", [], "")
        return out


def can_reorder() -> bool:
    """Whether this torch and this CPU multiply reordered bfloat16 weights."""
    operators = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not all(hasattr(torch.ops.mkldnn, name) for name in operators):
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def reorder_linears(model: nn.Module, left_alone: Iterable[nn.Module] = ()) -> None:
    """Replace the linear layers of a model on a CPU by layers with reordered weights.

    Layers are replaced one at a time, so the extra memory is that of the largest weight.

    Not replaced: weights shared with another module (a head tied to the embedding would be stored
    twice), layers derived from `nn.Linear`, and layers with hooks.
    """
    if not can_reorder():
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
            if _is_reorderable(child) and owners[id(child.weight)] == 1:
                places.setdefault(id(child), []).append((parent, name))
    # hold no reference to a plain layer: each must be freed before the next is reordered
    for found in places.values():
        reordered = ReorderedLinear(getattr(*found[0]))
        for parent, name in found:
            setattr(parent, name, reordered)


def _is_reorderable(module: nn.Module) -> TypeGuard[nn.Linear]:
    return (
        type(module) is nn.Linear
        and module.weight.dtype == _DTYPE
        and module.weight.device.type == "cpu"
        and not (module._forward_hooks or module._forward_pre_hooks)
    )
