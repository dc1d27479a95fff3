"""Slots written, encoded and moved, and pages packed, by Triton equal those of torch."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.codecs.base import DTYPES
from quire.kernels.backend import MovedSlots, NewSlots
from quire.kernels.gathered import GatheredAttention
from quire.kernels.reference_backend import ReferenceAttention
from quire.kv.store import PageStore
from quire.layout.codec_names import codec_pair
from quire.layout.pages import kv_pages
from support.interpreted import CPU, Refusing, interpreted, triton_backend

launch = interpreted("launch")

REFERENCE = ReferenceAttention()
HEADS, TOKENS, LANES = 2, 4, 2


def new_slots(store, page_class, places):
    views = store.views(page_class)
    return NewSlots(views.key, views.value, *places, coded=views.coded)


def written(backend, codec, key, value, places):
    """The arena after a backend wrote keys and values."""
    specs = codec_pair(codec)
    page_class = kv_pages(
        key=specs[0],
        value=specs[1],
        head_dim=key.shape[2],
        value_dim=value.shape[2],
        heads=HEADS,
        tokens=TOKENS,
    )
    store = PageStore(12 * page_class.page_bytes, CPU)
    store.arena.zero_()
    backend.write(new_slots(store, page_class, places), key, value)
    return store.arena


def places_of(num_tokens, seed=0):
    """Distinct slots of each token in two lanes."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(12 * TOKENS, generator=generator)[: num_tokens * LANES]
    return tuple(x.view(num_tokens, LANES) for x in (slots // TOKENS, slots % TOKENS))


def vectors_of(num_tokens, head_dim, dtype=torch.float32, seed=0, value_dim=None):
    """Keys and values of all magnitudes; heads first in memory, as models compute them."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-7, 4, num_tokens)[:, None]
    shapes = [(LANES * HEADS, num_tokens, dim) for dim in (head_dim, value_dim or head_dim)]
    drawn = [torch.randn(shape, generator=generator) * sizes for shape in shapes]
    return [x.to(dtype).transpose(0, 1) for x in drawn]


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dims", [(16, 16), (80, 48), (24, 40)])
def test_plain_vectors_are_copied(codec, dims):
    args = codec, *vectors_of(5, dims[0], DTYPES[codec], value_dim=dims[1]), places_of(5)
    assert torch.equal(written(triton_backend(), *args), written(REFERENCE, *args))


@pytest.mark.parametrize(
    "codec", ["int8", "fp8", "int4", "int2", "int4:group=16", "int8/float32", "bfloat16/int4"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_have_the_bits_of_the_codec(codec, dtype):
    key, value = vectors_of(4, 48, dtype, value_dim=32)
    key[0, 0], key[1, 1], value[2, 2], value[3, 0, ::2] = 0, 3.3, -1.25, 0
    args = codec, key, value, places_of(4)

    assert torch.equal(written(triton_backend(), *args), written(REFERENCE, *args))


@settings(max_examples=10)
@given(
    codec=st.sampled_from(["int8", "fp8", "int4"]),
    numbers=st.lists(
        st.floats(-1e6, 1e6, width=32) | st.sampled_from([65504.0, 65520.0, -0.0, 1e-8, 0.015625]),
        min_size=16,
        max_size=16,
    ),
)
def test_codes_of_any_numbers_have_the_bits_of_the_codec(codec, numbers):
    vector = torch.tensor(numbers).expand(1, LANES * HEADS, 16)
    args = codec, vector, -vector / 3, places_of(1)

    assert torch.equal(written(triton_backend(), *args), written(REFERENCE, *args))


def test_fp8_codes_of_all_float16():
    """Ties, subnormal codes and the largest code, in vectors with the scale 1."""
    bits = torch.arange(0, 448 * 16, 7)
    vector = (bits.float() / 16).view(-1, 64)[:16]
    vector = torch.cat([vector, vector / 4096])
    vector[:, 0] = 448
    key = vector.repeat(1, 2).view(len(vector), 2, 64).repeat(1, 2, 1)[:20]
    args = "fp8", key, -key, places_of(20)

    assert torch.equal(written(triton_backend(), *args), written(REFERENCE, *args))


@pytest.mark.parametrize("codec", ["int8", "fp8", "int4"])
def test_a_nan_stays_visible_in_its_vector_only(codec):
    key, value = vectors_of(2, 16)
    key[1, 0, 3] = torch.nan
    specs = codec_pair(codec)
    page_class = kv_pages(key=specs[0], value=specs[1], head_dim=16, heads=HEADS, tokens=TOKENS)
    store = PageStore(12 * page_class.page_bytes, CPU)
    store.arena.zero_()
    slots = new_slots(store, page_class, places_of(2))
    triton_backend().write(slots, key, value)
    side = slots.coded.key
    decoded = side.codec.decode([plane[slots.pages, :, slots.offsets] for plane in side.planes])

    assert decoded.view(2, 4, 16).isnan().any(dim=2).nonzero().tolist() == [[1, 0]]


@pytest.mark.parametrize("codec", ["int3", "int4_outliers", "int4_hadamard"])
def test_other_codecs_are_encoded_by_torch(codec):
    args = codec, *vectors_of(3, 32), places_of(3)
    backend = triton_backend(GatheredAttention(CPU))

    assert torch.equal(written(backend, *args), written(REFERENCE, *args))
    with pytest.raises(AssertionError, match="a write fell back"):
        written(triton_backend(Refusing()), *args)


@pytest.mark.parametrize(("heads", "head_dim"), [(2, 48), (4, 24)])
def test_keys_that_do_not_fit_the_pages_are_refused(heads, head_dim):
    """Half of the heads or half of each vector."""
    arena = torch.zeros(4, 2, 2, TOKENS, 48)
    indices = torch.zeros(3, 2, dtype=torch.int64)
    fresh = torch.ones(3, heads, head_dim)
    with pytest.raises(RuntimeError):
        triton_backend(GatheredAttention(CPU)).write(
            NewSlots(arena[:, 0], arena[:, 1], indices, indices), fresh, fresh
        )


def planes_of(dtype):
    """Keys, values and positions of pages, with other data at the end of each page."""
    pages, heads, tokens, dim = 3, 2, 4, 5
    arena = torch.arange(pages * 100).view(pages, 100).to(dtype)
    size = heads * tokens * dim
    key, value = (arena[:, at : at + size].unflatten(1, (heads, tokens, dim)) for at in (0, size))
    return arena, (key, value, arena[:, 2 * size : 2 * size + tokens][:, None, :, None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.uint8])
@pytest.mark.parametrize("seed", [0, 1])
def test_all_slots_are_read_before_any_slot_is_written(dtype, seed):
    """Targets are sources of other moves."""
    generator = torch.Generator().manual_seed(seed)
    ends = [divmod_slots(torch.randperm(12, generator=generator)[:9]) for _ in range(2)]
    (arena, planes), (expected, expected_planes) = planes_of(dtype), planes_of(dtype)
    REFERENCE.move(MovedSlots(expected_planes, *ends))
    triton_backend().move(MovedSlots(planes, *ends))

    assert torch.equal(arena, expected)
    assert not torch.equal(arena, planes_of(dtype)[0])


def divmod_slots(slots):
    return slots // 4, slots % 4


def test_no_moves():
    arena, planes = planes_of(torch.float32)
    none = torch.empty(0, dtype=torch.int64)
    triton_backend().move(MovedSlots(planes, (none, none), (none, none)))

    assert torch.equal(arena, planes_of(torch.float32)[0])


def test_unsupported_planes_fall_back_to_torch():
    _, planes = planes_of(torch.float32)
    strided = tuple(plane.transpose(1, 2).contiguous().transpose(1, 2) for plane in planes)
    moves = MovedSlots(strided, *(divmod_slots(torch.tensor(x)) for x in ([0, 5], [5, 7])))
    expected = tuple(plane.clone() for plane in strided)
    REFERENCE.move(replace(moves, planes=expected))
    triton_backend(GatheredAttention(CPU)).move(moves)

    assert all(map(torch.equal, strided, expected))


@pytest.mark.parametrize(("page_bytes", "start"), [(64, 0), (20, 0), (6, 2), (5, 1), (4096, 8)])
def test_packed_pages_are_those_of_the_arena(page_bytes, start):
    arena = torch.randint(0, 255, (start + 7 * page_bytes,), dtype=torch.uint8)
    whole = arena[start:].view(7, page_bytes)
    pages, packed = torch.tensor([5, 0, 3]), torch.empty(3, page_bytes, dtype=torch.uint8)
    before = whole.clone()
    launch.pack_pages(whole, pages, packed)

    assert torch.equal(packed, before[pages])
    launch.unpack_pages(whole, torch.tensor([1, 2, 6]), packed)
    assert torch.equal(whole[[1, 2, 6]], before[pages])
    assert torch.equal(whole[[0, 3, 4, 5]], before[[0, 3, 4, 5]])


def test_no_pages_are_packed():
    whole = torch.zeros(3, 8, dtype=torch.uint8)
    packed = torch.empty(0, 8, dtype=torch.uint8)
    launch.pack_pages(whole, torch.empty(0, dtype=torch.int64), packed)

    assert packed.shape == (0, 8)
