"""A decoder layer with random weights on a device: what a step computes beside moving KV."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from benchmarks.device.shapes import DecodeCase
from quire.kernels.backend import AttentionMath
from quire.kernels.dense import attend_dense


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """Weights, [inner, outer] each.

    Attributes:
        query, kv, out: of attention; keys of all heads before values of all heads.
        up, down: of the MLP; `up` makes gate and value where it is gated.
        gated: whether it is.
    """

    query: Tensor
    kv: Tensor
    out: Tensor
    up: Tensor
    down: Tensor
    gated: bool

    @classmethod
    def random(cls, case: DecodeCase, generator: torch.Generator) -> "Layer":
        """Weights that keep the size of what goes through them."""
        spec, device = case.spec, generator.device
        dtype: torch.dtype = getattr(torch, case.dtype)

        def draw(inner: int, outer: int) -> Tensor:
            numbers = torch.randn(inner, outer, generator=generator, device=device, dtype=dtype)
            return numbers.mul_(inner**-0.5)

        heads, hidden = spec.num_heads * spec.head_dim, spec.hidden_size
        grown = spec.intermediate_size * (1 + spec.gated_mlp)
        return cls(
            query=draw(hidden, heads),
            kv=draw(hidden, case.kv_width),
            out=draw(heads, hidden),
            up=draw(hidden, grown),
            down=draw(spec.intermediate_size, hidden),
            gated=spec.gated_mlp,
        )

    def project(self, x: Float[Tensor, "token hidden"], into: Float[Tensor, "token width"]) -> None:
        """Keys and values of activations."""
        torch.mm(x, self.kv, out=into)

    def finish(
        self, hidden: Float[Tensor, "row hidden"], attended: Float[Tensor, "row head"]
    ) -> Float[Tensor, "row hidden"]:
        """The layer behind its attention."""
        hidden = hidden + attended @ self.out
        grown = normed(hidden) @ self.up
        if self.gated:
            gate, value = grown.chunk(2, dim=1)
            return hidden + (F.silu(gate) * value) @ self.down
        return hidden + F.relu(grown) @ self.down


def normed(hidden: Float[Tensor, "row hidden"]) -> Float[Tensor, "row hidden"]:
    """What a layer's attention is given."""
    return F.layer_norm(hidden, hidden.shape[-1:])


def attend_rows(
    case: DecodeCase,
    query: Float[Tensor, "row head"],
    kv: Float[Tensor, "token width"],
) -> Float[Tensor, "row head"]:
    """One query a row over its own tokens, which lie row behind row, equally many of each.

    Args:
        case: heads.
        query: of all heads.
        kv: keys of all heads before values of all heads, token by token.
    """
    spec, rows = case.spec, len(query)
    planes = kv.view(rows, -1, 2, spec.num_kv_heads, spec.head_dim)
    key, value = (planes[:, :, side].transpose(1, 2) for side in (0, 1))
    heads = query.view(rows, spec.num_heads, 1, spec.head_dim)
    out = attend_dense(heads, key, value, math=AttentionMath(spec.head_dim**-0.5), seen=None)
    return out.reshape(rows, -1)
