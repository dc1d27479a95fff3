"""Linear layers and embeddings of a Transformers model on the weights that the C library packs.

A packed weight has the bytes of the plain one (float16: those of float32). It is read once in a
product of up to six rows, at the speed of the memory; bfloat16 is widened in registers if the CPU
does not multiply it.
"""

import functools
import time
from collections.abc import Callable, Iterable
from typing import TypeGuard

import torch
from jaxtyping import Float
from torch import Tensor, nn

from quire.kernels.native.library import NotLoaded, load_library
from quire.kernels.native.linear import Product, Products, has_products, pack_bias
from quire.kernels.native.packed_weights import PackedWeight, can_pack, pack

KINDS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float32"}
_MEASURED_ROWS, _MEASURED_WIDTH, _ROUNDS = 256, 1024, 3


class PackedLinear(nn.Module):
    """A linear layer with a packed weight.

    Args:
        product: with the weight and its bias.
        products: determines the type of activations.
        columns: output elements of the layer among those of the product; None: all, in order.
    """

    def __init__(self, product: Product, products: Products, columns: Tensor | None = None) -> None:
        super().__init__()
        self.product, self._products, self._columns = product, products, columns
        self.in_features = product.weight.inner
        self.out_features = product.weight.outer if columns is None else len(columns)

    @property
    def packed(self) -> PackedWeight:
        """The packed weight."""
        return self.product.weight

    @property
    def weight(self) -> Tensor:
        """A decoded copy in the plain order, for code that reads the weight."""
        rows = torch.arange(self.packed.outer) if self._columns is None else self._columns
        return self.packed.rows(rows)

    def forward(self, rows: Float[Tensor, "... inner"]) -> Float[Tensor, "... outer"]:
        """Multiply, as `nn.Linear` does."""
        flat = rows.reshape(-1, self.in_features)
        x = flat.to(self._products.activation_dtype(self.packed, flat.dtype))
        out = flat.new_empty(len(flat), self.packed.outer)
        self.product.run(x, out)
        if self._columns is not None:
            out = out[:, self._columns]
        return out.view(*rows.shape[:-1], self.out_features)


class PackedEmbedding(nn.Module):
    """An embedding that reads rows of the packed weight of a tied output head.

    Args:
        packed: weight of the head.
        dtype: of the result.
    """

    def __init__(self, packed: PackedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.packed, self._dtype = packed, dtype

    @property
    def weight(self) -> Tensor:
        """A decoded copy in the plain order."""
        return self.packed.unpacked().to(self._dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """Return one row for each id."""
        return self.packed.rows(ids.flatten()).to(self._dtype).view(*ids.shape, -1)


@functools.cache
def fastest_products() -> Products | None:
    """The products of the C library; None if it has none for this CPU, or oneDNN's are faster.

    Only a CPU with AMX is measured: the C library has no code for it.
    """
    library = load_library()
    if isinstance(library, NotLoaded) or not has_products(library):
        return None
    products = Products(library)
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return None if has_amx() and _one_dnn_is_faster(products) else products


def _one_dnn_is_faster(products: Products) -> bool:
    weight = torch.ones(_MEASURED_WIDTH, _MEASURED_WIDTH, dtype=torch.bfloat16)
    x = torch.ones(_MEASURED_ROWS, _MEASURED_WIDTH, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    product = products.prepare(pack(weight, "bfloat16"))
    ours = _least_seconds(lambda: product.run(x, out))
    return _least_seconds(lambda: nn.functional.linear(x, weight)) < ours


def _least_seconds(call: Callable[[], object]) -> float:
    call()
    seconds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def pack_linears(
    model: nn.Module, products: Products, left_alone: Iterable[nn.Module] = ()
) -> None:
    """Replace the linear layers of a model on a CPU by packed layers.

    Layers are replaced one at a time, so the extra memory is that of the largest weight. A head
    that shares its weight with an embedding is packed too, and the embedding reads the packed
    weight. Not replaced: other shared weights, layers derived from `nn.Linear`, layers with hooks,
    and layers whose input elements do not fill the units of a packed weight.

    Args:
        model: on its final device.
        products: multiplies.
        left_alone: modules whose layers are not packed.
    """
    alone = {id(part) for module in left_alone for part in module.modules()}
    owners: dict[int, set[nn.Module]] = {}
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for weight in parent.parameters(recurse=False):
            owners.setdefault(id(weight), set()).add(parent)
        for name, child in parent._modules.items():  # named_children() skips second names
            if child is not None:
                places.setdefault(child, []).append((parent, name))
    packable = [m for m in places if id(m) not in alone and _is_packable(m)]
    embeddings = {}
    for linear in list(packable):
        others = owners[id(linear.weight)] - {linear}
        if len(others) == 1 and _is_embedding(*others):
            embeddings[linear] = others.pop()
        elif others:
            packable.remove(linear)
    owners.clear()
    while packable:  # hold no reference to a plain layer: each is freed before the next is packed
        linear = packable.pop(0)
        embedding = embeddings.pop(linear, None)
        packed = pack_linear(linear, products)
        _replace(places.pop(linear), packed)
        if embedding is not None:
            _replace(places.pop(embedding), PackedEmbedding(packed.packed, linear.weight.dtype))
        del linear, embedding


def pack_linear(linear: nn.Linear, products: Products) -> PackedLinear:
    """Pack one layer."""
    packed = pack(linear.weight.detach(), KINDS[linear.weight.dtype])
    bias = pack_bias([linear._parameters["bias"]], [packed.outer])
    return PackedLinear(products.prepare(packed, bias=bias), products)


def _replace(places: Iterable[tuple[nn.Module, str]], module: nn.Module) -> None:
    for parent, name in places:
        setattr(parent, name, module)


def _is_embedding(module: nn.Module) -> bool:
    return type(module) is nn.Embedding and module.max_norm is None and not _has_hooks(module)


def _is_packable(module: nn.Module) -> TypeGuard[nn.Linear]:
    return (
        type(module) is nn.Linear
        and module.weight.dtype in KINDS
        and module.weight.device.type == "cpu"
        and can_pack(module.in_features, KINDS[module.weight.dtype])
        and not _has_hooks(module)
    )


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
