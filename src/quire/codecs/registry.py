"""Registry of codec classes by name: the modules of `quire.codecs`."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from jaxtyping import Float
from torch import Tensor

from quire import codecs
from quire.codecs.affine import finite
from quire.codecs.base import Codec, Planes
from quire.errors import ConfigError
from quire.layout.codec_names import CODECS
from quire.layout.codecs import CodecSpec

C = TypeVar("C", bound=Codec)
_CODECS: dict[str, type[Codec]] = {}
_loaded: list[bool] = []


def register(*names: str) -> Callable[[type[C]], type[C]]:
    """Register a class as the implementation of codecs.

    Raises:
        ConfigError: a name is not listed in `quire.layout.codec_names`, or is in use.
    """

    def put(codec: type[C]) -> type[C]:
        for name in names:
            if name not in CODECS:
                raise ConfigError(
                    f"codec {name!r} is not in quire.layout.codec_names; add its planes there"
                )
            if _CODECS.get(name, codec) is not codec:
                raise ConfigError(f"two codecs are called {name!r}")
            _CODECS[name] = codec
        return codec

    return put


def registered() -> Mapping[str, type[Codec]]:
    """Return all codecs by name."""
    if not _loaded:
        for module in pkgutil.iter_modules(codecs.__path__):
            importlib.import_module(f"{codecs.__name__}.{module.name}")
        _loaded.append(True)
    return dict(sorted(_CODECS.items()))


def make_codec(spec: CodecSpec, head_dim: int) -> Codec:
    """Build the codec of a spec for vectors of `head_dim` elements.

    Raises:
        ConfigError: head_dim does not suit the codec.
    """
    return equalised(registered()[spec.rule](spec, head_dim))


# Channel equalisation: each channel is divided by a measured number before it is encoded.
#
# Keys have channels that are large in all tokens, and such a channel widens the range of its whole
# group. Dividing by s, the square root of a channel's largest magnitude, reduces the differences
# between channels. Decoded numbers are multiplied by s, which is equivalent to products of K / s
# with Q * s.
#
# Formula: s = sqrt(max |x| of the channel over the measured tokens), divided by the geometric mean
# over the channels of the head; encode(x / s), decode(...) * s.
# Bound: s times that of the inner codec.
# Source: key equalisation as in SmoothQuant (Xiao et al. 2022), migration strength 1/2.

LEAST = 1e-6  # lower bound on the magnitude of a channel, for channels that are always zero


@dataclass(frozen=True, slots=True)
class Equalised(Codec):
    """Codec with the constant `equal` [head, 1, head_dim], float32.

    Attributes:
        inside: codec of the equalised channels.
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
    """Wrap the codec in channel equalisation if its options request it."""
    if not codec.spec.equalise:
        return codec
    return Equalised(codec.spec, codec.head_dim, inside=codec)
