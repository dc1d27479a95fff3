"""Pages that hold codes: encode on write, decode on gather.

A plane of codes, scales or outliers is a view [pages, heads, records, width] over the whole arena;
it has one record per slot, or one for all slots of a page.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from quire.codecs.base import Codec

DECODED_COPIES = 2  # float32 copies of a slot's key, and of its value, held at once in decoding


@dataclass(frozen=True, slots=True)
class CodedPlanes:
    """Keys or values of all pages of a class, as codes.

    Attributes:
        codec: encodes and decodes them.
        planes: one view for each of `CodecSpec.planes`.
    """

    codec: Codec
    planes: tuple[Shaped[Tensor, "page head _ _"], ...]

    def codec_of(self, lanes: Int[Tensor, "*place"] | None) -> Codec:
        """Return the codec with the constants of the heads of some lanes.

        Args:
            lanes: lanes of the layer that vectors [*place, head of the page, token, head_dim]
                belong to; None if the codec has no constants per head.
        """
        if lanes is None or not self.codec.constants:
            return self.codec
        heads = self.planes[0].shape[1]
        own = torch.arange(heads, device=lanes.device)
        return self.codec.of_heads(lanes[..., None] * heads + own)


@dataclass(frozen=True, slots=True)
class CodedPages:
    """Keys and values of all pages of a class, as codes; one of the two may be unquantized."""

    key: CodedPlanes
    value: CodedPlanes


def decoded_slot_bytes(heads: int, dims: tuple[int, int]) -> int:
    """Return the bytes that a slot needs during decoding, for key and value of all heads.

    Args:
        heads: KV heads of a page.
        dims: elements of a key and of a value.
    """
    return DECODED_COPIES * heads * sum(dims) * 4


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
    """Decode pages to contiguous slots: slot = column * tokens + offset.

    Slots that are not live decode to arbitrary numbers, including NaN.

    Args:
        coded: all pages.
        pages: page numbers.
        out: scratch of any float type, at least as large as the decoded numbers.
        lanes: lanes of the layer, one per row or one for all; required if the codec has measured
            constants.
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
    """Decode one head of pages of one lane to contiguous slots, float32."""
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
        pages: page numbers of the slots.
        offsets: offsets in these pages.
        lanes: lanes of the layer, as in `CodedPlanes.codec_of`; broadcast over the slots.
    """
    found = []
    for plane in coded.planes:
        record = offsets if plane.shape[2] > 1 else torch.zeros_like(offsets)
        found.append(plane[pages, :, record].unsqueeze(-2))
    return coded.codec_of(lanes).decode(found).squeeze(-2)
