"""Linear layers and embeddings of a Transformers model on the weights that the C library packs.

A packed weight has the bytes of the plain one (float16: those of float32). It is read once in a
product of up to six rows, at the speed of the memory; bfloat16 is widened in registers if the CPU
does not multiply it.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from quire.kernels.native.library import NotLoaded, load_library
from quire.kernels.native.linear import (
    PackedWeight,
    Product,
    Products,
    can_pack,
    has_products,
    pack,
    pack_bias,
)

KINDS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float32"}
_EXPERT_PRODUCTS = 2  # before and after the activation
_MEASURED_ROWS, _MEASURED_WIDTH, _ROUNDS = 256, 1024, 3


class PackedLinear(nn.Module):
    """A linear layer with a packed weight; `columns` are its outputs in a joint product."""

    def __init__(self, product: Product, products: Products, columns: Tensor | None = None) -> None:
        super().__init__()
        self.product, self._products, self._columns = product, products, columns
        self.in_features = product.weight.inner
        self.out_features = product.weight.outer if columns is None else len(columns)

    @property
    def packed(self) -> PackedWeight:
        return self.product.weight

    @property
    def weight(self) -> Tensor:
        """A decoded copy in the plain order, for code that reads the weight."""
        rows = torch.arange(self.packed.outer) if self._columns is None else self._columns
        return self.packed.rows(rows)

    def forward(self, rows: Float[Tensor, "... inner"]) -> Float[Tensor, "... outer"]:
        flat = rows.reshape(-1, self.in_features).contiguous()  # one row: reshape may not copy
        x = flat.to(self._products.activation_dtype(self.packed, flat.dtype))
        out = flat.new_empty(len(flat), self.packed.outer)
        self.product.run(x, out)
        if self._columns is not None:
            out = out[:, self._columns]
        return out.view(*rows.shape[:-1], self.out_features)


class PackedEmbedding(nn.Module):
    """An embedding that reads rows of the packed weight of a tied output head."""

    def __init__(self, packed: PackedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.packed, self._dtype = packed, dtype

    @property
    def weight(self) -> Tensor:
        return self.packed.unpacked().to(self._dtype)

    def forward(self, ids: Tensor) -> Tensor:
        return self.packed.rows(ids.flatten()).to(self._dtype).view(*ids.shape, -1)


def pack_linear(
    linear: nn.Linear | Conv1D, products: Products, codec: str | None = None
) -> PackedLinear:
    """Pack one layer."""
    kind = codec or KINDS[linear.weight.dtype]
    return _packed_linear(matrix(linear), products, kind, linear._parameters["bias"])


def _packed_linear(
    weight: Tensor, products: Products, kind: str, bias: Tensor | None
) -> PackedLinear:
    packed = pack(weight, kind)
    both = pack_bias([bias], [packed.outer])
    return PackedLinear(products.prepare(packed, bias=both), products)


def matrix(linear: nn.Linear | Conv1D) -> Float[Tensor, "outer inner"]:
    """The weight of a linear layer, [outer, inner]."""
    weight = linear.weight.detach()
    return weight.T if isinstance(linear, Conv1D) else weight


class PackedExperts(nn.Module):
    """The experts of a mixture, with one packed layer each for every product."""

    def __init__(self, experts: nn.Module, products: Products, codec: str) -> None:
        super().__init__()
        self._experts: Any = experts
        first = "gate_up_proj" if self._experts.has_gate else "up_proj"
        self.up = nn.ModuleList(_expert_layers(experts, first, products, codec))
        self.down = nn.ModuleList(_expert_layers(experts, "down_proj", products, codec))

    def forward(
        self,
        hidden_states: Float[Tensor, "token hidden"],
        top_k_index: Int[Tensor, "token k"],
        top_k_weights: Float[Tensor, "token k"],
    ) -> Float[Tensor, "token hidden"]:
        experts, order = torch.sort(top_k_index.reshape(-1), stable=True)
        rows = hidden_states[order // top_k_index.shape[1]]
        numbers, counts = torch.unique_consecutive(experts, return_counts=True)
        parts = zip(numbers.tolist(), torch.split(rows, counts.tolist()), strict=True)
        out = [self._run_expert(number, part) for number, part in parts if len(part)]
        weighted = torch.cat([hidden_states[:0], *out]) * top_k_weights.reshape(-1)[order, None]
        result = torch.empty_like(weighted)
        result[order] = weighted
        return (
            result.view(*top_k_index.shape, hidden_states.shape[1])
            .sum(dim=1)
            .to(hidden_states.dtype)
        )

    def _run_expert(self, number: int, rows: Tensor) -> Tensor:
        experts, inner = self._experts, self.up[number](rows)
        inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
        out: Tensor = self.down[number](inner)
        normed = getattr(experts, "has_post_expert_norm", False)  # unset before Transformers 5.18
        return experts.post_expert_norm(out) if normed else out


def can_pack_experts(module: nn.Module, codec: str) -> bool:
    """Whether a module is a mixture's experts as Transformers stacks them, and can be packed."""
    if not all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed")):
        return False
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "up_proj", "down_proj")]
    stacked = [weight for weight in weights if isinstance(weight, nn.Parameter)]
    inner = -2 if module.is_transposed else -1
    return len(stacked) == _EXPERT_PRODUCTS and all(
        weight.ndim == 3 and weight.dtype in KINDS and can_pack(weight.shape[inner], codec)
        for weight in stacked
    )


def _expert_layers(
    experts: nn.Module, name: str, products: Products, codec: str
) -> list[PackedLinear]:
    weights = getattr(experts, name).detach()
    weights = weights.mT if experts.is_transposed else weights
    bias = f"{name}_bias"
    biases = getattr(experts, bias).detach() if experts.has_bias else [None] * len(weights)
    packed = [
        _packed_linear(weight, products, codec, one)
        for weight, one in zip(weights, biases, strict=True)
    ]
    for stacked in (name, bias) if experts.has_bias else (name,):
        delattr(experts, stacked)
    return packed


def available_products() -> Products | None:
    """The products of the C library; None if it has none for this CPU."""
    library = load_library()
    if isinstance(library, NotLoaded) or not has_products(library):
        return None
    return Products(library)


@functools.cache
def fastest_products() -> Products | None:
    """The products of the C library; None if it has none for this CPU, or oneDNN's are faster.

    Only a CPU with AMX is measured: the C library has no code for it.
    """
    products = available_products()
    if products is None:
        return None
    return None if has_amx() and _one_dnn_is_faster(products) else products


def has_amx() -> bool:
    """Return whether this CPU has AMX, as far as torch knows."""
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())


def _one_dnn_is_faster(products: Products) -> bool:
    weight = torch.ones(_MEASURED_WIDTH, _MEASURED_WIDTH, dtype=torch.bfloat16)
    x = torch.ones(_MEASURED_ROWS, _MEASURED_WIDTH, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    product = products.prepare(pack(weight, "bfloat16"))
    ours = _min_seconds(lambda: product.run(x, out))
    return _min_seconds(lambda: nn.functional.linear(x, weight)) < ours


def _min_seconds(call: Callable[[], object]) -> float:
    call()
    seconds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
