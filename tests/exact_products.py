"""Makes runs bit-equal whatever the shapes of their batches are.

Matrix products round otherwise in batches of other shapes, by 1e-7 of a number. Codes are whole
numbers: where one lies between two of them, that is enough to make it the other, and logits are
apart by 1e-2. Here products are computed in float64 and rounded once, which differs from batch to
batch in one number of 1e8.
"""

import pytest
from torch import nn

from quire.kernels import gathered, select


def use_exact_products(patch: pytest.MonkeyPatch) -> None:
    """Compute linear layers and the gathered backend's attention in float64, and attend to codes
    with that one: C computes in float32."""

    def forward(layer, x):
        bias = None if layer.bias is None else layer.bias.double()
        return nn.functional.linear(x.double(), layer.weight.double(), bias).to(x.dtype)

    patch.setattr(nn.Linear, "forward", forward)
    attend = gathered.attend_dense

    def wide(query, key, value, **options):
        return attend(query.double(), key.double(), value.double(), **options).to(query.dtype)

    patch.setattr(gathered, "attend_dense", wide)
    patch.setattr(select, "why_not", lambda spec, _: None if spec.is_plain else "in float64")
