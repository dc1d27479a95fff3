"""Slots moved in pages: every backend equals copying one vector at a time."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.kernels.backend import MovedSlots
from quire.kernels.gathered import GatheredAttention
from quire.kernels.native.backend import NativeAttention
from quire.kernels.native.library import NativeLibrary, load_library
from quire.kernels.pre_rope import PreRopeAttention
from quire.kernels.reference_backend import ReferenceAttention

CPU = torch.device("cpu")
LIBRARY = load_library()
BACKENDS = {
    "reference": ReferenceAttention(),
    "gathered": GatheredAttention(CPU),
    "pre_rope": PreRopeAttention(CPU),
}
if isinstance(LIBRARY, NativeLibrary):
    BACKENDS["native"] = NativeAttention(LIBRARY, GatheredAttention(CPU))
    one_thread = replace(LIBRARY, parallel_for=None)
    BACKENDS["native, one thread"] = NativeAttention(one_thread, GatheredAttention(CPU))


def planes_of(pages, heads, tokens, dim, dtype):
    """Keys, values and positions of pages, with other data at the end of each page."""
    arena = torch.arange(pages * (2 * heads * tokens * dim + tokens + 8))
    arena = arena.view(pages, -1).to(dtype)
    size = heads * tokens * dim
    key, value = (arena[:, at : at + size].unflatten(1, (heads, tokens, dim)) for at in (0, size))
    positions = arena[:, 2 * size : 2 * size + tokens][:, None, :, None]
    return arena, (key, value, positions)


def moves_of(planes, num_moves, seed):
    """Distinct targets; sources may be any slots, including targets."""
    pages, _, tokens, _ = planes[0].shape
    rng = np.random.default_rng(seed)
    target = rng.permutation(pages * tokens)[:num_moves]
    source = rng.permutation(pages * tokens)[:num_moves]
    indices = (torch.from_numpy(part) for ends in (source, target) for part in divmod(ends, tokens))
    from_page, from_offset, to_page, to_offset = indices
    return MovedSlots(planes, (from_page, from_offset), (to_page, to_offset))


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@given(
    pages=st.integers(1, 5),
    heads=st.sampled_from([1, 3]),
    tokens=st.sampled_from([1, 3, 16]),
    dim=st.sampled_from([1, 5, 64]),
    dtype=st.sampled_from([torch.float32, torch.int16, torch.uint8]),
    share=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_all_slots_are_read_before_any_slot_is_written(
    backend, pages, heads, tokens, dim, dtype, share, seed
):
    arena, planes = planes_of(pages, heads, tokens, dim, dtype)
    moves = moves_of(planes, round(share * pages * tokens), seed)
    expected = arena.clone()
    for before, after in zip(
        planes_like(arena.clone(), planes), planes_like(expected, planes), strict=True
    ):
        for (page, offset), (to_page, to_offset) in zip(
            zip(*moves.source, strict=True), zip(*moves.target, strict=True), strict=True
        ):
            after[to_page, :, to_offset] = before[page, :, offset]
    backend.move(moves)

    assert torch.equal(arena, expected)


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_moves_in_several_threads(backend):
    """Enough moves for several threads: a ring of slots, each moved to the next."""
    _, planes = planes_of(200, 2, 16, 8, torch.float32)
    slots = torch.arange(200 * 16)
    targets = slots.roll(-1)
    ends = ((slots // 16, slots % 16), (targets // 16, targets % 16))
    before = [plane.clone() for plane in planes]
    backend.move(MovedSlots(planes, *ends))

    for plane, old in zip(planes, before, strict=True):
        by_slot, old_by_slot = (p.transpose(1, 2).flatten(0, 1) for p in (plane, old))
        assert torch.equal(by_slot, old_by_slot.roll(1, dims=0))


@pytest.mark.skipif("native" not in BACKENDS, reason="the C extension is not built")
def test_unsupported_planes_fall_back_to_torch():
    _, planes = planes_of(4, 2, 8, 6, torch.float32)
    strided = tuple(plane.transpose(1, 2).contiguous().transpose(1, 2) for plane in planes)
    moves = replace(moves_of(planes, 20, seed=1), planes=strided)
    expected = [plane.clone() for plane in strided]
    ReferenceAttention().move(replace(moves, planes=tuple(expected)))
    BACKENDS["native"].move(moves)

    assert all(map(torch.equal, strided, expected))


def planes_like(arena, planes):
    """The planes of another arena of the same shape."""
    return [
        arena.as_strided(plane.shape, plane.stride(), plane.storage_offset()) for plane in planes
    ]
