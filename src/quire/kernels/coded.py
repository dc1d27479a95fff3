"""Pages that hold codes: encode what is written, decode what is gathered.

A plane of codes, scales or outliers is a view [pages, heads, records, width] over the whole arena;
it has a record for each slot, or one for all slots of a page.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from quire.codecs.base import Codec

DECODED_COPIES = 4  # of a slot's key and value, in float32: held at once while pages are decoded


@dataclass(frozen=True, slots=True)
class CodedPlanes:
    """Keys or values of all pages of a class, as codes.

    Attributes:
        codec: what encodes and decodes them.
        planes: one view for each of `CodecSpec.planes`.
    """

    codec: Codec
    planes: tuple[Shaped[Tensor, "page head _ _"], ...]

    def codec_of(self, lanes: Int[Tensor, "*place"] | None) -> Codec:
        """The codec for pages of some lanes of the layer, where its constants are each head's own.

        Args:
            lanes: where vectors [*place, head of the page, token, head_dim] come from; None where
                none of the constants is.
        """
        if lanes is None or not self.codec.constants:
            return self.codec
        heads = self.planes[0].shape[1]
        own = torch.arange(heads, device=lanes.device)
        return self.codec.of_heads(lanes[..., None] * heads + own)


@dataclass(frozen=True, slots=True)
class CodedPages:
    """Keys and values of all pages of a class, as codes; one of the two may be plain numbers."""

    key: CodedPlanes
    value: CodedPlanes


def decoded_slot_bytes(heads: int, head_dim: int) -> int:
    """Bytes that a slot takes while it is decoded, key and value of all heads of a page."""
    return DECODED_COPIES * heads * head_dim * 4


def write_codes(
    coded: CodedPlanes,
    pages: Int[Tensor, "new_token lane"],
    offsets: Int[Tensor, "new_token lane"],
    vectors: Float[Tensor, "new_token num_kv_heads head_dim"],
) -> None:
    """Encode one vector per token and KV head into its slot."""
    heads = coded.planes[0].shape[1]
    alone = vectors.reshape(*pages.shape, heads, 1, vectors.shape[2])
    codec = coded.codec_of(torch.arange(pages.shape[1], device=pages.device))
    for plane, codes in zip(coded.planes, codec.encode(alone), strict=True):
        plane[pages, :, offsets] = codes.squeeze(-2)


def decode_pages(
    coded: CodedPlanes,
    pages: Int[Tensor, "row column"],
    out: Float[Tensor, " numbers"],
    lanes: Int[Tensor, " lane"] | None = None,
) -> Float[Tensor, "row head slot head_dim"]:
    """Decode pages side by side: slot = column * tokens + offset.

    Slots that are not live decode to anything, NaN included.

    Args:
        coded: all pages.
        pages: page numbers.
        out: at least as many numbers as are decoded, of any float type.
        lanes: of the layer, one for each row or one for all; needed where constants were measured.
    """
    codec = coded.codec_of(None if lanes is None else lanes[:, None])
    decoded = codec.decode([plane[pages] for plane in coded.planes])
    rows, columns, heads, tokens, head_dim = decoded.shape
    filled = out[: decoded.numel()].view(rows, heads, columns, tokens, head_dim)
    filled.transpose(1, 2).copy_(decoded)
    return filled.flatten(2, 3)


def decode_head(
    coded: CodedPlanes, pages: Int[Tensor, " column"], head: int, lane: int = 0
) -> Float[Tensor, "slot head_dim"]:
    """Decode pages of one lane of the layer side by side, one of their heads, float32."""
    own = torch.tensor([lane * coded.planes[0].shape[1] + head], device=pages.device)
    codec = coded.codec.of_heads(own)
    return codec.decode([plane[pages, head, None] for plane in coded.planes]).flatten(0, 2)


def decode_slots(
    coded: CodedPlanes,
    pages: Int[Tensor, "*place"],
    offsets: Int[Tensor, "*place"],
    lanes: Int[Tensor, "*place_of_lanes"] | None = None,
) -> Float[Tensor, "*place head head_dim"]:
    """Decode single slots, float32.

    Args:
        coded: all pages.
        pages: where they are.
        offsets: in these.
        lanes: of the layer, as `CodedPlanes.codec_of` takes them; broadcast over the places.
    """
    found = []
    for plane in coded.planes:
        record = offsets if plane.shape[2] > 1 else torch.zeros_like(offsets)
        found.append(plane[pages, :, record].unsqueeze(-2))
    return coded.codec_of(lanes).decode(found).squeeze(-2)
