"""Launches of the kernels that rotate queries and keys, alone and with the write to pages."""

import triton
from torch import Tensor

from quire.kernels.backend import NewSlots
from quire.kernels.coded import CodedPages
from quire.kernels.rope_write import CosSin
from quire.kernels.triton.coding import coding_of
from quire.kernels.triton.device.rope import rotate_and_encode, rotate_and_write
from quire.kernels.triton.hardware import device_of
from quire.kernels.triton.slot_calls import BLOCK_ITEMS, can_write


def rotate(query: Tensor, key: Tensor, rope: CosSin) -> None:
    """Rotate queries and keys in place."""
    with device_of(query):
        _launch(None, query, key, key, rope, None)


def can_rotate_and_write(slots: NewSlots, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether one kernel can rotate and write these heads."""
    coded = slots.coded
    return (
        query.stride(2) == 1
        and query.dtype == key.dtype
        and can_write(slots, key, value)
        and (coded is None or not _has_plain_side(coded))
    )


def write(
    slots: NewSlots, heads: tuple[Tensor, Tensor, Tensor], rope: CosSin, source: Tensor | None
) -> None:
    """Rotate and write; see `RopeWriter.rotate_and_write`."""
    if slots.coded is None:
        _launch(slots, *heads, rope, source)
    else:
        _encode(slots, slots.coded, *heads, rope, source)


def _has_plain_side(coded: CodedPages) -> bool:
    return any(side.codec.spec.is_plain for side in (coded.key, coded.value))


def _strides(*heads: Tensor) -> list[int]:
    return [stride for tensor in heads for stride in tensor.stride()[:2]]


def _launch(
    slots: NewSlots | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rope: CosSin,
    source: Tensor | None,
) -> None:
    num_tokens, num_heads, head_dim = query.shape
    dims, half = triton.next_power_of_2(head_dim), rope.rotary_dim // 2
    block = min(triton.next_power_of_2(key.shape[1]), max(1, BLOCK_ITEMS // dims))
    plane = key if slots is None else slots.key
    grid = (num_tokens, triton.cdiv(num_heads, block) + triton.cdiv(key.shape[1], block))
    rotate_and_write[grid](
        query,
        key,
        value,
        rope.cosine,
        rope.sine,
        query if source is None else source,
        plane,
        value if slots is None else slots.value,
        query if slots is None else slots.pages,
        query if slots is None else slots.offsets,
        *_strides(query, key, value),
        0 if slots is None else plane.stride(0) * plane.itemsize,
        num_heads,
        1 if slots is None else slots.pages.shape[1],
        *(key.shape[1], 1) if slots is None else plane.shape[1:3],
        head_dim,
        rope.rotary_dim,
        block,
        dims,
        triton.next_power_of_2(half),
        source is not None,
        slots is not None,
        num_warps=4,
    )


def _encode(
    slots: NewSlots,
    coded: CodedPages,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rope: CosSin,
    source: Tensor | None,
) -> None:
    sides = coding_of(coded.key), coding_of(coded.value)
    num_tokens, num_heads, head_dim = query.shape
    codes = sides[0].planes[0]
    rotate_and_encode[(num_tokens, num_heads + 2 * key.shape[1])](
        query,
        key,
        value,
        rope.cosine,
        rope.sine,
        query if source is None else source,
        *(plane for side in sides for plane in side.planes[:3]),
        slots.pages,
        slots.offsets,
        *_strides(query, key, value),
        codes.stride(0) * codes.itemsize,
        num_heads,
        slots.pages.shape[1],
        *codes.shape[1:3],
        head_dim,
        rope.rotary_dim,
        triton.next_power_of_2(rope.rotary_dim // 2),
        source is not None,
        *(number for side in sides for number in (side.kind, side.bits, side.channels)),
        *(triton.next_power_of_2(head_dim * side.bits // 8) for side in sides),
        num_warps=1,
    )
