"""New tokens encoded in C: the codes, scales and zeros that the codecs compute with torch."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.kernels.backend import NewSlots
from quire.kernels.coded import decode_slots
from quire.kernels.gathered import GatheredAttention
from quire.kernels.native.backend import NativeAttention
from quire.kernels.native.library import NativeLibrary, load_library
from quire.kv.store import PageStore
from quire.layout.codec_names import codec_pair
from quire.layout.pages import kv_pages
from support.pairwise import every_pair

LIBRARY = load_library()
PATHS = range(LIBRARY.path + 1) if isinstance(LIBRARY, NativeLibrary) else ()
PAGES, TOKENS, HEADS, LANES = 40, 5, 2, 3
CODECS = ["int8", "int4", "int4:group=8", "int2", "int8/int4", "int8/bfloat16", "float16/int2"]

pytestmark = pytest.mark.skipif(not PATHS, reason="the C extension is not built")


class Written:
    """Pages into which a backend has written vectors; all other bytes are 255."""

    def __init__(self, backend, codec, key, value) -> None:
        names = codec_pair(codec)
        page_class = kv_pages(
            key=names[0],
            value=names[1],
            head_dim=key.shape[2],
            value_dim=value.shape[2],
            heads=HEADS,
            tokens=TOKENS,
        )
        store = PageStore(PAGES * page_class.page_bytes, torch.device("cpu"))
        store.arena.fill_(255)
        views = store.views(page_class)
        generator = torch.Generator().manual_seed(1)
        slots = torch.randperm(PAGES * TOKENS, generator=generator)[: len(key) * LANES]
        pages, offsets = (x.view(len(key), LANES) for x in (slots // TOKENS, slots % TOKENS))
        backend.write(NewSlots(views.key, views.value, pages, offsets, views.coded), key, value)
        self.arena = store.arena
        self.decoded = [
            decode_slots(side, pages, offsets).flatten(1, 2)
            for side in (views.coded.key, views.coded.value)
        ]


def gathered():
    return GatheredAttention(torch.device("cpu"))


def native(path):
    return NativeAttention(replace(LIBRARY, path=path), gathered())


def vectors(tokens, head_dim, dtype, scale=1.0, seed=0, value_dim=None):
    """Keys and values with heads first in memory, as in models."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(LANES * HEADS, tokens, dim) for dim in (head_dim, value_dim or head_dim)]
    drawn = [torch.randn(shape, generator=generator) * scale for shape in shapes]
    return tuple(x.to(dtype).transpose(0, 1) for x in drawn)


@every_pair(path=PATHS, codec=CODECS, dtype=[torch.float32, torch.bfloat16, torch.float16])
def test_bytes_equal_those_of_torch(codec, dtype, path, monkeypatch):
    head_dim = 40 if codec != "int4" else 64
    for scale, value_dim in ((1.0, head_dim), (3e4, 32), (1e-4, 96)):
        key, value = vectors(21, head_dim, dtype, scale, value_dim=value_dim)
        expected = Written(gathered(), codec, key, value)
        with monkeypatch.context() as patched:
            patched.setattr(GatheredAttention, "write", pytest.fail)
            got = Written(native(path), codec, key, value)

        assert torch.equal(got.arena, expected.arena)


@given(
    numbers=st.lists(st.floats(width=32), min_size=16, max_size=16),
    codec=st.sampled_from(["int8", "int4", "int4:group=8", "int2"]),
)
def test_any_numbers_decode_as_from_torch(numbers, codec):
    key, value = vectors(1, 16, torch.float32)
    key[0, 1], value[0, 4] = torch.tensor(numbers), torch.tensor(numbers)
    expected = Written(gathered(), codec, key, value).decoded
    for path in PATHS:
        torch.testing.assert_close(
            Written(native(path), codec, key, value).decoded,
            expected,
            rtol=0,
            atol=0,
            equal_nan=True,
        )


@pytest.mark.parametrize("codec", ["fp8", "int4_outliers", "int3"])
def test_torch_encodes_what_the_library_does_not(codec):
    key, value = vectors(3, 64, torch.float32)
    expected = Written(gathered(), codec, key, value)

    assert torch.equal(Written(native(PATHS[-1]), codec, key, value).arena, expected.arena)
