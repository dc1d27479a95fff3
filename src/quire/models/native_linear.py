"""Linear layers and embeddings of a Transformers model on the weights that the C library packs."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from quire.kernels.native.linear import Product, Products
from quire.kernels.native.packed_weights import PackedWeight


class PackedLinear(nn.Module):
    """A linear layer with a packed weight.

    Args:
        product: with the weight and its bias.
        products: determines the type of activations.
        columns: output elements of the layer among those of the product; None: all, in order.
    """

    def __init__(
        self, product: Product, products: Products, columns: Tensor | None = None
    ) -> None:
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
