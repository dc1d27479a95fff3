"""RoPE in one kernel with the write of pages equals RoPE of torch followed by the write."""

from contextlib import nullcontext

import pytest
import torch

from quire.codecs.base import DTYPES
from quire.kernels.backend import CosSin, rotated_and_written
from quire.kernels.gathered import GatheredAttention
from quire.kernels.reference_backend import ReferenceAttention
from quire.kv.store import PageStore
from quire.layout.codec_names import codec_pair
from quire.layout.pages import kv_pages
from support.interpreted import CPU, interpreted, triton_backend
from support.pairwise import every_pair
from unit.kernels.test_triton_slots import HEADS, LANES, TOKENS, new_slots, places_of

launch = interpreted("launch")

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


class Arena:
    """Pages of a codec."""

    def __init__(self, codec, head_dim, value_dim=None):
        specs = codec_pair(codec)
        self.page_class = kv_pages(
            key=specs[0],
            value=specs[1],
            head_dim=head_dim,
            value_dim=value_dim,
            heads=HEADS,
            tokens=TOKENS,
        )
        self.store = PageStore(12 * self.page_class.page_bytes, CPU)
        self.store.arena.zero_()

    def slots(self, places):
        """New slots at these places."""
        return new_slots(self.store, self.page_class, places)

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

    assert not arena.store.arena.any()
    assert all(map(torch.equal, heads, before))


def test_other_backends_have_no_such_kernel():
    heads, arena = heads_of(3, 32, torch.float32), Arena("float32", 32)
    assert not rotated_and_written(
        GatheredAttention(CPU), arena.slots(places_of(3)), heads, turns_of(3, 32)
    )


def test_rotation_without_a_write():
    (query, key, value), rope = heads_of(4, 80, torch.float32), turns_of(4, 32)
    expected = rope.rotate(query), rope.rotate(key), value.clone()

    launch.rotate(query, key, rope)

    torch.testing.assert_close((query, key, value), expected)


def test_kernels_run_on_the_device_of_the_heads(monkeypatch):
    (query, key, _), rope, seen = heads_of(2, 16, torch.float32), turns_of(2, 16), []
    monkeypatch.setattr(
        launch, "device_of", lambda heads: seen.append(heads.device) or nullcontext()
    )
    launch.rotate(query, key, rope)
    assert seen == [CPU]
