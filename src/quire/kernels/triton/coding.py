"""Which codecs the kernels decode, and the description of keys or values for them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor

from quire.codecs.base import Codec
from quire.codecs.hadamard import ROTATED
from quire.codecs.registry import Equalised
from quire.kernels.backend import LayerPages, dims_of
from quire.kernels.coded import CodedPlanes
from quire.layout.codecs import CodecSpec

PLAIN, INT8, INT8_CHANNEL, FP8, BITS_CODES = range(5)  # the numbers of device/tiles.py
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

KINDS: Mapping[str, int] = MappingProxyType(
    {
        "float32": PLAIN,
        "bfloat16": PLAIN,
        "float16": PLAIN,
        "int8": INT8,
        "int8_channel": INT8_CHANNEL,
        "fp8": FP8,
        "int4": BITS_CODES,
        "int3": BITS_CODES,
        "int2": BITS_CODES,
        "int4_outliers": BITS_CODES,
        "int4_hadamard": BITS_CODES,
        "int3_hadamard": BITS_CODES,
    }
)
"""Rules of the codecs that the kernels decode; the gathered backend attends to all others."""

MAX_OUTLIERS = 16  # of a vector: the loop over them is unrolled


@dataclass(frozen=True, slots=True)
class SideCoding:
    """Keys or values of all pages of a class, as the kernels read them.

    Attributes:
        planes: codes, scales, zeros, outlier indices and values; the codes stand in for planes that
            the codec has not.
        kind: how codes are decoded, one of `KINDS`.
        bits: bits of a code.
        channels: neighbouring channels that share a scale.
        outliers: number of outliers of a vector.
        factors: float32 factors of the channels of each KV head of the layer, or None. They are
            multiplied with queries instead of keys, and with outputs instead of values.
        rotated: whether the vectors are rotated, see `ROTATED`.
    """

    planes: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = field(repr=False)
    kind: int
    bits: int
    channels: int
    outliers: int
    factors: Float[Tensor, "num_kv_heads head_dim"] | None
    rotated: bool = False

    @property
    def factors_or_codes(self) -> Tensor:
        """The factors; without factors any tensor, which the kernels do not read."""
        return self.planes[0] if self.factors is None else self.factors


def plain_coding(plane: Tensor) -> SideCoding:
    """Describe a plane of unquantized numbers."""
    head_dim = plane.shape[3]
    return SideCoding((plane,) * 5, PLAIN, 8 * plane.itemsize, head_dim, 0, None)


def coding_of(side: CodedPlanes) -> SideCoding:
    """Describe coded keys or values."""
    spec, head_dim, codes = side.codec.spec, side.codec.head_dim, side.planes[0]
    named = dict(zip((p.name for p in spec.planes(head_dim)), side.planes, strict=True))
    names = ("scales", "zeros", "outlier_indices", "outlier_values")
    scales, zeros, indices, values = (named.get(name, codes) for name in names)
    return SideCoding(
        planes=(codes, scales, zeros, indices, values),
        kind=KINDS[spec.rule],
        bits=spec.code_bits,
        channels=spec.group_of(head_dim) if spec.has_zeros else head_dim,
        outliers=spec.num_outliers(head_dim),
        factors=_factors(side.codec),
        rotated=spec.rule in ROTATED,
    )


def sides_of(pages: LayerPages) -> tuple[SideCoding, SideCoding]:
    """Describe the keys and values of a layer."""
    if pages.coded is None:
        return plain_coding(pages.key), plain_coding(pages.value)
    return coding_of(pages.coded.key), coding_of(pages.coded.value)


def why_not(spec: CodecSpec, head_dim: int) -> str | None:
    """Return why the kernels cannot decode a codec, or None."""
    if spec.rule not in KINDS:
        return f"they do not decode {spec.name}"
    if spec.rule in ROTATED and spec.equalise:  # factors and rotation would be exchanged
        return f"they do not decode {spec.name}, rotated vectors with equalised channels"
    if spec.num_outliers(head_dim) > MAX_OUTLIERS:
        return f"they read at most {MAX_OUTLIERS} outliers of a vector, {spec.name} has more"
    return None


def unfit_pages(pages: LayerPages, head_dim: int) -> str | None:
    """Return why the kernels cannot read the pages of a layer, or None."""
    if pages.full_precision is not None:
        return "full-precision tokens"
    if pages.promoted is not None:
        return "tokens in a finer codec than their pages"
    if pages.coded is None:
        planes: tuple[Tensor, ...] = (pages.key, pages.value)
        if any(plane.dtype not in FLOATS for plane in planes):
            return f"pages of {pages.key.dtype}"
    else:
        sides = (pages.coded.key, pages.coded.value)
        planes = (*sides[0].planes, *sides[1].planes)
        reasons = (why_not(side.codec.spec, side.codec.head_dim) for side in sides)
        reason = next(filter(None, reasons), None)
        if reason is not None:
            return reason
    if dims_of(pages)[0] != head_dim:
        return f"keys of {dims_of(pages)[0]} numbers for queries of {head_dim}"
    return _unfit_strides(planes)


def unfit_scores(plane: Tensor, coded: CodedPlanes | None) -> str | None:
    """Return why the kernels cannot score these keys or values, or None."""
    if coded is None:
        return _unfit_strides((plane,)) if plane.dtype in FLOATS else f"pages of {plane.dtype}"
    spec = coded.codec.spec
    if spec.rule in ROTATED or spec.constants:
        return f"scores are computed from vectors, which {spec.name} rotates or multiplies"
    return why_not(spec, coded.codec.head_dim) or _unfit_strides(coded.planes)


def _unfit_strides(planes: tuple[Tensor, ...]) -> str | None:
    """Return why these are not planes of the same pages, or None."""
    strides = {plane.stride(0) * plane.itemsize for plane in planes}
    whole = all(has_whole_vectors(plane) for plane in planes)
    if len(strides) != 1 or not whole or any(strides.copy().pop() % p.itemsize for p in planes):
        return f"pages with strides {[plane.stride() for plane in planes]}"
    return None


def has_whole_vectors(plane: Tensor) -> bool:
    """Whether a plane is row-major inside a page."""
    _, _, tokens, width = plane.shape
    inner: tuple[int, ...] = (tokens * width, width, 1)
    return plane.stride()[1:] == inner


def _factors(codec: Codec) -> Tensor | None:
    """Factors of the channels of decoded vectors, [KV head, head_dim]."""
    name = "equal" if isinstance(codec, Equalised) else "scale"
    if codec.spec.rule != "int8_channel" and not isinstance(codec, Equalised):
        return None
    return codec.constant(name).flatten(1).float().contiguous()
