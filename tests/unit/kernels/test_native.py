"""The C extension equals the reference, on every path of this CPU, whatever the lanes hold."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.kernels.backend import AttentionMath, LaneSlots, LayerPages, StepShape
from quire.kernels.gathered import GatheredAttention
from quire.kernels.native.backend import NativeAttention
from quire.kernels.native.library import NativeLibrary, NotLoaded, load_from, load_library
from quire.kernels.reference import attend_reference
from quire.kernels.reference_backend import ReferenceAttention

CPU = torch.device("cpu")
LIBRARY = load_library()
needs_library = pytest.mark.skipif(
    isinstance(LIBRARY, NotLoaded), reason=getattr(LIBRARY, "reason", "")
)
PATHS = range(LIBRARY.path + 1) if isinstance(LIBRARY, NativeLibrary) else ()


def native(path: int) -> NativeAttention:
    assert isinstance(LIBRARY, NativeLibrary)
    return NativeAttention(replace(LIBRARY, path=path), GatheredAttention(CPU))


class Lanes:
    """One layer's pages with random numbers, everything that is not live poisoned with NaN."""

    def __init__(self, seed, *, lanes, heads, head_dim, page_tokens, slots, dtype):
        rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        self.slots = np.asarray(slots, dtype=np.int32)
        columns = -(-int(self.slots.max()) // page_tokens)
        num_pages = len(slots) * lanes * columns
        shape = (num_pages, 2, heads, page_tokens, head_dim)
        arena = torch.full(shape, float("nan"), dtype=dtype)
        numbers = torch.from_numpy(rng.permutation(num_pages).astype(np.int32))
        self.table = numbers.view(len(slots), lanes, columns)
        for row in range(len(slots)):
            for lane in range(lanes):
                for slot in range(int(self.slots[row, lane])):
                    page = int(self.table[row, lane, slot // page_tokens])
                    vectors = torch.randn(2, heads, head_dim, generator=generator)
                    arena[page, :, :, slot % page_tokens] = vectors.to(dtype)
        self.pages = LayerPages(
            key=arena[:, 0],
            value=arena[:, 1],
            table=self.table,
            rows=torch.arange(len(slots)),
            first_lane=0,
            num_lanes=lanes,
        )


def both(backend, lanes: Lanes, tokens, window, math, query):
    step = StepShape.of(np.asarray(tokens, dtype=np.int32))
    for other in (ReferenceAttention(), backend):
        plan = other.plan(step, LaneSlots(lanes.slots, window), lanes.pages.page_tokens, 64)
        yield other.attend(plan, lanes.pages, math, query, (query[:, :0], query[:, :0]))


@needs_library
@pytest.mark.parametrize("path", PATHS)
@given(
    seed=st.integers(0, 1_000),
    lanes=st.sampled_from([1, 2]),
    heads=st.sampled_from([1, 3]),
    group=st.sampled_from([1, 2, 3, 4, 7]),
    head_dim=st.sampled_from([8, 64, 80, 96, 128, 256]),
    page_tokens=st.sampled_from([1, 3, 16, 20, 32]),
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=3),
    new=st.sampled_from([1, 2, 5]),
    window=st.sampled_from([None, 1, 9, 40]),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
)
def test_native_equals_reference_in_float32(
    path, seed, lanes, heads, group, head_dim, page_tokens, lengths, new, window, softcap, sinks
):
    generator = torch.Generator().manual_seed(seed)
    slots = [[length + new] * lanes for length in lengths]
    made = Lanes(
        seed,
        lanes=lanes,
        heads=heads,
        head_dim=head_dim,
        page_tokens=page_tokens,
        slots=slots,
        dtype=torch.float32,
    )
    num_heads = lanes * heads * group
    query = torch.randn(len(slots) * new, num_heads, head_dim, generator=generator)
    logits = torch.randn(num_heads, generator=generator) if sinks else None
    math = AttentionMath(scale=head_dim**-0.5, softcap=softcap, sinks=logits)
    expected, got = both(native(path), made, [new] * len(slots), window, math, query)

    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@needs_library
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_half_precision_stays_near_the_float32_reference(path, dtype, head_dim):
    """The reference computes in float32 on the same stored numbers; prints the error's spread."""
    made = Lanes(
        0,
        lanes=1,
        heads=2,
        head_dim=head_dim,
        page_tokens=16,
        slots=[[300], [17], [128]],
        dtype=dtype,
    )
    query = torch.randn(3, 8, head_dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    math = AttentionMath(scale=head_dim**-0.5)
    expected, got = both(native(path), made, [1, 1, 1], None, math, query)
    error = (got.float() - expected.float()).abs() / expected.float().abs().max()
    print(f"relative error: median {error.median():.1e}, largest {error.max():.1e}")

    assert error.max() <= 2e-2


@needs_library
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("window", [None, 7])
def test_column_sums_equal_the_reference_and_leave_the_output_alone(path, window):
    lanes = Lanes(
        3, lanes=1, heads=2, head_dim=64, page_tokens=16, slots=[[45]], dtype=torch.float32
    )
    tokens, group = 3, 2
    query = torch.randn(tokens, 4, 64, generator=torch.Generator().manual_seed(4))
    math = AttentionMath(scale=0.2, softcap=4.0)
    backend = native(path)
    step = StepShape.of(np.array([tokens], dtype=np.int32))
    plan = backend.plan(step, LaneSlots(lanes.slots, window), 16, 64)
    sums, outs = torch.zeros(1, 2, 45), []
    for column_sums in (None, sums):
        out = torch.empty_like(query)
        backend.attend_rows(plan, lanes.pages, math, query, out, column_sums=column_sums)
        outs.append(out)
    slot = torch.arange(45)
    pages = lanes.table[0, 0][slot // 16].long()
    key, value = (x[pages, :, slot % 16] for x in (lanes.pages.key, lanes.pages.value))
    _, expected = attend_reference(
        query,
        key,
        value,
        math=math,
        query_positions=slot[-tokens:],
        key_positions=slot,
        window=window,
    )

    assert torch.equal(outs[0], outs[1])
    torch.testing.assert_close(
        sums[0], expected.view(2, group, 45).sum(dim=1), atol=1e-5, rtol=1e-4
    )


def test_a_library_that_cannot_be_used_is_a_reason_not_a_crash(tmp_path):
    broken = tmp_path / "_attention.so"
    broken.write_bytes(b"\x7fELF but not really")

    assert "cannot be used" in load_from(broken).reason
    assert "cannot be used" in load_from(tmp_path / "missing.so").reason


@needs_library
def test_one_openmp_runtime_is_mapped():
    """A second runtime's spinning threads would fight with torch's."""
    torch.ones(4) @ torch.ones(4)
    with open("/proc/self/maps") as maps:
        files = {line.split()[-1] for line in maps if "/" in line}
    runtimes = {f for f in files if any(name in f for name in ("libgomp", "libomp", "libiomp"))}

    assert len(runtimes) <= 1, runtimes


def test_the_library_is_there_where_a_compiler_is():
    """A build that failed is a notice to users; here it must be loud."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")

    assert isinstance(LIBRARY, NativeLibrary), LIBRARY.reason
