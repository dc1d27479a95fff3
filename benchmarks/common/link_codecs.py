"""KV and activations as they cross the link: plain, or in codes that the device decodes."""

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
from quire.plan.offload.activations import activation_gate

PLAIN = "plain"
_MOST_FLOAT_BYTES = 256 << 20  # of float32, between codes and numbers


@dataclass(frozen=True, slots=True)
class LinkCodecs:
    """Codecs by name; `plain` is the model's own type.

    Attributes:
        kv, x: of KV, of activations.
    """

    kv: str = PLAIN
    x: str = PLAIN

    @property
    def label(self) -> str:
        """For people: `KV int8, X plain`."""
        return f"KV {self.kv}, X {self.x}"


@dataclass(frozen=True, slots=True)
class Coder:
    """Numbers of tokens [token, width] to planes [token, vector, record] and back.

    Attributes:
        codec: of vectors of its width.
        dtype: of numbers.
        width: of a token.
    """

    codec: Codec
    dtype: torch.dtype
    width: int

    @property
    def is_plain(self) -> bool:
        """Whether planes are the numbers themselves, in their own type."""
        return self.codec.spec.is_plain and DTYPES[self.codec.spec.codes] == self.dtype

    @property
    def token_bytes(self) -> int:
        """Of a token, all planes."""
        return sum(plane.record_bytes for plane in self._planes) * self._vectors

    @property
    def value_bytes(self) -> float:
        """Of a number, all that is stored beside its code counted."""
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
        """Write planes of numbers, which may lie elsewhere, a bounded part at a time."""
        for part in self._parts(len(numbers)):
            vectors = numbers[part].view(-1, self._vectors, self.codec.head_dim)
            for plane, place in zip(self.codec.encode(vectors), into, strict=True):
                place[part].copy_(plane)

    def decode(self, planes: Sequence[Tensor], out: Float[Tensor, "token width"]) -> None:
        """Write the numbers of planes, a bounded part at a time."""
        for part in self._parts(len(out)):
            found = self.codec.decode([plane[part] for plane in planes])
            out[part].copy_(found.view(-1, self.width))

    def _parts(self, tokens: int) -> Iterator[slice]:
        step = max(1, _MOST_FLOAT_BYTES // (4 * self.width))
        for first in range(0, tokens, step):
            yield slice(first, first + step)


def coders(case: DecodeBatch, link_codecs: LinkCodecs) -> tuple[Coder, Coder]:
    """Of KV and of activations."""
    kv = _coder(case, link_codecs.kv, case.kv_width)
    return kv, _coder(case, link_codecs.x, case.spec.hidden_size)


def _coder(case: DecodeBatch, name: str, width: int) -> Coder:
    """Codes have a scale for each vector of a head's width; plain numbers need no vectors."""
    spec = codec_spec(case.dtype if name == PLAIN else name)
    vector = width if spec.is_plain else case.spec.head_dim
    return Coder(make_codec(spec, vector), DTYPES[case.dtype], width)


def activations_pay(case: DecodeBatch, link_codecs: LinkCodecs) -> bool:
    """Whether an activation is smaller on the link than the KV that is made from it."""
    kv, x = coders(case, link_codecs)
    gate = activation_gate(case.spec, kv_value_bytes=kv.value_bytes, x_value_bytes=x.value_bytes)
    return gate.pays


def link_sizes(case: DecodeBatch, link_codecs: LinkCodecs) -> Sizes:
    """Bytes on the link; a row's new token leaves as plain numbers."""
    kv, x = coders(case, link_codecs)
    return Sizes(
        kv_bytes=kv.token_bytes,
        x_bytes=x.token_bytes,
        new_kv_bytes=case.kv_width * case.value_bytes,
        new_x_bytes=case.spec.hidden_size * case.value_bytes * activations_pay(case, link_codecs),
    )
