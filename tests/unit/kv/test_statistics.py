"""Attention statistics equal their definitions for all chunks and batches; readers of lanes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import PolicyError
from quire.kernels.backend import AttentionMath, ChainBackend
from quire.kernels.select import select_backend
from quire.kv import statistics as statistics_module
from quire.kv.lane_reader import LaneReader
from quire.kv.sharing import fork
from quire.kv.swap import swap_in, swap_out
from quire.layout.statistics import (
    REDUCTIONS,
    AttentionSum,
    LowAttentionCount,
    QueryMoments,
    QueryRing,
    ResidualSimilarity,
    SquareSum,
)
from support.pairwise import every_pair
from support.statistics_account import (
    CPU,
    FULL_LAYERS,
    GROUP,
    HEAD_DIM,
    MATH,
    MODEL,
    NUM_HEADS,
    NUM_KV_HEADS,
    SHARED,
    WINDOW,
    Sequence,
    accounts,
    evict,
    make_kv,
    start,
    step,
)

KINDS = (AttentionSum, SquareSum, LowAttentionCount)
SLOT_STATISTICS = tuple(kind(heads) for kind in KINDS for heads in REDUCTIONS)
SLOT_STATISTICS += tuple(kind().each() for kind in KINDS)
OF_QUERIES = (QueryRing(6), QueryMoments(3), QueryMoments(5, squares=True), ResidualSimilarity())
ALL = SLOT_STATISTICS + OF_QUERIES
CHUNKS = {"whole": [30], "chunks": [11, 2, 9, 8], "tokens": [1] * 30}
"""Chunk lengths of the prompt of 30 tokens; 5 more are decoded."""
PROMPT, TOKENS = 30, 35


def backend(name, dtype=torch.float32):
    return select_backend(name, CPU, dtype=dtype, head_dim=HEAD_DIM, scratch_bytes=1 << 20).backend


def chunk_ranges(chunks):
    """The (start, end) of each step."""
    ends = np.cumsum([*CHUNKS[chunks], *[1] * (TOKENS - PROMPT)]).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def run(kv, row, sequence, chunks="whole", math=MATH, *, chained=False):
    for first, end in chunk_ranges(chunks):
        step(kv, {row: (sequence, first, end)}, math, chained=chained)


def statistics_of(kv, row):
    return LaneReader(kv, "full", row).statistics


def expected_statistics(sequence, math=MATH, statistics=SLOT_STATISTICS):
    lanes = accounts(sequence, math)
    for lane in lanes:
        for position in range(TOKENS):
            lane.see(position, statistics)
    return {s.name: torch.cat([lane.by_position(s) for lane in lanes]) for s in statistics}


MATHS = {
    "plain": MATH,
    "softcap and sinks": AttentionMath(0.6, 2.0, torch.linspace(-1, 2, NUM_HEADS)),
}
EXPECTED = {name: expected_statistics(Sequence(TOKENS), math) for name, math in MATHS.items()}


needs_chains = pytest.mark.skipif(
    not isinstance(backend("auto"), ChainBackend), reason="no C extension with vector instructions"
)


@every_pair(
    form=[("plain", False), ("plain", True), ("softcap and sinks", True)],
    chunks=CHUNKS,
    name=["gathered", "auto"],
)
def test_slot_statistics_equal_their_definition_for_all_chunk_lengths(name, chunks, form):
    math, heads_apart = form
    kv = make_kv(SLOT_STATISTICS, backend=backend(name), heads_apart=heads_apart)
    row = start(kv, SLOT_STATISTICS)
    run(kv, row, Sequence(TOKENS), chunks, MATHS[math])

    found = statistics_of(kv, row)
    assert found.keys() == EXPECTED[math].keys()
    for statistic, numbers in EXPECTED[math].items():
        near = {"atol": 1e-5, "rtol": 1e-5, "msg": statistic}
        torch.testing.assert_close(found[statistic].double(), numbers.double(), **near)
    kv.memory.check()


@needs_chains
@every_pair(
    heads_apart=[False, True],
    chunks=CHUNKS,
    codec=["float32", "bfloat16", "float16", "int8", "int8/int4", "int2"],
    statistics=[SLOT_STATISTICS, (AttentionSum("sum"), AttentionSum().each())],
)
def test_statistics_of_a_chain_equal_the_reference(codec, chunks, heads_apart, statistics):
    """Chunks of prompts are part of a chain too if column sums suffice."""
    statistics, sequence = (*statistics, QueryRing(6)), Sequence(TOKENS)
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(codec, torch.float32)
    for name in ("query", "key", "value"):
        setattr(sequence, name, getattr(sequence, name).to(dtype))
    found = []
    for name, chained in (("reference", False), ("auto", True)):
        options = {"heads_apart": heads_apart, "codec": codec}
        kv = make_kv(statistics, backend=backend(name, dtype), **options)
        row = start(kv, statistics)
        run(kv, row, sequence, chunks, chained=chained)
        found.append(statistics_of(kv, row))
        kv.memory.check()

    expected, got = found
    for statistic, numbers in expected.items():
        if statistic.startswith("low") and dtype != torch.float32:
            continue  # a rounded weight can be on either side of the threshold
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        near = {"atol": tolerance, "rtol": tolerance, "msg": statistic}
        torch.testing.assert_close(got[statistic], numbers, **near)


@pytest.mark.parametrize("name", ["gathered", "auto"])
def test_sums_of_a_bfloat16_model_do_not_saturate(name):
    """Every query attends to the first token only: a sum of 297; bfloat16 would stay at 292."""
    dtype, tokens = torch.bfloat16, 297
    sums, sequence = (AttentionSum(), SquareSum(), AttentionSum("max")), Sequence(tokens)
    kv = make_kv(sums, backend=backend(name, dtype), codec="bfloat16")
    sequence.query = torch.ones_like(sequence.query).to(dtype)
    sequence.key, sequence.value = torch.zeros_like(sequence.key), sequence.value.to(dtype)
    sequence.key[:, 0] = 99.0
    sequence.key = sequence.key.to(dtype)
    row = start(kv, sums)
    for first, end in [(0, 292), *((token, token + 1) for token in range(292, tokens))]:
        step(kv, {row: (sequence, first, end)})

    for numbers in statistics_of(kv, row).values():
        torch.testing.assert_close(numbers[:, 0], torch.full((4,), float(tokens)))


any_chunks = pytest.mark.parametrize(
    ("chunks", "heads_apart"), [("whole", False), ("chunks", True), ("tokens", False)]
)


def of_queries(chunks, heads_apart=False):
    """A memory and a sequence that was computed in it, and its statistics of queries."""
    kv, sequence = make_kv(OF_QUERIES, heads_apart=heads_apart), Sequence(TOKENS)
    row = start(kv, OF_QUERIES)
    run(kv, row, sequence, chunks)
    return kv, sequence, statistics_of(kv, row)


@any_chunks
def test_rings_hold_the_newest_queries_and_moments_are_those_of_all_pre_rope_queries(
    chunks, heads_apart
):
    kv, sequence, statistics = of_queries(chunks, heads_apart)
    found, window = statistics["query_ring.6"], 6

    assert found.shape == (4, window, GROUP * HEAD_DIM + 1)
    for position in range(TOKENS - window, TOKENS):
        record = found[:, position % window]
        queries = sequence.query[list(FULL_LAYERS), position].reshape(4, -1)
        assert torch.equal(record[:, :-1], queries)
        assert record[:, -1].tolist() == [position + 1.0] * 4
    step(kv, {(other := start(kv, OF_QUERIES)): (sequence, 0, 4)})
    marks = statistics_of(kv, other)["query_ring.6"][:, :, -1]
    assert marks.tolist() == [[1, 2, 3, 4, 0, 0]] * 4  # unused records have zero

    found, skip = statistics["query_moments.3"][:, 0].reshape(4, GROUP, -1), 3
    queries = sequence.raw[list(FULL_LAYERS), skip:].double()
    queries = queries.reshape(2, TOKENS - skip, NUM_KV_HEADS, GROUP, HEAD_DIM)
    sums = queries.sum(1).reshape(4, GROUP, -1)
    products = torch.einsum("lthgd,lthge->lhgde", queries, queries).reshape(4, GROUP, -1)
    assert found[:, :, 0].unique().tolist() == [TOKENS - skip]
    tolerance = {"atol": 1e-4, "rtol": 1e-5}  # float32 error of rotation and its inverse
    torch.testing.assert_close(found[:, :, 1 : 1 + HEAD_DIM].double(), sums, **tolerance)
    torch.testing.assert_close(found[:, :, 1 + HEAD_DIM :].double(), products, **tolerance)
    only_squares = statistics["query_moments.5.squares"][:, 0].reshape(4, GROUP, -1)
    later = queries[:, 5 - skip :].square().sum(1).reshape(4, GROUP, -1)
    assert only_squares[:, :, 0].unique().tolist() == [TOKENS - 5]
    torch.testing.assert_close(only_squares[:, :, 1 + HEAD_DIM :].double(), later, **tolerance)


@pytest.mark.parametrize("chunks", CHUNKS)
def test_residual_similarity_sums_the_cosines_of_all_tokens(chunks):
    _, sequence, statistics = of_queries(chunks)
    found = statistics["residual_similarity"]

    sums = sequence.cosines[list(FULL_LAYERS)].sum(1).repeat_interleave(2)
    torch.testing.assert_close(found[:, 0, 0], sums, atol=1e-5, rtol=1e-5)
    assert found[:, 0, 1].tolist() == [TOKENS] * 4


@every_pair(heads_apart=[False, True], chunks=CHUNKS, name=["reference", "gathered", "auto"])
def test_layers_that_read_one_lane_count_together(name, chunks, heads_apart):
    """Two layers with equal keys and values: their statistics apart, added or side by side."""
    sequence, found, outputs = Sequence(TOKENS), [], []
    sequence.key[2], sequence.value[2] = sequence.key[0], sequence.value[0]
    for model in (MODEL, SHARED):
        kv = make_kv(ALL, backend=backend(name), heads_apart=heads_apart, model=model)
        row = start(kv, ALL)
        outputs.append([step(kv, {row: (sequence, *at)}) for at in chunk_ranges(chunks)])
        found.append(statistics_of(kv, row))
        kv.memory.check()

    apart, together = found
    for expected, out in zip(*outputs, strict=True):
        torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)
    for statistic in ALL:
        numbers, got = apart[statistic.name], together[statistic.name]
        by_layer = numbers.view(2, NUM_KV_HEADS, -1, *numbers.shape[1:])  # [layer, KV head, ...]
        if isinstance(statistic, QueryRing):
            queries = torch.cat([*by_layer[..., :-1]], dim=-1)
            expected = torch.cat([queries, by_layer[0, ..., -1:]], dim=-1)
        elif isinstance(statistic, QueryMoments):
            expected = torch.cat([*by_layer], dim=-1)
        elif getattr(statistic, "apart", False):
            expected = torch.cat([*by_layer], dim=1)
        else:
            expected = by_layer.sum(dim=0)
        near = {"atol": 1e-5, "rtol": 1e-5, "msg": statistic.name}
        torch.testing.assert_close(got.view(expected.shape), expected, **near)


@pytest.mark.parametrize(("name", "heads_apart"), [("gathered", False), ("auto", True)])
def test_statistics_do_not_depend_on_the_rest_of_the_batch(name, heads_apart):
    """Rows with all, some and no statistics, at different lengths and in mixed steps."""
    kv = make_kv(ALL, backend=backend(name), heads_apart=heads_apart)
    requested_statistics = [ALL, (AttentionSum("max"), QueryRing(6)), (), ALL]
    names = ["chunks", "whole", "tokens", "tokens"]
    rows = [start(kv, statistics) for statistics in requested_statistics]
    cuts = [chunk_ranges(chunks) for chunks in names]
    while any(cuts):
        due = {
            row: (Sequence(TOKENS, seed), *chunks.pop(0))
            for seed, (row, chunks) in enumerate(zip(rows, cuts, strict=True))
            if chunks
        }
        step(kv, due)

    requests = zip(rows, requested_statistics, names, strict=True)
    for seed, (row, statistics, chunks) in enumerate(requests):
        alone = make_kv(ALL, backend=backend(name), heads_apart=heads_apart)
        other = start(alone, statistics)
        run(alone, other, Sequence(TOKENS, seed), chunks)
        found, expected = statistics_of(kv, row), statistics_of(alone, other)
        assert found.keys() == expected.keys() == {s.name for s in statistics}
        for statistic in expected:
            near = {"atol": 1e-6, "rtol": 1e-6, "msg": statistic}
            torch.testing.assert_close(found[statistic], expected[statistic], **near)


class RecordsSumRequests:
    """A backend that records for which calls column sums were requested."""

    def __init__(self):
        self._inner, self.sums = backend("gathered"), []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def attend(self, *arguments, column_sums=None):
        self.sums.append(column_sums is not None)
        return self._inner.attend(*arguments, column_sums=column_sums)


@pytest.mark.parametrize(
    ("rows", "tokens", "layers"),
    [
        ([(), ()], 5, [False, False, False]),  # no statistics
        ([(), (AttentionSum(),)], 5, [True, False, True]),  # the middle layer has a window
        ([(AttentionSum("max"),)], 5, [False, False, False]),  # weights are recomputed
        ([(AttentionSum("max"),)], 1, [True, False, True]),
        ([OF_QUERIES], 5, [False, False, False]),
    ],
)
def test_column_sums_are_requested_only_for_statistics_that_need_them(rows, tokens, layers):
    recording = RecordsSumRequests()
    kv = make_kv(ALL, backend=recording)
    step(kv, {start(kv, names): (Sequence(TOKENS), 0, tokens) for names in rows})
    assert recording.sums == layers


@pytest.mark.parametrize("name", ["gathered", "auto"])
def test_attention_output_is_equal_with_and_without_statistics(name):
    outputs = []
    for statistics in ((), ALL):
        kv = make_kv(ALL, backend=backend(name))
        row = start(kv, statistics)
        steps = [(Sequence(TOKENS), *chunks) for chunks in chunk_ranges("chunks")]
        outputs.append([step(kv, {row: one}) for one in steps])

    for plain, with_statistics in zip(*outputs, strict=True):
        assert torch.equal(plain, with_statistics)


def test_scratch_of_column_sums_is_reported_and_of_recomputed_weights_bounded(monkeypatch):
    """Eight heads of 16 slots (13, rounded up to a cache line) for one row: 6 * 16 * 4 bytes."""
    kv = make_kv(SLOT_STATISTICS)
    assert kv.peak_scratch_bytes == 0
    step(kv, {start(kv, SLOT_STATISTICS): (Sequence(TOKENS), 0, 13)})

    assert kv.peak_scratch_bytes == NUM_HEADS * 16 * 4

    # Blocks of 100 elements: one or two queries each, and equal statistics.
    monkeypatch.setattr(statistics_module, "BLOCK_NUMBERS", 100)
    largest, weights_dense = [], statistics_module.weights_dense

    def recorded(*arguments, **options):
        weights = weights_dense(*arguments, **options)
        largest.append(weights.numel())
        return weights

    monkeypatch.setattr(statistics_module, "weights_dense", recorded)
    kv = make_kv(SLOT_STATISTICS)
    row = start(kv, SLOT_STATISTICS)
    run(kv, row, Sequence(TOKENS))

    assert max(largest) <= 100
    for statistic, numbers in EXPECTED["plain"].items():
        found = statistics_of(kv, row)[statistic].double()
        torch.testing.assert_close(found, numbers, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["gathered", "auto"])
def test_statistics_of_an_evicted_token_are_cleared_before_its_slot_is_reused(name):
    kv, sequence = (
        make_kv(SLOT_STATISTICS, backend=backend(name), heads_apart=True),
        Sequence(TOKENS),
    )
    row, lanes = start(kv, SLOT_STATISTICS), accounts(Sequence(TOKENS))
    for first, end in chunk_ranges("chunks"):
        step(kv, {row: (sequence, first, end)})
        for lane in lanes:
            for position in range(first, end):
                lane.see(position, SLOT_STATISTICS)
        if end in (13, 22, 30, 33):
            evict_random_tokens(kv, row, lanes, np.random.default_rng(end))

    found = statistics_of(kv, row)
    for statistic in SLOT_STATISTICS:
        by_lane = found[statistic.name].unflatten(0, (len(lanes), -1))
        for got, account in zip(by_lane, lanes, strict=True):
            numbers = account.by_position(statistic).float()
            held = numbers.shape[1]
            assert held < TOKENS - 4
            torch.testing.assert_close(got[:, :held], numbers, atol=1e-5, rtol=1e-5)
            assert not got[:, held:].any()


def evict_random_tokens(kv, row, lanes, rng):
    """Evict three random tokens of each lane."""
    reader = LaneReader(kv, "full", row)
    keep = reader.positions >= 0
    for lane, account in enumerate(lanes):
        evicted = rng.choice(int(keep[lane].sum()), size=3, replace=False)
        account.forget(reader.positions[lane, evicted].tolist())
        keep[lane, evicted] = False
    evict(kv, row, reader.unsort(keep))


@pytest.mark.parametrize("how", ["fork", "swap"])
def test_forked_or_swapped_row_keeps_its_statistics(how):
    kv, sequence = make_kv(ALL), Sequence(TOKENS)
    row = start(kv, ALL)
    for chunks in chunk_ranges("chunks")[:3]:
        step(kv, {row: (sequence, *chunks)})
    if how == "fork":
        child = fork(kv.memory, row)
        kv.memory.release([row])
    else:
        swapped = swap_out(kv.memory, [row])
        kv.store.arena.fill_(0xFF)
        [child] = swap_in(kv.memory, swapped)
    for chunks in chunk_ranges("chunks")[3:]:
        step(kv, {child: (sequence, *chunks)})

    unmoved = make_kv(ALL)
    run(unmoved, other := start(unmoved, ALL), sequence, "chunks")
    for name, numbers in statistics_of(unmoved, other).items():
        assert torch.equal(statistics_of(kv, child)[name], numbers), name


def test_window_layers_have_no_statistics():
    kv = make_kv(ALL)
    row = start(kv, ALL)
    run(kv, row, Sequence(TOKENS), "chunks")
    name = f"window_{WINDOW}"

    assert {pages.group.layers for pages in kv.statistics["full"]} == {FULL_LAYERS}
    assert name not in kv.statistics
    assert LaneReader(kv, name, row).statistics == {}


STATISTICS = (AttentionSum(), QueryRing(4))


def evicted_row(heads_apart, seed, page_tokens=4):
    """A row after three evictions, and the expected positions of each lane."""
    kv = make_kv(STATISTICS, heads_apart=heads_apart, page_tokens=page_tokens)
    sequence = Sequence(40)
    rng, row = np.random.default_rng(seed), start(kv, STATISTICS)
    held = [[] for _ in range(4)]
    for first, end in ((0, 12), (12, 20), (20, 23), (23, 40)):
        step(kv, {row: (sequence, first, end)})
        for lane in held:
            lane.extend(range(first, end))
        if end == 40:
            break
        reader = LaneReader(kv, "full", row)
        keep = reader.positions >= 0
        for lane in range(4):
            shared = lane if heads_apart else lane // 2 * 2
            if shared == lane:
                count, share = int((reader.positions[lane] >= 0).sum()), rng.choice([0.1, 0.6])
                evicted = rng.random(count) < share
            if not heads_apart:  # lanes of a group of layers: equal counts
                evicted[:] = np.arange(len(evicted)) % 3 == 1
            keep[lane, : len(evicted)] = torch.from_numpy(~evicted)
            held[lane] = [p for p, gone in zip(held[lane], evicted, strict=True) if not gone]
        evict(kv, row, reader.unsort(keep))
    return kv, sequence, row, held


@given(heads_apart=st.booleans(), seed=st.integers(0, 500), page_tokens=st.sampled_from([1, 4, 16]))
def test_lane_reader_is_in_order_of_positions(heads_apart, seed, page_tokens):
    kv, sequence, row, held = evicted_row(heads_apart, seed, page_tokens)
    reader = LaneReader(kv, "full", row)
    keys, values = reader.keys(), reader.values()

    assert reader.heads_per_layer == 2
    assert reader.layers == FULL_LAYERS
    widest = max(map(len, held))
    for lane, positions in enumerate(held):
        padded = positions + [-1] * (widest - len(positions))
        assert reader.positions[lane].tolist() == padded
        layer, head = FULL_LAYERS[lane // 2], lane % 2
        for found, stored in ((keys, sequence.key), (values, sequence.value)):
            assert torch.equal(found[lane, : len(positions)], stored[layer, positions, head])
            assert not found[lane, len(positions) :].any()


@given(heads_apart=st.booleans(), seed=st.integers(0, 500))
def test_unsort_maps_a_mask_back_to_slots(heads_apart, seed):
    """Retain the even positions only."""
    kv, _, row, held = evicted_row(heads_apart, seed)
    reader = LaneReader(kv, "full", row)
    keep = reader.positions % 2 == 0  # -1 is odd
    evict(kv, row, reader.unsort(keep))

    after = LaneReader(kv, "full", row).positions
    for lane, positions in enumerate(held):
        assert after[lane][after[lane] >= 0].tolist() == [p for p in positions if p % 2 == 0]


def test_reader_of_one_layer_is_a_part_of_all_layers_and_masks_of_one_page_are_equal():
    kv, _, row, _ = evicted_row(heads_apart=True, seed=1)
    whole = LaneReader(kv, "full", row)
    for layer in range(2):
        part = LaneReader(kv, "full", row, range(layer, layer + 1))
        lanes = slice(2 * layer, 2 * layer + 2)
        width = part.positions.shape[1]
        assert part.layers == (FULL_LAYERS[layer],)
        assert torch.equal(part.positions, whole.positions[lanes, :width])
        assert torch.equal(part.keys(), whole.keys()[lanes, :width])
        for name, numbers in part.statistics.items():
            expected = whole.statistics[name][lanes]
            assert torch.equal(numbers, expected if "ring" in name else expected[:, :width])
        mask = part.positions >= 0
        assert part.unsort(mask).sum(axis=1).tolist() == mask.sum(dim=1).tolist()

    kv, _, row, _ = evicted_row(heads_apart=False, seed=0)
    empty = LaneReader(kv, "full", start(kv, STATISTICS))
    assert (empty.positions.shape, empty.keys().shape) == ((4, 0), (4, 0, HEAD_DIM))
    reader = LaneReader(kv, "full", row)
    keep = reader.positions >= 0
    keep[1, 0] = False

    with pytest.raises(PolicyError, match="needs one-head pages"):
        reader.unsort(keep)


def test_positions_of_an_ordered_group_come_from_the_table():
    kv, sequence = make_kv(()), Sequence(40)
    row = start(kv, ())
    for first in range(0, 40, 8):
        step(kv, {row: (sequence, first, first + 8)})
    reader = LaneReader(kv, "window_5", row)

    held = kv.memory.tables["window_5"].num_slots[row, 0]
    assert reader.positions.tolist() == [list(range(40 - held, 40))] * 2
    assert torch.equal(reader.keys(), sequence.key[1, 40 - held :].transpose(0, 1))
