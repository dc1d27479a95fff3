"""Attention over pages: every backend equals the reference for all kinds of lanes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.kernels.backend import AttentionMath
from quire.kernels.gathered import GatheredAttention
from quire.kernels.reference_backend import ReferenceAttention, attend_reference
from quire.kernels.select import select_backend
from quire.kv.compaction import commit_compaction, plan_compaction
from quire.kv.paged_kv import PagedKV, allocate_kv
from quire.kv.step import StepAttention
from quire.layout.codec_names import codec_spec
from quire.layout.pages import CacheLayout, LaneGroup, PageClass, kv_pages

NUM_HEADS = 4
LAYERS = ((2, 10, 6), (4, 8, 8), (2, 10, 6), (2, 6, 12))
"""KV heads, elements of a key, elements of a value."""
CPU = torch.device("cpu")


def make_layout(page_tokens: int, dtype: str) -> CacheLayout:
    """Two full layers, a window layer, and a layer with one-head pages, each of other widths."""
    numbers = codec_spec(dtype)

    def pages(layer: int, *, lanes: int = 1, positions: bool = True) -> PageClass:
        heads, head_dim, value_dim = LAYERS[layer]
        return kv_pages(
            key=numbers,
            value=numbers,
            head_dim=head_dim,
            value_dim=value_dim,
            heads=heads // lanes,
            tokens=page_tokens,
            positions=positions,
        )

    return CacheLayout(
        (
            LaneGroup(name="full", page_class=pages(0), layers=(0, 2), ordered=False),
            LaneGroup(name="window", page_class=pages(1, positions=False), layers=(1,), window=5),
            LaneGroup(
                name="ragged",
                page_class=pages(3, lanes=2),
                layers=(3,),
                lanes_per_layer=2,
                ordered=False,
            ),
        )
    )


def make_kv(page_tokens: int, backend, dtype: str = "float32") -> PagedKV:
    layout = make_layout(page_tokens, dtype)
    kv = allocate_kv(layout, layout.smallest_sequence_bytes * 200, 8, device=CPU, backend=backend)
    kv.store.arena.fill_(0xFF)  # NaN in every float type: detects reads of free slots
    return kv


def start_rows(kvs: list[PagedKV], count: int) -> list[int]:
    for kv in kvs:
        rows = [kv.memory.start() for _ in range(count)]
    return rows


def run_step(kv: PagedKV, tokens: dict[int, int], tensors, math: AttentionMath):
    """Grow the rows, then attend in every layer; returns [tokens, heads, dim] of each."""
    order = sorted(tokens, key=lambda row: tokens[row] != 1)
    rows = np.array(order, dtype=np.int64)
    counts = np.array([tokens[row] for row in order], dtype=np.int32)
    kv.memory.grow(rows, counts)
    step = StepAttention(kv, rows, counts)
    return [step.attend(layer, math, *parts) for layer, parts in enumerate(tensors)]


def draw_tensors(generator: torch.Generator, count: int, dtype: torch.dtype):
    return [
        [
            torch.randn(count, number, dim, generator=generator).to(dtype)
            for number, dim in ((NUM_HEADS, key_dim), (heads, key_dim), (heads, value_dim))
        ]
        for heads, key_dim, value_dim in LAYERS
    ]


def evict_some(kvs: list[PagedKV], row: int, rng: np.random.Generator) -> None:
    for name in ("full", "ragged"):
        slots = kvs[0].memory.tables[name].num_slots[row]
        keep = rng.random((len(slots), int(slots.max(initial=0)))) < 0.7
        keep[:, :1] = True
        if name == "full":
            keep[:] = keep[0]  # equal counts in the full group
        for kv in kvs:
            commit_compaction(kv.memory, plan_compaction(kv.memory, name, row, keep))


@pytest.mark.parametrize("name", ["gathered", "auto"])  # auto: native if it was built
@given(
    seed=st.integers(0, 10_000),
    page_tokens=st.sampled_from([1, 3, 16]),
    softcap=st.sampled_from([None, 3.0]),
    sinks=st.booleans(),
    scratch_bytes=st.sampled_from([1, 10_000, 1 << 26]),
)
def test_backends_equal_the_reference(name, seed, page_tokens, softcap, sinks, scratch_bytes):
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    kvs = [
        make_kv(page_tokens, ReferenceAttention()),
        make_kv(
            page_tokens,
            select_backend(
                name,
                CPU,
                dtype=torch.float32,
                head_dim={layer[1:] for layer in LAYERS},
                scratch_bytes=scratch_bytes,
            ).backend,
        ),
    ]
    logits = torch.randn(NUM_HEADS, generator=generator) if sinks else None
    math = AttentionMath(scale=0.4, softcap=softcap, sinks=logits)
    rows = start_rows(kvs, 4)
    for _ in range(5):
        chosen = [row for row in rows if rng.random() < 0.8] or rows
        tokens = {row: int(rng.choice([1, 1, 2, 7, 20])) for row in chosen}
        tensors = draw_tensors(generator, sum(tokens.values()), torch.float32)
        expected, got = (run_step(kv, tokens, tensors, math) for kv in kvs)

        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        evict_some(kvs, int(rng.choice(rows)), rng)
        for kv in kvs:
            kv.memory.check()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_pages_stay_near_the_float32_reference(dtype):
    torch_dtype = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)
    kvs = [make_kv(4, b, dtype) for b in (ReferenceAttention(), GatheredAttention(CPU))]
    rows = start_rows(kvs, 3)
    math = AttentionMath(scale=0.35)
    for counts in ([9, 1, 30], [1, 1, 1], [1, 5, 1]):
        tokens = dict(zip(rows, counts, strict=True))
        tensors = draw_tensors(generator, sum(counts), torch_dtype)
        expected, got = (run_step(kv, tokens, tensors, math) for kv in kvs)

        torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)


def test_column_sums_of_the_reference_are_the_attention_per_slot():
    """Column sums: softmax rows sum to one, so the sums over slots count the queries.

    Two slots, two queries, equal products: query 0 sees slot 0 only (weight 1), query 1 sees both
    (1/2 each): column sums are 1.5 and 0.5.
    """
    query = torch.zeros(2, 1, 4)
    key = value = torch.randn(2, 1, 4)
    positions = torch.arange(2)
    out, sums = attend_reference(
        query,
        key,
        value,
        math=AttentionMath(scale=1.0),
        query_positions=positions,
        key_positions=positions,
    )

    assert sums.tolist() == [[1.5, 0.5]]
    torch.testing.assert_close(out[1], value.mean(dim=0))


def test_scratch_is_bounded_and_reported():
    """Sixteen rows of 32 slots hold 4 KiB of keys and values each in one layer."""
    backend = GatheredAttention(CPU, scratch_bytes=8_192)
    kv = make_kv(16, backend)
    rows = [kv.memory.start() for _ in range(8)]
    generator = torch.Generator().manual_seed(0)
    math = AttentionMath(scale=1.0)
    run_step(kv, dict.fromkeys(rows, 31), draw_tensors(generator, 31 * 8, torch.float32), math)
    run_step(kv, dict.fromkeys(rows, 1), draw_tensors(generator, 8, torch.float32), math)

    one_row = 32 * 2 * (10 + 6) * 4
    assert one_row == 4_096
    assert one_row <= backend.peak_scratch_bytes <= 8_192


def test_scratch_counts_whole_pages_of_short_rows():
    """Eight rows of 2 slots in pages of 16: 8 pages of 2 KiB are gathered, not 2 KiB."""
    backend = GatheredAttention(CPU, scratch_bytes=8_192)
    kv = make_kv(16, backend)
    rows = [kv.memory.start() for _ in range(8)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        tensors = draw_tensors(generator, 8, torch.float32)
        run_step(kv, dict.fromkeys(rows, 1), tensors, AttentionMath(scale=1.0))

    assert 16 * 2 * (10 + 6) * 4 == 2_048
    assert backend.peak_scratch_bytes <= 8_192
