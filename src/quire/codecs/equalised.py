"""A codec behind channels of equal size: each is divided by a measured number before it is encoded.

Keys have channels that are large in all tokens, and such a channel widens the range of its whole
group. Divided by s, which is the root of how large a channel gets, they are more alike; what is
decoded is multiplied by s again, which gives queries the products that K / s has with Q * s.

Formula: s = sqrt(max |x| of the channel over the measured tokens), over the geometric mean of a
head's; encode(x / s), decode(...) * s.
Bound: s times that of the codec inside.
Source: key equalisation as in SmoothQuant (Xiao et al. 2022) and its kin, migration strength 1/2.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from quire.codecs.base import Codec, Planes
from quire.codecs.half import finite

LEAST = 1e-6  # of a channel that was never anything but zero


@dataclass(frozen=True, slots=True)
class Equalised(Codec):
    """Constants: `equal` [head, 1, head_dim], float32.

    Attributes:
        inside: the codec of the channels as they are divided.
    """

    inside: Codec = field(kw_only=True)

    def encode(self, vectors: Float[Tensor, "*batch token head_dim"]) -> tuple[Tensor, ...]:
        return self.inside.encode(finite(vectors) / self.constant("equal"))

    def decode(self, planes: Planes) -> Float[Tensor, "*batch token head_dim"]:
        return self.inside.decode(planes) * self.constant("equal")

    def measure(self, vectors: Float[Tensor, "head token head_dim"]) -> Mapping[str, Tensor]:
        roots = finite(vectors).abs().amax(dim=-2, keepdim=True).clamp_min(LEAST).sqrt()
        return {"equal": roots / roots.log().mean(dim=-1, keepdim=True).exp()}


def equalised(codec: Codec) -> Codec:
    """The codec with this in front, where its options ask for it."""
    if not codec.spec.equalise:
        return codec
    return Equalised(codec.spec, codec.head_dim, inside=codec)
