"""Every backend equals the reference, with and without column sums and NaN in free slots."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from quire.errors import InvariantError, PolicyError
from quire.kernels.backend import Alibi, AttentionMath, LaneSlots, LayerPages, NewSlots, StepShape
from quire.kernels.gathered import GatheredAttention
from quire.kernels.latent import LatentHeads
from quire.kernels.native import library
from quire.kernels.native.arguments import why_not
from quire.kernels.native.backend import NativeAttention
from quire.kernels.native.library import NativeLibrary, load_library
from quire.kernels.triton.hardware import why_no_triton
from quire.layout.codec_names import codec_pair, codec_spec
from quire.layout.pages import VALUE
from quire.layout.statistics import REDUCTIONS, QueryRing
from quire.policies.keydiff import KeyDiff
from quire.policies.knorm import KNorm
from quire.policies.snapkv import SnapKV
from quire.policies.tova import TOVA
from quire.policies.windows import POOLINGS, column_sums
from quire.scheduler.schedule_config import INVARIANT_ROWS
from support.coded_lanes import coded_twin
from support.interpreted import CPU, Refusing, triton_backend
from support.lanes import Lanes, ScoredLanes, num_threads
from support.pairwise import every_pair

LIBRARY = load_library()
PATHS = range(LIBRARY.best_path + 1) if isinstance(LIBRARY, NativeLibrary) else ()
PATH_NAMES = library.PATHS[: len(PATHS)]
needs_native = pytest.mark.skipif(not PATHS, reason="the C extension is not built")


def native(path, gathered=None, **options):
    gathered = gathered or GatheredAttention(CPU)
    return NativeAttention(replace(LIBRARY, path=path), gathered, **options)


NATIVE = {f"native, {name}": native(path) for path, name in zip(PATHS, PATH_NAMES, strict=True)}
BACKENDS = {"gathered": GatheredAttention(CPU, scratch_bytes=4096)} | NATIVE
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
    dims = draw(st.sampled_from(DIMS))
    return Lanes(
        tokens,
        slots,
        dims,
        heads=draw(st.sampled_from([1, 3, 8])),
        page_tokens=draw(st.sampled_from([1, 3, 16, 20, 32])),
        dtype=dtype,
        window=window,
        seed=draw(st.integers(0, 1000)),
        evicted=window is None and draw(st.booleans()),
    )


def alibi_of(kind, query):
    """Slopes of each query head."""
    slopes = torch.linspace(0.7, 0.02, query.shape[1]).bfloat16().float()
    return Alibi(slopes, 0.7, rounded=kind == "rounded") if kind else None


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
    got = lanes.check(backend, query, math)
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
    got = lanes.check(backend, query, math, out=(2e-2, 2e-2), sums=(2e-3, 2e-2), scaled=True)
    assert torch.equal(lanes.attend(backend, query, math), got)


@any_backend
@every_pair(
    dtype=[torch.bfloat16, torch.float16],
    dims=[(dim, dim) for dim in (64, 80, 96, 128, 256, 512)] + UNEQUAL,
    tokens=[[1, 1, 1], [40, 17, 100]],
)
def test_half_precision_stays_near_the_float32_reference(backend, dtype, dims, tokens):
    """The reference computes in float32 on the same stored values."""
    lanes = Lanes(tokens, [[300], [17], [128]], dims, heads=2, dtype=dtype)
    math = AttentionMath(scale=dims[0] ** -0.5)
    lanes.check(backend, lanes.query(4), math, out=(2e-2, 0), sums=(2e-3, 2e-2), scaled=True)


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
        tokens, [[2300], [77], [300]], dims, dtype=dtype, window=window, evicted=window is None
    )
    query = lanes.query(group, joined=True)
    sinks = torch.linspace(-2, 2, query.shape[1])
    math = AttentionMath(query.shape[2] ** -0.5, sinks=sinks, joined=True)
    is_half = dtype != torch.float32
    out, sums = ((2e-2, 2e-2), (2e-3, 2e-2)) if is_half else ((1e-5, 1e-4), (1e-5, 1e-4))
    lanes.check(backend, query, math, out=out, sums=sums, scaled=is_half)


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
    lanes = Lanes(tokens, [[70], [333], [70]], (16, 40), dtype=dtype, window=window)
    weight = torch.randn(6, 32 + value_dim, 40, generator=lanes.generator) / 6

    def expand(value, rotated):
        heads = (value.float() @ weight.transpose(1, 2)).to(value.dtype)
        return torch.cat([heads[..., :32], rotated.expand_as(heads[..., :16])], -1), heads[..., 32:]

    latent = LatentHeads(lambda: weight.flatten(0, 1), 6, 32, expand)
    query = torch.randn(sum(tokens), 6, 48, generator=lanes.generator).to(dtype)
    math = AttentionMath(scale=48**-0.5, sinks=torch.linspace(-2, 2, 6), latent=latent)
    near = (1e-5, 1e-4) if dtype == torch.float32 else (2e-2, 2e-2)
    lanes.check(backend, query, math, out=near, sums=near)


@any_native
@pytest.mark.parametrize("slots", [1100, 4096, 4097, 8200, 9000])
def test_long_rows_are_split_and_merged(backend, slots):
    lanes = Lanes([1, 1], [[slots, max(slots - 4090, 6)], [5, 3]], 16)
    math = AttentionMath(scale=0.25, sinks=torch.linspace(-2, 6, 18))
    lanes.check(backend, lanes.query(9), math, sums=(1e-6, 1e-4))


@any_native
@pytest.mark.parametrize("slots", [11901, 11902])
def test_column_sums_in_one_block_or_recomputed(backend, slots):
    """17 query vectors: (17 + 5) x (11,900 + 15) logits are below 2 ** 18, one slot more above."""
    lanes = Lanes([17, 40], [[slots - 1], [300]], 16)
    lanes.check(backend, lanes.query(1), AttentionMath(scale=0.25), sums=(1e-6, 1e-4))


@any_native
def test_attention_with_table_row_and_lane_offsets(backend):
    """Step rows map to any table rows, and layer lanes to any lanes of the group."""
    lanes = Lanes([1, 20], [[50, 40], [33, 33]], 32)
    query, math = lanes.query(2), AttentionMath(scale=0.2)
    expected = lanes.attend(backend, query, math)
    _, count, columns = lanes.table.shape
    large = torch.full((7, count + 3, columns), -1, dtype=torch.int32)
    large[torch.tensor([5, 2]), 2 : 2 + count] = lanes.table
    lanes.table = large[torch.tensor([5, 2]), 2 : 2 + count]
    lanes.pages = replace(lanes.pages, table=large, rows=torch.tensor([5, 2]), first_lane=2)

    assert torch.equal(lanes.attend(backend, query, math), expected)


@needs_native
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda pages: {"key": pages.key.double()}, "pages of torch.float64"),
        (lambda pages: {"table": pages.table.long()}, "page table of torch.int64"),
        (lambda pages: {"key": pages.key.transpose(2, 3).clone().transpose(2, 3)}, "strides"),
        (lambda pages: {"key": unaligned(pages.key)}, "not aligned to their item size"),
    ],
)
def test_unsupported_tensors_fall_back_to_torch_with_one_warning(change, reason, caplog):
    lanes, reasons = Lanes([1, 20], [[50], [33]], 32), []
    query, math = lanes.query(2), AttentionMath(scale=0.2)
    assert lanes.attend(native(LIBRARY.path), query, math).isfinite().all()
    assert not caplog.records
    lanes.pages = replace(lanes.pages, **change(lanes.pages))
    backend = NativeAttention(LIBRARY, Recording(reasons))
    for _ in range(2):
        lanes.attend(backend, query, math)

    assert reasons == ["attended", "attended"]
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
    lanes = Lanes([1, 40], [[50], [133]], dims, heads=2, dtype=dtype)
    query, math = lanes.query(8, joined=joined), AttentionMath(scale=0.1, joined=joined)
    out, _ = lanes.attend_with_sums(native(LIBRARY.path, Refusing()), query, math)

    assert out.shape == (41, 16, dims[1])


@any_native
def test_plan_is_prepared_again_for_another_dtype(backend):
    """Later layers of one plan may have tensors of another dtype than the first."""
    full, half = (
        Lanes([1, 20], [[50], [33]], 32, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    math = AttentionMath(scale=0.2)
    plan = backend.plan(StepShape.of(full.tokens), LaneSlots(full.slots, None), 16, 256)
    for lanes in (full, half, full):
        query = lanes.query(2)
        got = backend.attend(plan, lanes.pages, math, query, lanes.fresh())
        assert torch.equal(got, lanes.attend(backend, query, math))


@any_native
def test_too_small_column_sums_and_keys_that_do_not_fit_the_pages_are_refused(backend):
    """Half of the heads or half of each vector: C would read out of bounds; torch raises."""
    lanes, sums = Lanes([1], [[50]], 32), torch.zeros(1, 2, 49)
    with pytest.raises(InvariantError, match="column sums"):
        lanes.attend(backend, lanes.query(2), AttentionMath(scale=0.2), column_sums=sums)
    arena, indices = torch.zeros(4, 2, 2, 16, 64), torch.zeros(3, 1, dtype=torch.int64)
    for fresh in (torch.ones(3, 1, 64), torch.ones(3, 2, 32)):
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
    heads, dims, page_tokens = shape
    plain = codec in ("float32", "bfloat16", "float16")
    own = {"heads": heads, "page_tokens": page_tokens, "seed": seed}
    dtype = getattr(torch, codec) if plain else torch.float32
    lanes = Lanes([1] * 3, [[70, 1], [150, 33], [16, 17]], dims, dtype=dtype, **own)
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
        slots, dim, tokens = rng.integers(6, 60, (3, 2)), rng.choice([16, 64, 80]), [1, 4, 16]
        shape = {"heads": int(rng.integers(1, 3)), "page_tokens": int(rng.choice(tokens))}
        dtype = [torch.float32, torch.bfloat16, torch.float16][seed % 3]
        lanes = Lanes([1] * 3, slots.tolist(), int(dim), **shape, dtype=dtype, seed=seed)
        cached = ScoredLanes(lanes, ring, int(rng.choice([1, 3])), seed=seed, spread=2.0)
        view, expected = cached.view(backend), cached.view()
        keep = (view.num_slots[:, 0] * 2 // 3).clamp_min(rule.min_cap)
        retained, wanted = rule.select(view, keep), rule.select(expected, keep)
        score = rule.score(expected)
        for lane in (retained != wanted).any(dim=1).nonzero()[:, 0].tolist():
            near = score[lane][retained[lane] != wanted[lane]]
            assert near.max() - near.min() <= 1e-5 * max(1.0, float(score[lane].abs().max()))


CODECS = ["int8", "int4:group=8", "int4:group=32/int8", "int8/int4:group=16", "fp8"]
CODECS += ["int4_outliers:percent=3", "int2/int4_outliers:group=32", "float32/int4", "int8/float32"]


def fits(codec, dims):
    pairs = list(zip(codec_pair(codec), dims, strict=True))
    if any(dim % (spec.group or 1) or dim % 4 for spec, dim in pairs):
        return False
    return all(why_not(spec, dim) is None for spec, dim in pairs)


CODED_UNEQUAL = [(48, 32), (192, 128), (32, 64), (64, 192), (128, 256), (128, 8), (8, 64)]
EQUAL = [(dim, dim) for dim in (8, 20, 32, 64, 80, 96, 128, 256, 512)]
ALL_DIMS = EQUAL + CODED_UNEQUAL
CODED_DIMS = {codec: [dims for dims in ALL_DIMS if fits(codec, dims)] for codec in CODECS}
"""Elements of keys and values that a codec can store."""


@st.composite
def coded_cases(draw):
    """Lanes, and codecs that can store their vectors."""
    chunks = st.lists(st.sampled_from([2, 5, 17, 40]), max_size=1)
    tokens = [1] * draw(st.sampled_from([0, 1, 3])) + draw(chunks) or [1]
    window = draw(st.sampled_from([None, None, 9, 70]))
    before = st.one_of(st.integers(0, 90), st.integers(120, 260))
    count = draw(st.sampled_from([1, 2]))
    slots = [[draw(before) + new for _ in range(count)] for new in tokens]
    codec = draw(st.sampled_from(CODECS))
    dims = draw(st.sampled_from(CODED_DIMS[codec]))
    lanes = Lanes(
        tokens,
        slots if window is None else [row[:1] * count for row in slots],
        dims,
        heads=draw(st.sampled_from([1, 2, 4])),
        page_tokens=draw(st.sampled_from([1, 3, 16, 20, 32])),
        window=window,
        seed=draw(st.integers(0, 1000)),
    )
    return lanes, codec


@pytest.mark.parametrize("path", PATHS, ids=PATH_NAMES)
@given(
    case=coded_cases(),
    group=st.sampled_from([1, 2, 3, 4, 7, 9]),
    softcap=st.sampled_from([None, 2.0]),
    with_sinks=st.booleans(),
    rounded=st.sampled_from([None, False, True]),
    joined=st.booleans(),
)
def test_attention_over_codes_equals_attention_over_decoded_vectors(
    path, case, group, softcap, with_sinks, rounded, joined
):
    lanes, codec = case
    query = lanes.query(group, joined=joined)
    pages = coded_twin(lanes, codec)
    sinks = torch.linspace(-2, 2, query.shape[1]) if with_sinks else None
    slopes = torch.linspace(0.02, 0.7, query.shape[1])
    alibi = None if rounded is None else Alibi(slopes, 0.7, rounded)
    math = AttentionMath(query.shape[2] ** -0.5, softcap, sinks, alibi=alibi, joined=joined)
    lanes.check(native(path), query, math, pages=pages)


@needs_native
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("tokens", [[1, 1, 1], [40]])
@pytest.mark.parametrize("value_dim", [32, 64])
def test_c_attention_over_codes_does_not_fall_back_to_torch(codec, tokens, value_dim):
    if LIBRARY.path == 0 and tokens != [1, 1, 1]:
        pytest.skip("chunks are left to torch without vector instructions")
    lanes = Lanes(tokens, [[70]] * len(tokens), (64, value_dim), heads=2)
    query, pages = lanes.query(4), coded_twin(lanes, codec)
    backend = native(LIBRARY.path, Refusing())
    lanes.check(backend, query, AttentionMath(scale=0.125), pages=pages)


@every_pair(
    codec=["int8", "int4", "int8/bfloat16"],
    tokens=[[1, 1], [40, 33]],
    dims=[(128, 128), (192, 128), (48, 64)],
)
def test_attention_over_codes_with_half_precision_queries(codec, tokens, dims):
    lanes = Lanes(tokens, [[300], [77]], dims, heads=2)
    query, math = lanes.query(4).bfloat16(), AttentionMath(scale=dims[0] ** -0.5)
    near = {"out": (1e-4, 2**-8), "sums": (1e-5, 1e-3)}
    pages = coded_twin(lanes, codec)
    lanes.check(native(LIBRARY.path, Refusing()), query, math, **near, pages=pages)


@every_pair(
    path=[path for path in PATHS if path],
    codec=["bfloat16/int8", "int8", "bfloat16/int4", "int4/fp8"],
    tokens=[[1, 1], [5, 33]],
    dims=[(64, 512), (32, 96), (8, 24)],
    group=[4, 20, 64],
)
def test_half_precision_queries_attend_to_latents_in_codes(path, codec, tokens, dims, group):
    """Codes of int8 are rounded to bfloat16 if the CPU has products of it."""
    lanes = Lanes(tokens, [[2300], [77]], dims)
    query = lanes.query(group, joined=True).bfloat16()
    pages, math = coded_twin(lanes, codec), AttentionMath(sum(dims) ** -0.5, joined=True)
    near = {"out": (2e-2, 2**-8), "sums": (2e-3, 2e-2), "scaled": True}
    lanes.check(native(path, Refusing()), query, math, **near, pages=pages)


@pytest.mark.parametrize("path", PATHS, ids=PATH_NAMES)
@given(
    case=coded_cases(),
    group=st.sampled_from([1, 2, 3, 4, 7, 9]),
    softcap=st.sampled_from([None, 2.0]),
    sharpness=st.sampled_from([0.01, 1.0, 8.0]),
)
def test_decoding_over_codes_with_half_precision_queries(path, case, group, softcap, sharpness):
    """Products may be computed in integers: column sums are exact, outputs are rounded."""
    lanes, codec = case
    assume(lanes.tokens.max() == 1)
    query = (lanes.query(group) * sharpness).bfloat16()
    pages = coded_twin(lanes, codec)
    math = AttentionMath(scale=query.shape[2] ** -0.5, softcap=softcap)
    # an output near 0 whose terms cancel has the rounding error of its terms; queries are
    # rounded to 16-bit integers: the error of a logit grows with the queries
    near = {"out": (4e-4, 2**-8), "sums": (2e-5, 1e-4 * max(1.0, sharpness))}
    lanes.check(native(path), query, math, **near, pages=pages)


@every_pair(
    path=PATHS,
    dims=[(64, 64), (128, 128), (192, 128), (192, 192), (256, 256), (64, 192), (128, 8), (8, 64)],
    codec=[
        "int8",
        "int4",
        "int2",
        "int8/int2",
        "int4:group=128",
        "int2:group=128/int8",
        "fp8/int4",
    ],
)
def test_decoding_over_codes_whose_scales_cover_whole_blocks(path, codec, dims):
    """Products of bytes read blocks of 64 channels of four or sixteen slots."""
    if not fits(codec, dims):
        pytest.skip(f"{codec} has no scales for keys and values of {dims}")
    shapes = (1, 16, 4), (2, 1, 1), (3, 16, 4), (4, 32, 2), (7, 5, 1), (8, 16, 8)
    for group, page_tokens, heads in shapes:
        lanes = Lanes([1, 1], [[203], [64]], dims, heads=heads, page_tokens=page_tokens, seed=group)
        query, pages = lanes.query(group).bfloat16(), coded_twin(lanes, codec)
        math = AttentionMath(scale=dims[0] ** -0.5)
        near = {"out": (4e-4, 2**-8), "sums": (2e-5, 1e-4)}
        lanes.check(native(path), query, math, **near, pages=pages)


@pytest.mark.parametrize("path", PATHS, ids=PATH_NAMES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_non_finite_query_gives_a_non_finite_output_in_its_head_only(path, value):
    lanes = Lanes([1], [[70]], 64)
    query = lanes.query(2).bfloat16()
    query[0, 1, 5] = value
    coded = lanes.in_codes(coded_twin(lanes, "int8"))
    got = coded.attend(native(path), query, AttentionMath(scale=0.125))

    assert got[0, 0].isfinite().all()
    assert not got[0, 1].isfinite().any()


@pytest.mark.parametrize("joined", [False, True])
@any_native
def test_output_of_a_row_is_batch_invariant(backend, joined):
    assert_batch_invariant(backend, "bfloat16", [1, 1, 600], heads=2, joined=joined)


@needs_native
@pytest.mark.parametrize("codec", ["int8", "int4", "int4_outliers"])
def test_output_of_a_row_of_codes_is_batch_invariant(codec):
    assert_batch_invariant(native(LIBRARY.path), codec, [1, 1, 60], heads=4)


def assert_batch_invariant(backend, codec, tokens, *, heads, joined=False):
    """Its output is bitwise independent of the other rows and of the number of threads."""
    coded, slots = codec != "bfloat16", [[9000], [1200], [700]]
    shape = {"heads": heads, "dtype": torch.float32 if coded else torch.bfloat16}
    lanes = Lanes(tokens, slots, 64, **shape)
    query, math = lanes.query(2, joined=joined), AttentionMath(scale=0.125, joined=joined)
    pages = coded_twin(lanes, codec) if coded else lanes.pages
    lanes = lanes.in_codes(pages) if coded else lanes
    together = lanes.attend(backend, query, math)
    for count in (1, 3):
        with num_threads(count):
            assert torch.equal(lanes.attend(backend, query, math), together)
    for row, new in enumerate(tokens):
        alone = Lanes(tokens[row : row + 1], slots[row : row + 1], 64, **shape)
        alone.table = lanes.table[row : row + 1]
        alone.pages = replace(pages, rows=torch.tensor([row]))
        alone = alone.in_codes(alone.pages) if coded else alone
        part = slice(row, row + new)
        assert torch.equal(alone.attend(backend, query[part], math), together[part])


REASONS = [
    (codec_spec("int3"), 64, "does not read int3"),
    (codec_spec("int8_channel"), 64, "does not read int8_channel"),
    (replace(codec_spec("int4"), constants=("equal",)), 128, "does not read int4"),
    (codec_spec("int4:group=8"), 256, "it reads at most 16 groups of a vector"),
    (codec_spec("int4_outliers:percent=10"), 128, "at most 8 outliers"),
    (codec_spec("int4"), 128, "None"),
    (codec_spec("bfloat16"), 128, "None"),
]


def test_reasons_why_codecs_are_not_read():
    for spec, head_dim, reason in REASONS:
        assert reason in str(why_not(spec, head_dim))


HEADS, KV_HEADS, DIM, PAGE = 6, 2, 32, 16


def pages_of(rows, dtype):
    """Filled pages; the pages of a row are consecutive."""
    key, value = (torch.randn(rows * 8, KV_HEADS, PAGE, DIM).to(dtype) for _ in range(2))
    table = torch.arange(rows * 8, dtype=torch.int32).view(rows, 1, 8)
    return LayerPages(key, value, table, torch.arange(rows), 0, 1)


def attend_rows(
    backend, pages, query, tokens, slots, window, softcap=None, *, joined=False, **sums
):
    """Attend rows with `tokens` new tokens in the last of `slots` slots."""
    step = StepShape.of(np.array(tokens, dtype=np.int32))
    plan = backend.plan(step, LaneSlots(np.array(slots, dtype=np.int32)[:, None], window), PAGE, 1)
    math = AttentionMath(DIM**-0.5, softcap, joined=joined)
    return backend.attend(plan, pages, math, query, (query, query), **sums)


@every_pair(
    window=[None, 20], dtype=[torch.bfloat16, torch.float32], path=PATHS, joined=[False, True]
)
def test_chunk_is_bitwise_equal_to_single_tokens(path, dtype, window, joined):
    if joined and path == 0:
        pytest.skip("joined keys are left to torch without vector instructions")
    backend, pages = native(path, fixed_rows=INVARIANT_ROWS), pages_of(2, dtype)
    query = torch.randn(60, HEADS, DIM + joined * DIM).to(dtype)
    options = {"softcap": 30.0, "joined": joined}
    whole = attend_rows(backend, pages, query, [1, 59], [77, 100], window, **options)

    for token in (0, 1, 13, 59):
        row = min(token, 1)
        alone = replace(pages, rows=torch.tensor([row]))
        slots = 77 if token == 0 else 41 + token
        single = attend_rows(
            backend, alone, query[token : token + 1], [1], [slots], window, **options
        )
        assert torch.equal(single[0], whole[token])


@pytest.mark.parametrize("path", PATHS, ids=PATH_NAMES)
def test_one_by_one_attention_is_close_to_chunked_attention(path):
    pages, query = pages_of(1, torch.float32), torch.randn(50, HEADS, DIM)
    alone, chunked = (
        attend_rows(native(path, fixed_rows=rows), pages, query, [50], [90], None)
        for rows in (INVARIANT_ROWS, None)
    )
    assert torch.allclose(alone, chunked, atol=1e-5)


@needs_native
def test_column_sums_of_one_by_one_attention_are_refused():
    backend, pages = native(LIBRARY.path, fixed_rows=INVARIANT_ROWS), pages_of(1, torch.float32)
    query, sums = torch.randn(2, HEADS, DIM), torch.zeros(2, HEADS, 16)
    with pytest.raises(InvariantError, match="token by token: column sums"):
        attend_rows(backend, pages, query, [2], [9], None, column_sums=sums)
