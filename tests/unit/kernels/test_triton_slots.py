"""Slots written, encoded, rotated and moved, and pages packed, by Triton equal those of torch."""

import logging
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.codecs.base import DTYPES
from quire.kernels import page_copies
from quire.kernels.backend import CosSin, NewSlots, rotated_and_written
from quire.kernels.gathered import GatheredAttention
from quire.kernels.page_copies import IN_TORCH, PageCopies, checked
from quire.kernels.reference_backend import ReferenceAttention
from quire.kv.store import PageStore
from quire.layout.codec_names import codec_pair
from quire.layout.pages import kv_pages
from support.interpreted import CPU, FAILURES, Refusing, interpreted, triton_backend
from support.pairwise import every_pair

launch = interpreted("launch")

REFERENCE = ReferenceAttention()
HEADS, TOKENS, LANES = 2, 4, 2


class Arena:
    """Pages of a codec."""

    def __init__(self, codec, head_dim, value_dim=None):
        key, value = codec_pair(codec)
        sizes = {"head_dim": head_dim, "value_dim": value_dim, "heads": HEADS, "tokens": TOKENS}
        self.page_class = kv_pages(key=key, value=value, **sizes)
        self.store = PageStore(12 * self.page_class.page_bytes, CPU)
        self.store.arena.zero_()

    def slots(self, places):
        """New slots at these places."""
        views = self.store.views(self.page_class)
        return NewSlots(views.key, views.value, *places, coded=views.coded)

    def decoded(self, places):
        """Keys and values of slots in float32, [tokens, heads, elements] each."""
        views = self.store.views(self.page_class)
        pages, offsets = places
        sides = []
        for number, plane in enumerate((views.key, views.value)):
            codec = None if views.coded is None else (views.coded.key, views.coded.value)[number]
            planes = (plane,) if codec is None else codec.planes
            read = [p[pages, :, offsets] for p in planes]
            side = read[0] if codec is None else codec.codec.decode(tuple(read))
            sides.append(side.float().flatten(1, 2))
        return sides


def written(backend, codec, key, value, places):
    """The arena after a backend wrote keys and values."""
    arena = Arena(codec, key.shape[2], value.shape[2])
    backend.write(arena.slots(places), key, value)
    return arena.store.arena


def assert_written(codec, key, value, places):
    backends = triton_backend(), REFERENCE
    assert torch.equal(*(written(backend, codec, key, value, places) for backend in backends))


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
    vectors = vectors_of(5, dims[0], DTYPES[codec], value_dim=dims[1])
    assert_written(codec, *vectors, places_of(5))


@pytest.mark.parametrize(
    "codec", ["int8", "fp8", "int4", "int2", "int4:group=16", "int8/float32", "bfloat16/int4"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_have_the_bits_of_the_codec(codec, dtype):
    key, value = vectors_of(4, 48, dtype, value_dim=32)
    key[0, 0], key[1, 1], value[2, 2], value[3, 0, ::2] = 0, 3.3, -1.25, 0
    assert_written(codec, key, value, places_of(4))


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
    assert_written(codec, vector, -vector / 3, places_of(1))


def test_fp8_codes_of_all_float16():
    """Ties, subnormal codes and the largest code, in vectors with the scale 1."""
    bits = torch.arange(0, 448 * 16, 7)
    vector = (bits.float() / 16).view(-1, 64)[:16]
    vector = torch.cat([vector, vector / 4096])
    vector[:, 0] = 448
    key = vector.repeat(1, 2).view(len(vector), 2, 64).repeat(1, 2, 1)[:20]
    assert_written("fp8", key, -key, places_of(20))


@pytest.mark.parametrize("codec", ["int8", "fp8", "int4"])
def test_a_nan_stays_visible_in_its_vector_only(codec):
    (key, value), arena, places = vectors_of(2, 16), Arena(codec, 16), places_of(2)
    key[1, 0, 3] = torch.nan
    triton_backend().write(arena.slots(places), key, value)

    assert arena.decoded(places)[0].isnan().any(dim=2).nonzero().tolist() == [[1, 0]]


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
    arena, indices = torch.zeros(4, 2, 2, TOKENS, 48), torch.zeros(3, 2, dtype=torch.int64)
    fresh, slots = torch.ones(3, heads, head_dim), (arena[:, 0], arena[:, 1], indices, indices)
    with pytest.raises(RuntimeError):
        triton_backend(GatheredAttention(CPU)).write(NewSlots(*slots), fresh, fresh)


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
    launch.pack_pages(whole, pages[:0], packed[:0])


GROUP = 3
NUM_HEADS = LANES * HEADS * GROUP
# one rounding of float32; the codes of nearly equal numbers may differ by one
NEAR = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def heads_of(num_tokens, head_dim, dtype, value_dim=None):
    """Queries, keys and values as slices of one joint product."""
    generator = torch.Generator().manual_seed(1)
    kv_heads = LANES * HEADS
    widths = [NUM_HEADS * head_dim, kv_heads * head_dim, kv_heads * (value_dim or head_dim)]
    joint = torch.randn(num_tokens, sum(widths), generator=generator).to(dtype)
    pairs = zip(joint.split(widths, dim=1), (NUM_HEADS, kv_heads, kv_heads), strict=True)
    return tuple(part.unflatten(1, (heads, -1)) for part, heads in pairs)


def turns_of(num_tokens, rotary_dim):
    """Cosines and sines with a factor, as YaRN has one."""
    generator = torch.Generator().manual_seed(2)
    angles = torch.randn(num_tokens, rotary_dim // 2, generator=generator).repeat(1, 2) * 3
    return CosSin(angles.cos() * 1.25, angles.sin() * 1.25)


@pytest.mark.parametrize("dtype", list(NEAR), ids=str)
@pytest.mark.parametrize(
    ("head_dim", "value_dim", "rotary_dim"),
    [(16, 16, 16), (64, 64, 64), (80, 80, 32), (48, 32, 48), (24, 40, 16)],
)
def test_plain_pages(dtype, head_dim, value_dim, rotary_dim):
    codec = next(name for name, own in DTYPES.items() if own == dtype)
    query, key, value = heads_of(5, head_dim, dtype, value_dim)
    rope, places, arena = turns_of(5, rotary_dim), places_of(5), Arena(codec, head_dim, value_dim)
    expected = rope.rotate(query), rope.rotate(key), value.clone()

    assert rotated_and_written(triton_backend(), arena.slots(places), (query, key, value), rope)

    bound = {"atol": NEAR[dtype], "rtol": NEAR[dtype]}
    torch.testing.assert_close(query, expected[0], **bound)
    torch.testing.assert_close(key, expected[1], **bound)
    written_keys, written_values = arena.decoded(places)
    assert torch.equal(written_keys, key.float())
    assert torch.equal(written_values, expected[2].float())
    assert torch.equal(value, expected[2])


@every_pair(
    codec=["int8", "fp8", "int4", "int4:group=16", "int2", "int8/int4"],
    rotary_dim=[48, 16],
    dtype=[torch.float32, torch.bfloat16],
)
def test_coded_pages(codec, rotary_dim, dtype):
    query, key, value = heads_of(4, 48, dtype, 32)
    value[2, 1, ::2], value[3, 0] = float("nan"), 7e4
    rope, places = turns_of(4, rotary_dim), places_of(4)
    ours, theirs = Arena(codec, 48, 32), Arena(codec, 48, 32)
    rotated = rope.rotate(query), rope.rotate(key)
    ReferenceAttention().write(theirs.slots(places), rotated[1], value)

    assert rotated_and_written(triton_backend(), ours.slots(places), (query, key, value), rope)

    torch.testing.assert_close(query, rotated[0], atol=NEAR[dtype], rtol=NEAR[dtype])
    found, expected = ours.decoded(places), theirs.decoded(places)
    assert torch.equal(found[1].nan_to_num(9), expected[1].nan_to_num(9))
    steps = (expected[0].amax(dim=-1) - expected[0].amin(dim=-1))[..., None]
    bits = 8 if codec[3:4] == "8" or codec == "fp8" else int(codec[3])
    step = 2.0 ** -(3 if codec == "fp8" else bits)  # at most one code
    assert ((found[0] - expected[0]).abs() <= 1.1 * step * steps).all()
    assert ((found[0] - expected[0]).abs() > 1e-6).float().mean() < 0.05


@pytest.mark.parametrize("codec", ["float32", "int8", "int4"])
def test_padding_tokens_are_left_out(codec):
    """Rows whose source is another row write nothing: their slot is that of row 0."""
    heads, rope, arena = heads_of(4, 32, torch.float32), turns_of(4, 32), Arena(codec, 32)
    before = [x.clone() for x in heads]
    places = tuple(x.clone() for x in places_of(4))
    for place in places:
        place[2:] = place[0]
    alone = Arena(codec, 32)
    first = CosSin(rope.cosine[:2].contiguous(), rope.sine[:2].contiguous())
    two = tuple(x[:2].clone() for x in heads)
    slots = alone.slots(tuple(x[:2].contiguous() for x in places))
    assert rotated_and_written(triton_backend(), slots, two, first)

    source = torch.tensor([0, 1, 0, 0])
    assert rotated_and_written(triton_backend(), arena.slots(places), heads, rope, source)

    assert torch.equal(arena.store.arena, alone.store.arena)
    for own, old, expected in zip(heads, before, two, strict=True):
        assert torch.equal(own[:2], expected)
        assert torch.equal(own[2:], old[2:])


@pytest.mark.parametrize("codec", ["float32/int4", "int8_channel", "int4_outliers"])
def test_pages_without_a_kernel_are_left_unchanged(codec):
    heads, rope, arena = heads_of(3, 32, torch.float32), turns_of(3, 32), Arena(codec, 32)
    before = [x.clone() for x in heads]

    assert not rotated_and_written(triton_backend(), arena.slots(places_of(3)), heads, rope)
    gathered = GatheredAttention(CPU)
    assert not rotated_and_written(gathered, arena.slots(places_of(3)), heads, rope)

    assert not arena.store.arena.any()
    assert all(map(torch.equal, heads, before))


def test_rotation_without_a_write_runs_on_the_device_of_the_heads(monkeypatch):
    (query, key, value), rope, seen = heads_of(4, 80, torch.float32), turns_of(4, 32), []
    expected = rope.rotate(query), rope.rotate(key), value.clone()
    monkeypatch.setattr(
        launch, "device_of", lambda heads: seen.append(heads.device) or nullcontext()
    )

    launch.rotate(query, key, rope)

    torch.testing.assert_close((query, key, value), expected)
    assert seen == [CPU]


IN_TRITON = PageCopies(launch.pack_pages, launch.unpack_pages)


def test_a_cpu_copies_in_torch_a_gpu_in_triton_and_right_copies_are_used(monkeypatch):
    assert page_copies.page_copies(CPU) is IN_TORCH
    assert all(
        checked(lambda copies=copies: copies, CPU) is copies for copies in (IN_TORCH, IN_TRITON)
    )
    monkeypatch.setattr(page_copies, "why_no_triton", lambda device: None)
    monkeypatch.setattr(page_copies, "checked", lambda make, device: make())
    assert page_copies.page_copies.__wrapped__(torch.device("cuda")) == IN_TRITON


@pytest.mark.parametrize("side", ["pack", "unpack"])
def test_wrong_copies_are_not_used(side, caplog):
    copies = {"pack": IN_TORCH.pack, "unpack": IN_TORCH.unpack, side: lambda *args: None}

    assert checked(lambda: PageCopies(**copies), CPU) is IN_TORCH
    assert "wrong bytes" in caplog.text


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("place", ["import", "launch"])
def test_copies_that_cannot_be_launched_are_not_used(error, place, caplog):
    def fail(*args):
        raise error

    make = fail if place == "import" else lambda: PageCopies(fail, fail)

    assert checked(make, CPU) is IN_TORCH
    assert caplog.records[0].levelno == logging.WARNING
    assert f"Triton cannot run them: {error}" in caplog.text
