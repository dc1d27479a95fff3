"""KV and activations on the host-to-device link: plain, or as codes that the device decodes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from benchmarks.common.decode_batch import DecodeBatch
from quire.codecs.base import DTYPES, Codec
from quire.codecs.registry import make_codec
from quire.layout.codec_names import codec_spec
from quire.layout.codecs import Plane
from quire.offload.profiler import Sizes
from quire.plan.offload.resident import activation_gate

PLAIN = "plain"
MOST_FLOAT_BYTES = 256 << 20  # most float32 scratch while encoding or decoding


@dataclass(frozen=True, slots=True)
class LinkCodecs:
    """Codecs by name; `plain` is the model's own dtype.

    Attributes:
        kv, x: codec of KV, codec of activations.
    """

    kv: str = PLAIN
    x: str = PLAIN

    @property
    def label(self) -> str:
        """Display name, such as `KV int8, X plain`."""
        return f"KV {self.kv}, X {self.x}"


@dataclass(frozen=True, slots=True)
class Coder:
    """Encodes elements [token, width] into planes [token, vector, record], and decodes planes.

    Attributes:
        codec: codec of vectors of its width.
        dtype: type of the decoded elements.
        width: elements of a token.
    """

    codec: Codec
    dtype: torch.dtype
    width: int

    @property
    def is_plain(self) -> bool:
        """Whether planes hold the elements unchanged, in their own dtype."""
        return self.codec.spec.is_plain and DTYPES[self.codec.spec.codes] == self.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all planes."""
        return sum(plane.record_bytes for plane in self._planes) * self._vectors

    @property
    def value_bytes(self) -> float:
        """Bytes of an element, with scales and other metadata."""
        return self.token_bytes / self.width

    @property
    def _planes(self) -> Sequence[Plane]:
        return self.codec.spec.planes(self.codec.head_dim)

    @property
    def _vectors(self) -> int:
        return self.width // self.codec.head_dim

    def records(self, tokens: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of each plane for the given number of tokens."""
        return [((tokens, self._vectors, p.width), DTYPES[p.dtype]) for p in self._planes]

    def encode(self, numbers: Float[Tensor, "token width"], into: Sequence[Tensor]) -> None:
        """Encode elements, possibly on another device, into planes in bounded chunks."""
        for part in self._parts(len(numbers)):
            vectors = numbers[part].view(-1, self._vectors, self.codec.head_dim)
            for plane, target in zip(self.codec.encode(vectors), into, strict=True):
                target[part].copy_(plane)

    def decode(self, planes: Sequence[Tensor], out: Float[Tensor, "token width"]) -> None:
        """Decode planes into elements in bounded chunks."""
        for part in self._parts(len(out)):
            found = self.codec.decode([plane[part] for plane in planes])
            out[part].copy_(found.view(-1, self.width))

    def _parts(self, tokens: int) -> Iterator[slice]:
        step = max(1, MOST_FLOAT_BYTES // (4 * self.width))
        for first in range(0, tokens, step):
            yield slice(first, first + step)


def coders(case: DecodeBatch, link_codecs: LinkCodecs) -> tuple[Coder, Coder]:
    """Coders of KV and of activations."""
    kv = _coder(case, link_codecs.kv, case.kv_width)
    return kv, _coder(case, link_codecs.x, case.spec.hidden_size)


def _coder(case: DecodeBatch, name: str, width: int) -> Coder:
    """Coder for a codec name; codes have a scale for each head vector, plain elements do not."""
    spec = codec_spec(case.dtype if name == PLAIN else name)
    vector = width if spec.is_plain else case.spec.head_dim
    return Coder(make_codec(spec, vector), DTYPES[case.dtype], width)


def activations_pay(case: DecodeBatch, link_codecs: LinkCodecs) -> bool:
    """Whether an activation is smaller on the link than the KV that is computed from it."""
    kv, x = coders(case, link_codecs)
    gate = activation_gate(case.spec, kv_value_bytes=kv.value_bytes, x_value_bytes=x.value_bytes)
    return gate.pays


def link_sizes(case: DecodeBatch, link_codecs: LinkCodecs) -> Sizes:
    """Bytes on the link; the new token of a row is stored in plain precision."""
    kv, x = coders(case, link_codecs)
    return Sizes(
        kv_bytes=kv.token_bytes,
        x_bytes=x.token_bytes,
        new_kv_bytes=case.kv_width * case.value_bytes,
        new_x_bytes=case.spec.hidden_size * case.value_bytes * activations_pay(case, link_codecs),
    )
