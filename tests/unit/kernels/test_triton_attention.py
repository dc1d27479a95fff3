"""Attention in Triton, interpreted on the CPU: pages, codes, static plans equal the reference."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.codecs.registry import make_codec
from quire.errors import InvariantError
from quire.kernels.backend import Alibi, AttentionMath, StaticLanes, StaticPlans, StepShape
from quire.kernels.coded import CodedPages, CodedPlanes
from quire.kernels.gathered import GatheredAttention
from quire.kernels.reference_backend import ReferenceAttention
from quire.kernels.triton.coding import KINDS, PLAIN, why_not
from quire.layout.codec_names import CODECS, codec_spec
from quire.layout.pages import VALUE
from quire.layout.statistics import QueryRing
from quire.policies.keydiff import KeyDiff
from quire.policies.knorm import KNorm
from quire.policies.windows import column_sums
from support.coded_lanes import coded_twin
from support.interpreted import CPU, interpreted, triton_backend
from support.lanes import Lanes, ScoredLanes
from support.pairwise import every_pair

launch = interpreted("launch")

REFERENCE = ReferenceAttention()
HEADS = {"MHA": (2, 1), "GQA 4": (2, 4), "GQA 8": (2, 8), "MQA": (1, 8)}
"""KV heads, and query heads of each."""


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles of 16 slots, so that short rows have several."""
    monkeypatch.setattr(launch, "TILE_BYTES", 1)
    monkeypatch.setattr(launch, "SUM_BYTES", 1)


def make_lanes(dims=16, *, tokens=(1, 1, 4), slots=((21,), (5,), (19,)), heads=2, **shape):
    """Two decode rows and a chunk."""
    return Lanes(tokens, slots, dims, **{"page_tokens": 8} | shape, heads=heads)


def one_head_pages(lanes):
    """The slots of a row in each of two lanes."""
    return {"heads": 1, "slots": [[a, max(a - 2, 5)] for a in lanes]}


def math_of(query, *, softcap=None, with_sinks=False):
    sinks = torch.linspace(-2, 2, query.shape[1]) if with_sinks else None
    return AttentionMath(scale=query.shape[2] ** -0.5, softcap=softcap, sinks=sinks)


def check(lanes, group, *, backend=None, atol=2e-5, with_sums=True, **options):
    """Compare output and column sums with the reference."""
    query = lanes.query(group)
    math = math_of(query, **options)
    backend = backend or triton_backend()
    if with_sums:
        lanes.check(backend, query, math, out=(atol, 1e-5), sums=(2e-5, 1e-4))
        return
    got, expected = (lanes.attend(x, query, math) for x in (backend, REFERENCE))
    torch.testing.assert_close(got.float(), expected.float(), atol=atol, rtol=1e-5)


@every_pair(
    dims=[(16, 16), (64, 64), (80, 80), (48, 32), (32, 64)],
    heads=HEADS,
    pages=["layer pages", "one-head pages"],
)
def test_heads_equal_the_reference(heads, dims, pages):
    kv_heads, group = HEADS[heads]
    shape = {"heads": kv_heads} if pages == "layer pages" else one_head_pages([21, 5, 19])
    check(make_lanes(dims, **shape), group, with_sums=max(dims) < 50)


@every_pair(window=[None, 1, 17], softcap=[None, 2.0], with_sinks=[False, True])
def test_windows_softcaps_and_sinks_equal_the_reference(window, softcap, with_sinks):
    lanes = make_lanes((16, 40), heads=1, window=window)
    check(lanes, 2, softcap=softcap, with_sinks=with_sinks)


@pytest.mark.parametrize(
    "shape",
    [
        *({"page_tokens": n, "slots": [[41], [16], [30]]} for n in (1, 8, 20, 128)),
        *({"dims": d} for d in [(8, 8), (33, 33), (192, 128), (8, 33), (512, 512)]),
        # without earlier tokens: attention reads the pages, which hold the new keys and values
        *({"tokens": n, "slots": [[new] for new in n]} for n in ([40], [1, 18, 17])),
    ],
    ids=str,
)
def test_pages_vectors_and_chunks_of_any_length(shape):
    check(make_lanes(**shape, heads=1), 2, with_sums=shape.get("dims") in (None, (33, 33)))


@every_pair(
    dims=[(8, 16), (16, 33), (64, 512)], group=[4, 16, 20], window=[None, 7], multiprocessors=[1, 8]
)
def test_joined_keys_equal_the_reference(dims, group, window, multiprocessors):
    """Latents: the key of a slot is its value followed by its stored key; 20 heads are 2 blocks."""
    shape = {"tokens": [1, 1], "slots": [[150], [5]], "heads": 1, "window": window}
    lanes = make_lanes(dims, **shape)
    query, math = lanes.query(group, joined=True), AttentionMath(sum(dims) ** -0.5, joined=True)
    backend = triton_backend(multiprocessors=multiprocessors)
    got, expected = (lanes.attend(one, query, math) for one in (backend, REFERENCE))

    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [(64, 64), (80, 48)])
def test_half_precision_stays_near_the_reference(dtype, dims):
    """Arithmetic on bfloat16 itself is wrong in Triton 3.9's interpreter."""
    lanes = make_lanes(dims, heads=1, dtype=dtype)
    check(lanes, 4, atol=2e-2 if dtype is torch.bfloat16 else 2e-3, softcap=5.0, with_sinks=True)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_splits_of_a_row_are_merged(with_sinks, monkeypatch):
    merged, merge = [], launch.merge_decode

    def counted(call, partial, partial_lse, splits):
        merged.append(splits)
        merge(call, partial, partial_lse, splits)

    monkeypatch.setattr(launch, "merge_decode", counted)
    lanes = make_lanes((16, 24), heads=1, tokens=[1, 1], slots=[[150], [5]])
    check(lanes, 2, backend=triton_backend(multiprocessors=8), with_sinks=with_sinks)
    check(lanes, 2, backend=triton_backend(multiprocessors=1), with_sinks=with_sinks)

    assert merged == [5]  # 10 tiles of slots in splits of 2; not split without free multiprocessors


@settings(max_examples=6)
@given(
    tokens=st.lists(st.sampled_from([1, 2, 7, 20]), min_size=1, max_size=3),
    before=st.lists(st.integers(0, 40), min_size=3, max_size=3),
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3, 5]),
    window=st.sampled_from([None, 5, 33]),
    page_tokens=st.sampled_from([3, 16, 32]),
    softcap=st.sampled_from([None, 3.0]),
)
def test_steps_equal_the_reference(tokens, before, kv_heads, group, window, page_tokens, softcap):
    tokens = sorted(tokens)
    slots = [[new + old] for new, old in zip(tokens, before, strict=False)]
    shape = {"heads": kv_heads, "window": window, "page_tokens": page_tokens}
    check(make_lanes(tokens=tokens, slots=slots, **shape), group, softcap=softcap)


def test_attention_with_table_row_and_lane_offsets_and_strided_queries():
    """Step rows map to any table rows, and layer lanes to any lanes of the group."""
    lanes = make_lanes(**one_head_pages([21, 5, 19]))
    query = lanes.query(2)
    expected = lanes.attend(triton_backend(), query, math_of(query))
    _, count, columns = lanes.table.shape
    large, own = torch.full((7, count + 3, columns), -1, dtype=torch.int32), torch.tensor([5, 2, 0])
    large[own, 2 : 2 + count] = lanes.table
    lanes.table = large[own, 2 : 2 + count]
    lanes.pages = replace(lanes.pages, table=large, rows=own, first_lane=2)
    strided = query.transpose(0, 1).contiguous().transpose(0, 1)

    assert torch.equal(lanes.attend(triton_backend(), query, math_of(query)), expected)
    assert torch.equal(lanes.attend(triton_backend(), strided, math_of(query)), expected)


def test_column_sums_overwrite_all_live_slots_of_decode_rows_or_are_refused():
    """Slots before the window too: the memory holds sums of another layer."""
    lanes = make_lanes(heads=1, tokens=[1], slots=[[40]], window=10)
    query, sums = lanes.query(2), torch.full((1, 2, 44), 7.0)
    lanes.attend(triton_backend(), query, math_of(query), column_sums=sums)

    assert torch.equal(sums[:, :, :30], torch.zeros(1, 2, 30))
    torch.testing.assert_close(sums[:, :, :40].sum(dim=2), torch.ones(1, 2))
    assert torch.equal(sums[:, :, 40:], torch.full((1, 2, 4), 7.0))
    lanes, sums = make_lanes(), torch.zeros(3, 4, 20)
    with pytest.raises(InvariantError, match=r"column sums of shape \(3, 4, 21\)"):
        lanes.attend(triton_backend(), lanes.query(2), AttentionMath(scale=1.0), column_sums=sums)


@pytest.mark.parametrize(
    ("change", "alibi", "reason"),
    [
        (lambda pages: {"table": pages.table.long()}, False, "page table of torch.int64"),
        (lambda pages: {"key": pages.key.mT.clone().mT}, False, "pages with strides"),
        (lambda pages: {}, True, "the kernels add no ALiBi"),
    ],
)
def test_unsupported_tensors_fall_back_with_one_warning(change, alibi, reason, caplog):
    lanes = make_lanes()
    query, backend = lanes.query(2), triton_backend(GatheredAttention(CPU))
    slopes = Alibi(torch.linspace(0.1, 0.5, query.shape[1]))
    math = replace(math_of(query), alibi=slopes if alibi else None)
    expected = lanes.attend(REFERENCE, query, math)
    lanes.pages = replace(lanes.pages, **change(lanes.pages))
    for _ in range(2):
        got = lanes.attend(backend, query, math)

    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert len(caplog.records) == 1
    assert reason in caplog.text


def test_latents_of_several_tokens_and_column_sums_fall_back_to_gathered_pages(caplog):
    math = AttentionMath(0.2, joined=True)
    for lanes, reason in (
        (make_lanes(heads=1), "several tokens of a row that attend to latents"),
        (make_lanes(heads=1, tokens=[1], slots=[[21]]), "column sums of attention to latents"),
    ):
        query = lanes.query(4, joined=True)
        near = {"out": (2e-5, 1e-4), "sums": (2e-5, 1e-4)}
        lanes.check(triton_backend(GatheredAttention(CPU)), query, math, **near)
        assert reason in caplog.text


MOST, GROUP, SLOT_BYTES = 96, 2, 128
STEPS = ([90, 7, 33], [91, 8, 1], [16, 17, 96])
"""Live slots of three rows, one step after another."""


def lanes_of(slots, window=None, **shape):
    """Three decode rows whose page tables have columns for all slots."""
    return make_lanes(tokens=[1, 1, 1], slots=slots, window=window, **shape)


def static_plan(backend, lanes, slots):
    """A plan that reads live slots from a tensor."""
    static = StaticLanes(slots, MOST, lanes.window)
    return backend.static_plan(StepShape.of(lanes.tokens), static, [lanes.pages], SLOT_BYTES)


@every_pair(window=[None, 20], by_head=[False, True], multiprocessors=[1, 16])
def test_one_plan_equals_the_reference_as_slots_change(window, by_head, multiprocessors):
    backend = triton_backend(multiprocessors=multiprocessors)
    slots = torch.ones((3, 2 if by_head else 1), dtype=torch.int32)
    plan = None
    for number, live in enumerate(STEPS):
        shape = one_head_pages(live) if by_head else {"slots": [[n] for n in live]}
        lanes = lanes_of(shape.pop("slots"), window, seed=number, **shape)
        query = lanes.query(GROUP)
        plan = plan or static_plan(backend, lanes, slots)
        slots.copy_(torch.from_numpy(lanes.slots))

        assert backend.refresh(plan, lanes.slots)
        got = backend.attend(plan, lanes.pages, math_of(query), query, lanes.fresh())

        expected = lanes.attend(ReferenceAttention(), query, math_of(query))
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)


def test_more_slots_than_planned_and_a_step_without_a_kernel_are_refused():
    backend, lanes = triton_backend(GatheredAttention(CPU)), lanes_of([[5], [5], [5]])
    plan = static_plan(backend, lanes, torch.full((3, 1), 5, dtype=torch.int32))
    assert isinstance(backend, StaticPlans)
    assert backend.refresh(plan, np.full((3, 1), MOST, dtype=np.int32))
    assert not backend.refresh(plan, np.full((3, 1), MOST + 1, dtype=np.int32))
    query = lanes.query(GROUP).double()
    with pytest.raises(RuntimeError, match="the Triton kernels cannot compute this step"):
        backend.attend(plan, lanes.pages, math_of(query), query, lanes.fresh())


def test_pages_without_a_kernel_have_no_static_plan_and_fall_back():
    lanes = lanes_of([[5], [5], [5]], dtype=torch.float64)
    backend, query = triton_backend(GatheredAttention(CPU)), lanes.query(2)
    assert static_plan(backend, lanes, torch.ones((3, 1), dtype=torch.int32)) is None
    got = lanes.attend(backend, query, math_of(query))
    assert torch.equal(got, lanes.attend(GatheredAttention(CPU), query, math_of(query)))


DECODED = [name for name in KINDS if KINDS[name] != PLAIN and not CODECS[name].constants]
PAIRS = ["int8/int4:group=16", "float32/int2", "int4_hadamard/fp8", "int8/float32"]
NEAR = {"out": (2e-5, 1e-5), "sums": (2e-5, 1e-4)}
SHAPES = {  # KV heads of a page, pages of a row, query heads of a KV head, dims of keys and values
    "MHA": (2, 1, 1, (64, 32)),
    "GQA 4, one-head pages": (1, 2, 4, (16, 16)),
    "GQA 8": (2, 1, 8, (80, 80)),
    "MQA": (1, 1, 8, (16, 64)),
}


def two_rows(dims=16, count=1, **shape):
    """A decode row and a chunk."""
    slots = [[21] * count, [11] * count]
    return Lanes(**{"tokens": [1, 4], "slots": slots, "page_tokens": 8} | shape, dims=dims)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("codec", [*DECODED, *PAIRS])
def test_codes_equal_decoded_vectors(codec, shape):
    heads, count, group, dims = SHAPES[shape]
    lanes = two_rows(dims, count, heads=heads, window=None if group == 1 else 15)
    query, pages = lanes.query(group), coded_twin(lanes, codec)
    sinks = torch.linspace(-2, 2, query.shape[1])
    math = AttentionMath(scale=dims[0] ** -0.5, softcap=2.0, sinks=sinks)
    if group == 8:  # the sums of a chunk take most of the time
        got = lanes.in_codes(pages).attend(triton_backend(), query, math)
        expected = lanes.attend(REFERENCE, query, math)
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
    else:
        lanes.check(triton_backend(), query, math, pages=pages, **NEAR)


@pytest.mark.parametrize("codec", ["int8", "float32/int8", "int4/fp8", "int4_outliers"])
def test_codes_of_latents_equal_decoded_latents(codec):
    lanes = two_rows((16, 32), tokens=[1, 1])
    query, math = lanes.query(20, joined=True), AttentionMath(48**-0.5, joined=True)
    pages = coded_twin(lanes, codec)

    got = lanes.in_codes(pages).attend(triton_backend(), query, math)

    torch.testing.assert_close(got, lanes.attend(REFERENCE, query, math), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("codec", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_queries_of_half_precision(codec, dtype):
    """With float16 the scales of values are not multiplied with weights, which could underflow."""
    lanes = two_rows(64)
    query, pages = lanes.query(4).to(dtype), coded_twin(lanes, codec)
    out = 2 ** (-7 if dtype is torch.bfloat16 else -10), 0
    near = {"out": out, "sums": (1e-2, 1e-2), "scaled": True}
    lanes.check(triton_backend(), query, AttentionMath(scale=0.125), pages=pages, **near)


@pytest.mark.parametrize("codec", ["int8_channel", "int8:equalise=1", "int4:equalise=1"])
@pytest.mark.parametrize("count", [1, 2])
def test_constants_of_channels_are_applied_to_queries_and_outputs(codec, count):
    lanes, codecs, planes = two_rows((16, 32), count, heads=2 // count), [], []
    for vectors in (lanes.pages.key, lanes.pages.value):
        dim = vectors.shape[3]
        spread = torch.linspace(0.1, 3, dim) * torch.tensor([1.0, 4.0])[:, None, None]
        own = make_codec(codec_spec(codec), dim).calibrated(torch.randn(2, 50, dim) * spread)
        codecs.append(own)
        by_lane = vectors.nan_to_num(0.0)
        # page p holds the heads of one lane; encode it with each lane's constants
        lane_of = torch.zeros(len(vectors), dtype=torch.long)
        for lane in range(count):
            lane_of[lanes.table[:, lane].clamp_min(0).flatten().long()] = lane
        heads = lane_of[:, None] * (2 // count) + torch.arange(2 // count)
        planes.append(_strided(own.of_heads(heads).encode(by_lane)))
    coded = CodedPages(*map(CodedPlanes, codecs, planes))
    pages = replace(lanes.pages, key=planes[0][0], value=planes[1][0], coded=coded)
    query, math = lanes.query(2), AttentionMath(scale=0.25)
    lanes.in_codes(pages).check(triton_backend(), query, math, **NEAR)


def _strided(planes):
    """The planes in pages of equal byte strides."""
    placed = []
    for plane in planes:
        pages = torch.zeros(len(plane), 1024, dtype=torch.uint8)
        part = pages[:, : plane[0].nbytes].view(plane.dtype).view(plane.shape)
        placed.append(part.copy_(plane))
    return tuple(placed)


def test_other_codecs_fall_back_to_gathered_pages(caplog):
    """Codes with measured codebooks, or of whole pages."""
    lanes = two_rows(slots=[[16], [8]])
    codec = make_codec(codec_spec("int4_page"), 16)
    sides = [codec.encode(x.nan_to_num(0.0)) for x in (lanes.pages.key, lanes.pages.value)]
    coded = CodedPages(*(CodedPlanes(codec, side) for side in sides))
    pages = replace(lanes.pages, key=sides[0][0], value=sides[1][0], coded=coded)
    backend = triton_backend(GatheredAttention(CPU))
    lanes.in_codes(pages).check(backend, lanes.query(2), AttentionMath(scale=0.25))
    assert "they do not decode int4_page" in caplog.text


def test_reasons_why_a_codec_is_not_decoded_and_each_decoded_codec_is_tested():
    for codec in ("int8", "int8:equalise=1", "int4_hadamard"):
        assert why_not(codec_spec(codec), 64) is None
    assert why_not(codec_spec("kvquant4"), 64) == "they do not decode kvquant4"
    many = codec_spec("int4_outliers:percent=50")
    assert why_not(many, 64) == f"they read at most 16 outliers of a vector, {many.name} has more"
    # measured codecs have tests of their own
    assert {*DECODED, "int8_channel"} == {n for n, kind in KINDS.items() if kind != PLAIN}


@pytest.mark.parametrize(
    ("codec", "shape", "window", "group"),
    [
        ("float32", (2, 16, 4), 3, 3),
        ("bfloat16", (1, 64, 16), 32, 1),
        ("float16", (3, 80, 5), 40, 2),
        ("int8", (1, (32, 64), 8), 5, 2),
        ("fp8", (1, 32, 8), 5, 2),
        ("int4", (2, 32, 8), 5, 2),
        ("int4_outliers", (1, 64, 8), 5, 1),
    ],
)
def test_scores_of_cached_tokens_equal_those_of_their_keys(codec, shape, window, group):
    heads, dims, page_tokens = shape
    plain = codec in ("float32", "bfloat16", "float16")
    sizes = {"heads": heads, "page_tokens": page_tokens}
    dtype = getattr(torch, codec) if plain else torch.float32
    lanes = two_rows(dims, 2, tokens=[1, 1], dtype=dtype, **sizes)
    pages = None if plain else coded_twin(lanes, codec)
    cached = ScoredLanes(lanes, QueryRing(window), group, pages)
    expected, view = cached.view(), cached.view(triton_backend())
    sums = column_sums(view, cached.ring)

    torch.testing.assert_close(sums, column_sums(expected, cached.ring), atol=2e-5, rtol=2e-5)
    for rule in (KeyDiff(), KNorm()):
        torch.testing.assert_close(rule.score(view), rule.score(expected), atol=2e-6, rtol=2e-5)
    norms = view.in_pages(VALUE).norms()
    torch.testing.assert_close(norms, cached.values().norm(dim=2), atol=1e-6, rtol=1e-5)


def test_keys_that_kernels_do_not_decode_are_not_scored():
    for codec in ("int4_hadamard", "int8_channel"):
        side = CodedPlanes(make_codec(codec_spec(codec), 16), (torch.zeros(1, 1, 1, 16),))
        assert not triton_backend().can_score(side.planes[0], side)
