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
    for plane, codes in zip(coded.planes, coded.codec.encode(alone), strict=True):
        plane[pages, :, offsets] = codes.squeeze(-2)


def decode_pages(
    coded: CodedPlanes, pages: Int[Tensor, "row column"], out: Float[Tensor, " numbers"]
) -> Float[Tensor, "row head slot head_dim"]:
    """Decode pages side by side: slot = column * tokens + offset.

    Slots that are not live decode to anything, NaN included.

    Args:
        coded: all pages.
        pages: page numbers.
        out: at least as many numbers as are decoded, of any float type.
    """
    decoded = coded.codec.decode([plane[pages] for plane in coded.planes])
    rows, columns, heads, tokens, head_dim = decoded.shape
    filled = out[: decoded.numel()].view(rows, heads, columns, tokens, head_dim)
    filled.transpose(1, 2).copy_(decoded)
    return filled.flatten(2, 3)


def decode_head(
    coded: CodedPlanes, pages: Int[Tensor, " column"], head: int
) -> Float[Tensor, "slot head_dim"]:
    """Decode pages of one lane side by side, one of their heads, float32."""
    return coded.codec.decode([plane[pages, head, None] for plane in coded.planes]).flatten(0, 2)


def decode_slots(
    coded: CodedPlanes, pages: Int[Tensor, "*place"], offsets: Int[Tensor, "*place"]
) -> Float[Tensor, "*place head head_dim"]:
    """Decode single slots, float32."""
    found = []
    for plane in coded.planes:
        record = offsets if plane.shape[2] > 1 else torch.zeros_like(offsets)
        found.append(plane[pages, :, record].unsqueeze(-2))
    return coded.codec.decode(found).squeeze(-2)
