"""Every backend equals the reference, with and without column sums and NaN in free slots."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import InvariantError, PolicyError
from quire.kernels.backend import Alibi, AttentionMath, LaneSlots, NewSlots, StepShape
from quire.kernels.gathered import GatheredAttention
from quire.kernels.latent import LatentHeads
from quire.kernels.native.backend import NativeAttention
from quire.kernels.native.library import PATHS, NativeLibrary, load_library
from quire.kernels.reference_backend import ReferenceAttention
from quire.kernels.triton.hardware import why_no_triton
from quire.layout.pages import VALUE
from quire.layout.statistics import REDUCTIONS, QueryRing
from quire.policies.keydiff import KeyDiff
from quire.policies.knorm import KNorm
from quire.policies.snapkv import SnapKV
from quire.policies.tova import TOVA
from quire.policies.windows import POOLINGS, column_sums
from support.coded_lanes import coded_twin
from support.interpreted import triton_backend
from support.lanes import Lanes, ScoredLanes
from support.pairwise import every_pair

CPU = torch.device("cpu")
LIBRARY = load_library()
NATIVE = {
    f"native, {PATHS[path]}": NativeAttention(replace(LIBRARY, path=path), GatheredAttention(CPU))
    for path in (range(LIBRARY.path + 1) if isinstance(LIBRARY, NativeLibrary) else ())
}
BACKENDS = {"gathered": GatheredAttention(CPU, scratch_bytes=4096)} | NATIVE
REFERENCE = ReferenceAttention()

SCORING = {name: backend for name, backend in NATIVE.items() if "plain" not in name}
UNEQUAL = [(48, 32), (192, 128), (32, 64), (20, 33), (64, 512)]
"""Elements of a key and of a value."""
DIMS = [(dim, dim) for dim in (8, 20, 33, 64, 80, 96, 128, 256, 512)] + UNEQUAL
any_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
any_native = pytest.mark.parametrize("backend", NATIVE.values(), ids=NATIVE)


@st.composite
def steps(draw, dtype=torch.float32):
    """Decode rows and chunks; the lanes of a row may have different lengths."""
    ones = draw(st.sampled_from([0, 1, 2, 3, 9]))
    chunks = draw(st.lists(st.sampled_from([2, 5, 16, 17, 30, 70]), max_size=2))
    tokens = [1] * ones + chunks or [1]
    lanes = draw(st.sampled_from([1, 2]))
    before = st.one_of(st.just(0), st.integers(0, 90), st.integers(250, 300))
    window = draw(st.sampled_from([None, None, 1, 9, 40, 257]))
    slots = []
    for new in tokens:
        row = [draw(before) + new for _ in range(lanes)]
        slots.append(row if window is None else row[:1] * lanes)
    head_dim, value_dim = draw(st.sampled_from(DIMS))
    return Lanes(
        tokens=tokens,
        slots=slots,
        heads=draw(st.sampled_from([1, 3, 8])),
        head_dim=head_dim,
        value_dim=value_dim,
        page_tokens=draw(st.sampled_from([1, 3, 16, 20, 32])),
        dtype=dtype,
        window=window,
        seed=draw(st.integers(0, 1000)),
        evicted=window is None and draw(st.booleans()),
    )


def alibi_of(kind, query):
    """Slopes of each query head."""
    if not kind:
        return None
    slopes = torch.linspace(0.7, 0.02, query.shape[1])
    return Alibi(slopes.bfloat16().float(), 0.7, rounded=kind == "rounded")


any_alibi = st.sampled_from(["", "", "plain", "rounded"])


@any_backend
@given(
    lanes=steps(),
    group=st.sampled_from([1, 2, 3, 7, 9]),
    softcap=st.sampled_from([None, 2.0]),
    with_sinks=st.booleans(),
    alibi=any_alibi,
    joined=st.booleans(),
)
def test_outputs_and_column_sums_equal_the_reference(
    backend, lanes, group, softcap, with_sinks, alibi, joined
):
    query = lanes.query(group, joined=joined)
    sinks = torch.linspace(-2, 2, query.shape[1]) if with_sinks else None
    options = {"alibi": alibi_of(alibi, query), "joined": joined}
    math = AttentionMath(query.shape[2] ** -0.5, softcap, sinks, **options)
    expected, expected_sums = lanes.attend_with_sums(REFERENCE, query, math)
    got, sums = lanes.attend_with_sums(backend, query, math)

    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(sums, expected_sums, atol=1e-5, rtol=1e-4)
    assert torch.equal(lanes.attend(backend, query, math), got)  # the same without sums


@any_backend
@given(
    lanes=steps(torch.bfloat16),
    group=st.sampled_from([1, 2, 4, 5, 8, 11]),
    softcap=st.sampled_from([None, 2.0]),
    alibi=any_alibi,
    joined=st.booleans(),
)
def test_bfloat16_stays_near_the_reference(backend, lanes, group, softcap, alibi, joined):
    query = lanes.query(group, joined=joined)
    options = {"alibi": alibi_of(alibi, query), "joined": joined}
    math = AttentionMath(query.shape[2] ** -0.5, softcap, **options)
    expected, expected_sums = lanes.attend_with_sums(REFERENCE, query, math)
    got, sums = lanes.attend_with_sums(backend, query, math)

    atol = 2e-2 * float(expected.abs().max())
    torch.testing.assert_close(got.float(), expected.float(), atol=atol, rtol=2e-2)
    torch.testing.assert_close(sums, expected_sums, atol=2e-3, rtol=2e-2)
    assert torch.equal(lanes.attend(backend, query, math), got)


@any_backend
@every_pair(
    dtype=[torch.bfloat16, torch.float16],
    dims=[(dim, dim) for dim in (64, 80, 96, 128, 256, 512)] + UNEQUAL,
    tokens=[[1, 1, 1], [40, 17, 100]],
)
def test_half_precision_stays_near_the_float32_reference(backend, dtype, dims, tokens):
    """The reference computes in float32 on the same stored values; prints error quantiles."""
    lanes = Lanes(
        tokens=tokens,
        slots=[[300], [17], [128]],
        heads=2,
        head_dim=dims[0],
        value_dim=dims[1],
        page_tokens=16,
        dtype=dtype,
    )
    query, math = lanes.query(4), AttentionMath(scale=dims[0] ** -0.5)
    expected, expected_sums = lanes.attend_with_sums(REFERENCE, query, math)
    got, sums = lanes.attend_with_sums(backend, query, math)
    error = (got.float() - expected.float()).abs() / expected.float().abs().max()
    at = torch.tensor([0.5, 0.9, 0.99, 1.0])
    spread = ", ".join(f"{x:.1e}" for x in error.flatten().quantile(at).tolist())
    print(f"relative error, quantiles {at.tolist()}: {spread}")

    assert error.max() <= 2e-2
    torch.testing.assert_close(sums, expected_sums, atol=2e-3, rtol=2e-2)


@any_backend
@every_pair(
    dtype=[torch.float32, torch.bfloat16],
    lanes=[1, 3],
    tokens=[1, 33, 300],
    dims=[(40, 40), (24, 8), (8, 24)],
)
def test_write_puts_keys_and_values_in_their_slots_only(backend, tokens, lanes, dtype, dims):
    heads, page_tokens, num_pages = 2, 16, 1000
    generator = torch.Generator().manual_seed(tokens)
    arena = torch.zeros(num_pages, heads * page_tokens * sum(dims), dtype=dtype)
    planes = [
        side.unflatten(1, (heads, page_tokens, -1))
        for side in arena.split([heads * page_tokens * dim for dim in dims], dim=1)
    ]
    slots = torch.randperm(num_pages * page_tokens, generator=generator)[: tokens * lanes]
    pages, offsets = (x.view(tokens, lanes) for x in (slots // page_tokens, slots % page_tokens))
    # the layout of models: heads first in memory
    key, value = (
        torch.randn(lanes * heads, tokens, dim, generator=generator).to(dtype).transpose(0, 1)
        for dim in dims
    )
    backend.write(NewSlots(*planes, pages, offsets), key, value)

    for plane, vectors in zip(planes, (key, value), strict=True):
        assert torch.equal(plane[pages, :, offsets].reshape(vectors.shape), vectors)
        assert int((plane != 0).any(dim=-1).any(dim=1).sum()) == tokens * lanes


@any_native
@every_pair(
    dtype=[torch.float32, torch.bfloat16, torch.float16],
    dims=[(64, 512), (32, 256), (8, 24), (16, 32)],
    group=[1, 4, 20, 64],
    window=[None, 40],
    tokens=[[1, 1, 1], [1, 5, 13]],
)
def test_all_query_heads_attend_to_latents(backend, dtype, dims, group, window, tokens):
    """Long rows are split and merged; 64 query heads of a chunk are several blocks."""
    lanes = Lanes(
        tokens=tokens,
        slots=[[2300], [77], [300]],
        heads=1,
        head_dim=dims[0],
        value_dim=dims[1],
        page_tokens=16,
        dtype=dtype,
        window=window,
        evicted=window is None,
    )
    query = lanes.query(group, joined=True)
    sinks = torch.linspace(-2, 2, query.shape[1])
    math = AttentionMath(query.shape[2] ** -0.5, sinks=sinks, joined=True)
    expected, expected_sums = lanes.attend_with_sums(REFERENCE, query, math)
    got, sums = lanes.attend_with_sums(backend, query, math)

    atol, rtol = (1e-5, 1e-4) if dtype == torch.float32 else (2e-3, 2e-2)
    least = atol if dtype == torch.float32 else 2e-2 * float(expected.abs().max())
    torch.testing.assert_close(got.float(), expected.float(), atol=least, rtol=rtol)
    torch.testing.assert_close(sums, expected_sums, atol=atol, rtol=rtol)


@pytest.mark.parametrize(
    ("tokens", "slots", "expands"),
    [
        (2, 2, True),  # nothing but new tokens
        (200, 12_000, False),
        (240, 12_000, True),
        (16_384, 16_384, True),
        (16_384, 16_385, False),  # 128 * 256 * 2 B a token: above 1 GiB
    ],
)
def test_chunks_expand_latents_if_that_is_faster_and_small(tokens, slots, expands):
    """DeepSeek V3: t tokens on many slots: 1.25 * 512 * 256 < t * (1,024 - 256) from 214 on."""
    weight = torch.empty(128 * 256, 512, dtype=torch.bfloat16, device="meta")
    latent = LatentHeads(lambda: weight, 128, 128, lambda value, key: (key, value))

    assert latent.prefers_expanding(tokens, slots) == expands


@any_backend
@every_pair(
    dtype=[torch.float32, torch.bfloat16],
    window=[None, 40, 300],
    tokens=[[1, 20, 70], [60, 60, 60]],
    value_dim=[16, 24],
)
def test_chunks_attend_to_heads_expanded_from_latents(backend, dtype, window, tokens, value_dim):
    lanes = Lanes(
        tokens=tokens,
        slots=[[70], [333], [70]],
        heads=1,
        head_dim=16,
        value_dim=40,
        page_tokens=16,
        dtype=dtype,
        window=window,
    )
    weight = torch.randn(6, 32 + value_dim, 40, generator=lanes.generator) / 6

    def expand(value, rotated):
        heads = (value.float() @ weight.transpose(1, 2)).to(value.dtype)
        return torch.cat([heads[..., :32], rotated.expand_as(heads[..., :16])], -1), heads[..., 32:]

    latent = LatentHeads(lambda: weight.flatten(0, 1), 6, 32, expand)
    query = torch.randn(sum(tokens), 6, 48, generator=lanes.generator).to(dtype)
    math = AttentionMath(scale=48**-0.5, sinks=torch.linspace(-2, 2, 6), latent=latent)
    expected, expected_sums = lanes.attend_with_sums(REFERENCE, query, math)
    got, sums = lanes.attend_with_sums(backend, query, math)

    atol, rtol = (1e-5, 1e-4) if dtype == torch.float32 else (2e-2, 2e-2)
    torch.testing.assert_close(got.float(), expected.float(), atol=atol, rtol=rtol)
    torch.testing.assert_close(sums, expected_sums, atol=atol, rtol=rtol)


@any_native
@pytest.mark.parametrize("slots", [1100, 4096, 4097, 8200, 9000])
def test_long_rows_are_split_and_merged(backend, slots):
    lanes = Lanes(
        tokens=[1, 1],
        slots=[[slots, max(slots - 4090, 6)], [5, 3]],
        heads=1,
        head_dim=16,
        page_tokens=16,
        dtype=torch.float32,
    )
    query = lanes.query(9)
    math = AttentionMath(scale=0.25, sinks=torch.linspace(-2, 6, 18))
    expected, expected_sums = lanes.attend_with_sums(REFERENCE, query, math)
    got, sums = lanes.attend_with_sums(backend, query, math)

    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(sums, expected_sums, atol=1e-6, rtol=1e-4)


@any_native
@pytest.mark.parametrize("slots", [11901, 11902])
def test_column_sums_in_one_block_or_recomputed(backend, slots):
    """17 query vectors: (17 + 5) x (11,900 + 15) logits are below 2 ** 18, one slot more above."""
    lanes = Lanes(
        tokens=[17, 40],
        slots=[[slots - 1], [300]],
        heads=1,
        head_dim=16,
        page_tokens=16,
        dtype=torch.float32,
        window=None,
    )
    query, math = lanes.query(1), AttentionMath(scale=0.25)
    expected, expected_sums = lanes.attend_with_sums(REFERENCE, query, math)
    got, sums = lanes.attend_with_sums(backend, query, math)

    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(sums, expected_sums, atol=1e-6, rtol=1e-4)


@any_native
@pytest.mark.parametrize("joined", [False, True])
def test_output_of_a_row_is_batch_invariant(backend, joined):
    """Its output is bitwise independent of the other rows and of the number of threads."""
    shape = {"heads": 2, "head_dim": 64, "page_tokens": 16, "dtype": torch.bfloat16}
    slots, tokens = [[9000], [1200], [700]], [1, 1, 600]
    lanes = Lanes(tokens=tokens, slots=slots, **shape)
    query, math = lanes.query(2, joined=joined), AttentionMath(scale=0.125, joined=joined)
    together = lanes.attend(backend, query, math)
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert torch.equal(lanes.attend(backend, query, math), together)
    finally:
        torch.set_num_threads(threads)
    for row, first in enumerate([0, 1, 2]):
        alone = Lanes(tokens=tokens[row : row + 1], slots=slots[row : row + 1], **shape)
        alone.table, alone.pages = lanes.table[row : row + 1], lanes.pages
        alone.pages = replace(lanes.pages, rows=torch.tensor([row]))
        part = slice(first, first + tokens[row])
        assert torch.equal(alone.attend(backend, query[part], math), together[part])


@any_native
def test_attention_with_table_row_and_lane_offsets(backend):
    """Step rows map to any table rows, and layer lanes to any lanes of the group."""
    lanes = Lanes(
        tokens=[1, 20],
        slots=[[50, 40], [33, 33]],
        heads=1,
        head_dim=32,
        page_tokens=16,
        dtype=torch.float32,
    )
    query, math = lanes.query(2), AttentionMath(scale=0.2)
    expected = lanes.attend(backend, query, math)
    _, count, columns = lanes.table.shape
    large = torch.full((7, count + 3, columns), -1, dtype=torch.int32)
    large[torch.tensor([5, 2]), 2 : 2 + count] = lanes.table
    lanes.table = large[torch.tensor([5, 2]), 2 : 2 + count]
    lanes.pages = replace(lanes.pages, table=large, rows=torch.tensor([5, 2]), first_lane=2)

    assert torch.equal(lanes.attend(backend, query, math), expected)


@pytest.mark.skipif(not NATIVE, reason="the C extension is not built")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda pages: replace(pages, key=pages.key.double()), "pages of torch.float64"),
        (lambda pages: replace(pages, table=pages.table.long()), "page table of torch.int64"),
        (
            lambda pages: replace(pages, key=pages.key.transpose(2, 3).clone().transpose(2, 3)),
            "strides",
        ),
        (lambda pages: replace(pages, key=unaligned(pages.key)), "not aligned to their item size"),
    ],
)
def test_unsupported_tensors_fall_back_to_torch_with_one_warning(change, reason, caplog):
    lanes = Lanes(
        tokens=[1, 20],
        slots=[[50], [33]],
        heads=1,
        head_dim=32,
        page_tokens=16,
        dtype=torch.float32,
    )
    query, math = lanes.query(2), AttentionMath(scale=0.2)
    backend = NativeAttention(LIBRARY, GatheredAttention(CPU))
    expected = lanes.attend(backend, query, math)
    assert not caplog.records
    lanes.pages = change(lanes.pages)
    reasons = []
    backend = NativeAttention(LIBRARY, Recording(reasons))
    for _ in range(2):
        lanes.attend(backend, query, math)

    assert reasons == ["attended", "attended"]
    assert expected.isfinite().all()
    assert len(caplog.records) == 1  # logged once
    assert reason in caplog.text


@pytest.mark.skipif(not SCORING, reason="no C extension with vectors")
@every_pair(
    dims=[(192, 128), (48, 32), (512, 512), (8, 24)],
    dtype=[torch.float32, torch.bfloat16],
    joined=[False, True],
)
def test_unequal_widths_do_not_fall_back_to_torch(dims, dtype, joined):
    if dims == (8, 24) and not joined:
        pytest.skip("chunks of such keys are left to torch")
    lanes = Lanes(
        tokens=[1, 40],
        slots=[[50], [133]],
        heads=2,
        head_dim=dims[0],
        value_dim=dims[1],
        page_tokens=16,
        dtype=dtype,
    )
    reasons = []
    backend = NativeAttention(LIBRARY, Recording(reasons))
    query, math = lanes.query(8, joined=joined), AttentionMath(scale=0.1, joined=joined)
    out, _ = lanes.attend_with_sums(backend, query, math)

    assert out.shape == (41, 16, dims[1])
    assert not reasons


@any_native
def test_plan_is_prepared_again_for_another_dtype(backend):
    """Later layers of one plan may have tensors of another dtype than the first."""
    shape = {
        "tokens": [1, 20],
        "slots": [[50], [33]],
        "heads": 1,
        "head_dim": 32,
        "page_tokens": 16,
    }
    full = Lanes(**shape, dtype=torch.float32)
    half = Lanes(**shape, dtype=torch.bfloat16)
    math = AttentionMath(scale=0.2)
    plan = backend.plan(StepShape.of(full.tokens), LaneSlots(full.slots, None), 16, 256)
    for lanes in (full, half, full):
        query = lanes.query(2)
        got = backend.attend(plan, lanes.pages, math, query, lanes.fresh())
        assert torch.equal(got, lanes.attend(backend, query, math))


@any_native
def test_too_small_column_sums_are_refused(backend):
    lanes = Lanes(
        tokens=[1], slots=[[50]], heads=1, head_dim=32, page_tokens=16, dtype=torch.float32
    )
    sums = torch.zeros(1, 2, 49)
    with pytest.raises(InvariantError, match="column sums"):
        lanes.attend(backend, lanes.query(2), AttentionMath(scale=0.2), column_sums=sums)


@any_native
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 64), (2, 32)])
def test_keys_that_do_not_fit_the_pages_are_refused(backend, heads, head_dim):
    """Half of the heads or half of each vector: C would read out of bounds; torch raises."""
    arena = torch.zeros(4, 2, 2, 16, 64)
    indices = torch.zeros(3, 1, dtype=torch.int64)
    fresh = torch.ones(3, heads, head_dim)
    with pytest.raises((RuntimeError, IndexError)):
        backend.write(NewSlots(arena[:, 0], arena[:, 1], indices, indices), fresh, fresh)


class Recording(GatheredAttention):
    """Records calls and returns the query: it need not support the tensors."""

    def __init__(self, notes):
        super().__init__(CPU)
        self._notes = notes

    def attend(self, plan, pages, math, query, fresh, *, column_sums=None):
        self._notes.append("attended")
        return query


def unaligned(plane):
    """A plane of the same shape, one byte off its alignment."""
    num_bytes = plane.untyped_storage().nbytes()
    raw = np.zeros(num_bytes + 4, dtype=np.uint8)[1 : 1 + num_bytes]
    return torch.from_numpy(raw.view(np.float32)).as_strided(plane.shape, plane.stride())


any_scoring = pytest.mark.parametrize("backend", SCORING.values(), ids=SCORING)
FINISHING = SCORING | ({"triton": triton_backend()} if why_no_triton(CPU) is None else {})
any_finishing = pytest.mark.parametrize("backend", FINISHING.values(), ids=FINISHING)


def scored_lanes(codec, shape, window, group, seed=0):
    """Cached tokens in pages of a codec; shape: KV heads of a page, dims and page tokens."""
    heads, head_dim, page_tokens = shape
    head_dim, value_dim = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    plain = codec in ("float32", "bfloat16", "float16")
    lanes = Lanes(
        tokens=[1] * 3,
        slots=[[70, 1], [150, 33], [16, 17]],
        heads=heads,
        head_dim=head_dim,
        value_dim=value_dim,
        page_tokens=page_tokens,
        dtype=getattr(torch, codec) if plain else torch.float32,
        seed=seed,
    )
    pages = None if plain else coded_twin(lanes, codec)
    return ScoredLanes(lanes, QueryRing(window), group, pages, seed=seed)


@any_scoring
@every_pair(
    codec=["float32", "bfloat16", "float16", "int8", "int4", "fp8", "int4_outliers"],
    shape=[(1, 64, 16), (2, (16, 32), 4), (3, 80, 5), (1, (192, 128), 1), (1, 256, 32)],
    window=[1, 4, 32, 160],
    group=[1, 3, 7],
)
def test_scores_of_cached_tokens_equal_those_of_their_keys(backend, codec, shape, window, group):
    cached = scored_lanes(codec, shape, window, group)
    expected, view = cached.view(), cached.view(backend)
    sums = column_sums(view, cached.ring)

    torch.testing.assert_close(sums, column_sums(expected, cached.ring), atol=2e-5, rtol=2e-5)
    for rule in (KeyDiff(), KNorm()):
        torch.testing.assert_close(rule.score(view), rule.score(expected), atol=2e-6, rtol=2e-5)
    norms = view.in_pages(VALUE).norms()
    torch.testing.assert_close(norms, cached.values().norm(dim=2), atol=1e-6, rtol=1e-5)


@any_finishing
@every_pair(
    shape=[(1, (16, 32), 16), (2, 64, 4)],
    window=[1, 4, 20, 160],
    kernel=[1, 3, 5],
    pooling=POOLINGS,
    heads=REDUCTIONS,
    group=[1, 3],
)
def test_windows_scores_equal_those_of_the_keys(
    backend, shape, window, kernel, pooling, heads, group
):
    """Some lanes have fewer slots than the window, or than are pooled."""
    rule = SnapKV(window=window, kernel=kernel, pooling=pooling, heads=heads)
    cached = scored_lanes("float32", shape, window, group)
    expected, view = cached.view(), cached.view(backend)
    score = rule.score(view)

    wanted = rule.score(expected).where(view.live, 0.0)
    torch.testing.assert_close(score, wanted, atol=2e-5, rtol=2e-5)


@any_finishing
@pytest.mark.parametrize("rule", [SnapKV(window=4), TOVA()])
def test_lanes_without_a_query_break_the_contract(backend, rule):
    cached = scored_lanes("float32", (1, 16, 16), rule.statistics[0].window, 1)
    view = cached.view(backend)
    view.statistic(cached.ring)[2, :, -1] = 0

    with pytest.raises(PolicyError, match="no query was recorded"):
        rule.score(view)
    on_device = rule.score(replace(view, breaches=[]))  # kernels that select slots report it
    assert on_device[2][view.live[2]].isnan().all()
    assert on_device[[0, 1, 3, 4, 5]].isfinite().all()


@any_scoring
def test_queries_with_more_digits_than_the_pages_are_not_rounded(backend):
    cached = scored_lanes("bfloat16", (2, 64, 16), 8, 3)
    cached.view().statistic(cached.ring)[:, :, :-1] += 1e-3
    sums = column_sums(cached.view(backend), cached.ring)

    expected = column_sums(cached.view(), cached.ring)
    torch.testing.assert_close(sums, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.skipif(not SCORING, reason="no C extension with vectors")
@pytest.mark.parametrize(
    "rule", [SnapKV(window=4), SnapKV(window=4, kernel=1, heads="max"), TOVA(), KeyDiff(), KNorm()]
)
def test_retained_tokens_equal_those_of_the_keys_in_300_cases(rule):
    """Only tokens whose scores differ by less than the rounding may be exchanged."""
    backend, [*_, ring] = list(SCORING.values())[-1], [QueryRing(1), *rule.statistics]
    rng = np.random.default_rng(0)
    for seed in range(300):
        lanes = Lanes(
            tokens=[1] * 3,
            slots=rng.integers(6, 60, (3, 2)).tolist(),
            heads=int(rng.integers(1, 3)),
            head_dim=int(rng.choice([16, 64, 80])),
            page_tokens=int(rng.choice([1, 4, 16])),
            dtype=[torch.float32, torch.bfloat16, torch.float16][seed % 3],
            seed=seed,
        )
        cached = ScoredLanes(lanes, ring, int(rng.choice([1, 3])), seed=seed, spread=2.0)
        view, expected = cached.view(backend), cached.view()
        keep = (view.num_slots[:, 0] * 2 // 3).clamp_min(rule.min_cap)
        retained, wanted = rule.select(view, keep), rule.select(expected, keep)
        score = rule.score(expected)
        for lane in (retained != wanted).any(dim=1).nonzero()[:, 0].tolist():
            near = score[lane][retained[lane] != wanted[lane]]
            assert near.max() - near.min() <= 1e-5 * max(1.0, float(score[lane].abs().max()))
