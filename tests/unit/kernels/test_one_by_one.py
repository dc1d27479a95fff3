"""Attention one token at a time: a chunk is bitwise equal to its tokens processed singly."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.errors import InvariantError
from quire.kernels.backend import AttentionMath, LaneSlots, LayerPages, StepShape
from quire.kernels.gathered import GatheredAttention
from quire.kernels.native.backend import NativeAttention
from quire.kernels.native.library import PATHS, NativeLibrary, load_library
from quire.scheduler.schedule_config import INVARIANT_ROWS
from support.pairwise import every_pair

LIBRARY = load_library()
pytestmark = pytest.mark.skipif(
    not isinstance(LIBRARY, NativeLibrary), reason="the C extension is not built"
)
HEADS, KV_HEADS, DIM, PAGE = 6, 2, 32, 16


def backend_of(path: int) -> NativeAttention:
    library = replace(LIBRARY, path=path)
    return NativeAttention(
        library, GatheredAttention(torch.device("cpu")), fixed_rows=INVARIANT_ROWS
    )


def pages_of(rows: int, dtype: torch.dtype) -> LayerPages:
    """Filled pages; the pages of a row are consecutive."""
    shape = (rows * 8, KV_HEADS, PAGE, DIM)
    return LayerPages(
        key=torch.randn(shape).to(dtype),
        value=torch.randn(shape).to(dtype),
        table=torch.arange(rows * 8, dtype=torch.int32).view(rows, 1, 8),
        rows=torch.arange(rows),
        first_lane=0,
        num_lanes=1,
    )


def attend(backend, pages, query, tokens, slots, window, softcap=None, *, joined=False):
    """Attend rows with `tokens` new tokens in the last of `slots` slots."""
    step = StepShape.of(np.array(tokens, dtype=np.int32))
    lanes = LaneSlots(np.array(slots, dtype=np.int32)[:, None], window)
    plan = backend.plan(step, lanes, PAGE, 1)
    math = AttentionMath(DIM**-0.5, softcap, joined=joined)
    return backend.attend(plan, pages, math, query, (query, query))


SUPPORTED_PATHS = range(LIBRARY.path + 1) if isinstance(LIBRARY, NativeLibrary) else ()


@every_pair(
    window=[None, 20],
    dtype=[torch.bfloat16, torch.float32],
    path=SUPPORTED_PATHS,
    joined=[False, True],
)
def test_chunk_is_bitwise_equal_to_single_tokens(path, dtype, window, joined):
    if joined and path == 0:
        pytest.skip("joined keys are left to torch without vector instructions")
    backend, pages = backend_of(path), pages_of(2, dtype)
    query = torch.randn(60, HEADS, DIM + joined * DIM).to(dtype)
    options = {"softcap": 30.0, "joined": joined}
    whole = attend(backend, pages, query, [1, 59], [77, 100], window, **options)

    for token in (0, 1, 13, 59):
        row = min(token, 1)
        alone = replace(pages, rows=torch.tensor([row]))
        slots = 77 if token == 0 else 41 + token
        single = attend(backend, alone, query[token : token + 1], [1], [slots], window, **options)
        assert torch.equal(single[0], whole[token])


@pytest.mark.parametrize("path", SUPPORTED_PATHS, ids=lambda path: PATHS[path])
def test_one_by_one_attention_is_close_to_chunked_attention(path):
    pages, query = pages_of(1, torch.float32), torch.randn(50, HEADS, DIM)
    chunked = NativeAttention(replace(LIBRARY, path=path), GatheredAttention(torch.device("cpu")))

    found = attend(backend_of(path), pages, query, [50], [90], None)

    assert torch.allclose(found, attend(chunked, pages, query, [50], [90], None), atol=1e-5)


def test_column_sums_are_refused():
    backend, pages = backend_of(LIBRARY.path), pages_of(1, torch.float32)
    plan = backend.plan(
        StepShape.of(np.array([2], dtype=np.int32)),
        LaneSlots(np.array([[9]], dtype=np.int32), None),
        PAGE,
        1,
    )
    query, sums = torch.randn(2, HEADS, DIM), torch.zeros(2, HEADS, 16)

    with pytest.raises(InvariantError, match="token by token: column sums"):
        backend.attend(plan, pages, AttentionMath(1.0), query, (query, query), column_sums=sums)
