"""Attention in Triton, interpreted on the CPU, equals the reference."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import InvariantError
from quire.kernels.backend import Alibi, AttentionMath
from quire.kernels.gathered import GatheredAttention
from quire.kernels.reference_backend import ReferenceAttention
from support.interpreted import CPU, interpreted, triton_backend
from support.lanes import Lanes
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


def make_lanes(**change):
    """Two decode rows and a chunk."""
    shape = {
        "tokens": [1, 1, 4],
        "slots": [[21], [5], [19]],
        "heads": 2,
        "head_dim": 16,
        "page_tokens": 8,
        "dtype": torch.float32,
    }
    return Lanes(**shape | change)


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
    if not with_sums:
        got, expected = (lanes.attend(x, query, math) for x in (backend, REFERENCE))
        torch.testing.assert_close(got.float(), expected.float(), atol=atol, rtol=1e-5)
        return
    expected, expected_sums = lanes.attend_with_sums(REFERENCE, query, math)
    got, sums = lanes.attend_with_sums(backend, query, math)

    torch.testing.assert_close(got.float(), expected.float(), atol=atol, rtol=1e-5)
    torch.testing.assert_close(sums, expected_sums, atol=2e-5, rtol=1e-4)


@every_pair(
    dims=[(16, 16), (64, 64), (80, 80), (48, 32), (32, 64)],
    heads=HEADS,
    pages=["layer pages", "one-head pages"],
)
def test_heads_equal_the_reference(heads, dims, pages):
    kv_heads, group = HEADS[heads]
    shape = {"heads": kv_heads} if pages == "layer pages" else one_head_pages([21, 5, 19])
    lanes = make_lanes(**shape, head_dim=dims[0], value_dim=dims[1])
    check(lanes, group, with_sums=max(dims) < 50)


@every_pair(window=[None, 1, 17], softcap=[None, 2.0], with_sinks=[False, True])
def test_windows_softcaps_and_sinks_equal_the_reference(window, softcap, with_sinks):
    lanes = make_lanes(heads=1, window=window, value_dim=40)
    check(lanes, 2, softcap=softcap, with_sinks=with_sinks)


@pytest.mark.parametrize("page_tokens", [1, 8, 20, 128])
def test_pages_of_any_number_of_tokens(page_tokens):
    check(make_lanes(heads=1, slots=[[41], [16], [30]], page_tokens=page_tokens), 2)


@pytest.mark.parametrize("dims", [(8, 8), (33, 33), (192, 128), (8, 33), (512, 512)])
def test_vectors_of_any_length(dims):
    lanes = make_lanes(heads=1, head_dim=dims[0], value_dim=dims[1])
    check(lanes, 2, with_sums=dims == (33, 33))


@every_pair(
    dims=[(8, 16), (16, 33), (64, 512)],
    group=[4, 16, 20],
    window=[None, 7],
    multiprocessors=[1, 8],
)
def test_joined_keys_equal_the_reference(dims, group, window, multiprocessors):
    """Latents: the key of a slot is its value followed by its stored key; 20 heads are 2 blocks."""
    shape = {"tokens": [1, 1], "slots": [[150], [5]], "heads": 1, "window": window}
    lanes = make_lanes(**shape, head_dim=dims[0], value_dim=dims[1])
    query, math = lanes.query(group, joined=True), AttentionMath(sum(dims) ** -0.5, joined=True)
    backend = triton_backend(multiprocessors=multiprocessors)
    got, expected = (lanes.attend(one, query, math) for one in (backend, REFERENCE))

    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", [[40], [1, 18, 17]])
def test_chunks_without_earlier_tokens(tokens):
    """Attention reads their pages, which hold the same numbers as the new keys and values."""
    check(make_lanes(heads=1, tokens=tokens, slots=[[new] for new in tokens]), 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [(64, 64), (80, 48)])
def test_half_precision_stays_near_the_reference(dtype, dims):
    """Arithmetic on bfloat16 itself is wrong in Triton 3.9's interpreter."""
    lanes = make_lanes(heads=1, head_dim=dims[0], value_dim=dims[1], dtype=dtype)
    check(lanes, 4, atol=2e-2 if dtype is torch.bfloat16 else 2e-3, softcap=5.0, with_sinks=True)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_splits_of_a_row_are_merged(with_sinks, monkeypatch):
    merged, merge = [], launch.merge_decode

    def counted(call, partial, partial_lse, splits):
        merged.append(splits)
        merge(call, partial, partial_lse, splits)

    monkeypatch.setattr(launch, "merge_decode", counted)
    lanes = make_lanes(heads=1, tokens=[1, 1], slots=[[150], [5]], value_dim=24)
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
    lanes = make_lanes(
        tokens=tokens, slots=slots, heads=kv_heads, window=window, page_tokens=page_tokens
    )
    check(lanes, group, softcap=softcap)


def test_attention_with_table_row_and_lane_offsets():
    """Step rows map to any table rows, and layer lanes to any lanes of the group."""
    lanes = make_lanes(**one_head_pages([21, 5, 19]))
    query = lanes.query(2)
    expected = lanes.attend(triton_backend(), query, math_of(query))
    rows, count, columns = lanes.table.shape
    large = torch.full((7, count + 3, columns), -1, dtype=torch.int32)
    own = torch.tensor([5, 2, 0])
    large[own, 2 : 2 + count] = lanes.table
    lanes.table = large[own, 2 : 2 + count]
    lanes.pages = replace(lanes.pages, table=large, rows=own, first_lane=2)

    assert len(own) == rows
    assert torch.equal(lanes.attend(triton_backend(), query, math_of(query)), expected)


def test_queries_that_are_not_contiguous():
    lanes = make_lanes(heads=1)
    query = lanes.query(2)
    expected = lanes.attend(triton_backend(), query, math_of(query))
    strided = query.transpose(0, 1).contiguous().transpose(0, 1)

    assert torch.equal(lanes.attend(triton_backend(), strided, math_of(query)), expected)


def test_column_sums_overwrite_all_live_slots_of_decode_rows():
    """Slots before the window too: the memory holds sums of another layer."""
    lanes = make_lanes(heads=1, tokens=[1], slots=[[40]], window=10)
    query, sums = lanes.query(2), torch.full((1, 2, 44), 7.0)
    lanes.attend(triton_backend(), query, math_of(query), column_sums=sums)

    assert torch.equal(sums[:, :, :30], torch.zeros(1, 2, 30))
    torch.testing.assert_close(sums[:, :, :40].sum(dim=2), torch.ones(1, 2))
    assert torch.equal(sums[:, :, 40:], torch.full((1, 2, 4), 7.0))


def test_too_small_column_sums_are_refused():
    lanes = make_lanes()
    sums = torch.zeros(3, 4, 20)
    with pytest.raises(InvariantError, match=r"column sums of shape \(3, 4, 21\)"):
        lanes.attend(triton_backend(), lanes.query(2), AttentionMath(scale=1.0), column_sums=sums)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda pages: {"table": pages.table.long()}, "page table of torch.int64"),
        (
            lambda pages: {"key": pages.key.transpose(2, 3).clone().transpose(2, 3)},
            "pages with strides",
        ),
    ],
)
def test_unsupported_tensors_fall_back_with_one_warning(change, reason, caplog):
    lanes = make_lanes()
    query = lanes.query(2)
    backend = triton_backend(GatheredAttention(CPU))
    expected = lanes.attend(REFERENCE, query, math_of(query))
    lanes.pages = replace(lanes.pages, **change(lanes.pages))
    for _ in range(2):
        got = lanes.attend(backend, query, math_of(query))

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
        got = lanes.attend_with_sums(triton_backend(GatheredAttention(CPU)), query, math)
        expected = lanes.attend_with_sums(REFERENCE, query, math)
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)
        assert reason in caplog.text


def test_alibi_falls_back_to_gathered_pages(caplog):
    lanes = make_lanes()
    query = lanes.query(2)
    math = replace(math_of(query), alibi=Alibi(torch.linspace(0.1, 0.5, query.shape[1])))
    got = lanes.attend(triton_backend(GatheredAttention(CPU)), query, math)

    torch.testing.assert_close(got, lanes.attend(REFERENCE, query, math), atol=1e-5, rtol=1e-5)
    assert "the kernels add no ALiBi" in caplog.text


def test_pages_of_float64_fall_back():
    lanes = make_lanes(dtype=torch.float64)
    query = lanes.query(2)
    got = lanes.attend(triton_backend(GatheredAttention(CPU)), query, math_of(query))

    assert torch.equal(got, lanes.attend(GatheredAttention(CPU), query, math_of(query)))
