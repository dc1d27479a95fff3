"""Attention statistics equal their definitions for all chunk lengths and batches."""

import numpy as np
import pytest
import torch

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
SLOT_STATISTICS = (
    *(kind(heads) for kind in KINDS for heads in REDUCTIONS),
    *(kind().each() for kind in KINDS),
)
OF_QUERIES = (QueryRing(6), QueryMoments(3), QueryMoments(5, squares=True), ResidualSimilarity())
ALL = SLOT_STATISTICS + OF_QUERIES
CHUNKS = {  # chunk lengths of the prompt of 30 tokens; 5 more are decoded
    "whole": [30],
    "chunks": [11, 2, 9, 8],
    "tokens": [1] * 30,
}
PROMPT, TOKENS = 30, 35


def backend(name):
    choice = select_backend(
        name, CPU, dtype=torch.float32, head_dim=HEAD_DIM, scratch_bytes=1 << 20
    )
    return choice.backend


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
        torch.testing.assert_close(
            found[statistic].double(), numbers.double(), atol=1e-5, rtol=1e-5, msg=statistic
        )
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
        choice = select_backend(name, CPU, dtype=dtype, head_dim=HEAD_DIM, scratch_bytes=1 << 20)
        kv = make_kv(statistics, backend=choice.backend, heads_apart=heads_apart, codec=codec)
        row = start(kv, statistics)
        run(kv, row, sequence, chunks, chained=chained)
        found.append(statistics_of(kv, row))
        kv.memory.check()

    expected, got = found
    for statistic, numbers in expected.items():
        if statistic.startswith("low") and dtype != torch.float32:
            continue  # a rounded weight can be on either side of the threshold
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(
            got[statistic], numbers, atol=tolerance, rtol=tolerance, msg=statistic
        )


@pytest.mark.parametrize("name", ["gathered", "auto"])
def test_sums_of_a_bfloat16_model_do_not_saturate(name):
    """Every query attends to the first token only: a sum of 297; bfloat16 would stay at 292."""
    dtype, tokens = torch.bfloat16, 297
    choice = select_backend(name, CPU, dtype=dtype, head_dim=HEAD_DIM, scratch_bytes=1 << 20)
    sums = (AttentionSum(), SquareSum(), AttentionSum("max"))
    kv, sequence = make_kv(sums, backend=choice.backend, codec="bfloat16"), Sequence(tokens)
    sequence.query = torch.ones_like(sequence.query).to(dtype)
    sequence.key, sequence.value = torch.zeros_like(sequence.key), sequence.value.to(dtype)
    sequence.key[:, 0] = 99.0
    sequence.key = sequence.key.to(dtype)
    row = start(kv, sums)
    for first, end in [(0, 292), *((token, token + 1) for token in range(292, tokens))]:
        step(kv, {row: (sequence, first, end)})

    for numbers in statistics_of(kv, row).values():
        torch.testing.assert_close(numbers[:, 0], torch.full((4,), float(tokens)))


def test_scratch_of_recomputed_weights_is_bounded(monkeypatch):
    """Blocks of 100 elements: one or two queries each, and equal statistics."""
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


# ---- queries -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunks", "heads_apart"), [("whole", False), ("chunks", True), ("tokens", False)]
)
def test_query_ring_holds_the_newest_queries_at_position_modulo_window(chunks, heads_apart):
    kv, sequence, window = make_kv(OF_QUERIES, heads_apart=heads_apart), Sequence(TOKENS), 6
    row = start(kv, OF_QUERIES)
    run(kv, row, sequence, chunks)
    found = statistics_of(kv, row)["query_ring.6"]

    assert found.shape == (4, window, GROUP * HEAD_DIM + 1)
    for position in range(TOKENS - window, TOKENS):
        record = found[:, position % window]
        queries = sequence.query[list(FULL_LAYERS), position].reshape(4, -1)
        assert torch.equal(record[:, :-1], queries)
        assert record[:, -1].tolist() == [position + 1.0] * 4


def test_query_ring_marks_unused_records_with_zero():
    kv = make_kv(OF_QUERIES)
    row = start(kv, OF_QUERIES)
    step(kv, {row: (Sequence(TOKENS), 0, 4)})

    marks = statistics_of(kv, row)["query_ring.6"][:, :, -1]
    assert marks.tolist() == [[1, 2, 3, 4, 0, 0]] * 4


@pytest.mark.parametrize(
    ("chunks", "heads_apart"), [("whole", False), ("chunks", True), ("tokens", False)]
)
def test_query_moments_are_those_of_all_pre_rope_queries(chunks, heads_apart):
    kv, sequence, skip = make_kv(OF_QUERIES, heads_apart=heads_apart), Sequence(TOKENS), 3
    row = start(kv, OF_QUERIES)
    run(kv, row, sequence, chunks)
    found = statistics_of(kv, row)["query_moments.3"][:, 0].reshape(4, GROUP, -1)

    queries = sequence.raw[list(FULL_LAYERS), skip:].double()
    queries = queries.reshape(2, TOKENS - skip, NUM_KV_HEADS, GROUP, HEAD_DIM)
    sums = queries.sum(1).reshape(4, GROUP, -1)
    products = torch.einsum("lthgd,lthge->lhgde", queries, queries).reshape(4, GROUP, -1)
    assert found[:, :, 0].unique().tolist() == [TOKENS - skip]
    tolerance = {"atol": 1e-4, "rtol": 1e-5}  # float32 error of rotation and its inverse
    torch.testing.assert_close(found[:, :, 1 : 1 + HEAD_DIM].double(), sums, **tolerance)
    torch.testing.assert_close(found[:, :, 1 + HEAD_DIM :].double(), products, **tolerance)
    only_squares = statistics_of(kv, row)["query_moments.5.squares"][:, 0].reshape(4, GROUP, -1)
    later = queries[:, 5 - skip :].square().sum(1).reshape(4, GROUP, -1)
    assert only_squares[:, :, 0].unique().tolist() == [TOKENS - 5]
    torch.testing.assert_close(only_squares[:, :, 1 + HEAD_DIM :].double(), later, **tolerance)


@pytest.mark.parametrize("chunks", CHUNKS)
def test_residual_similarity_sums_the_cosines_of_all_tokens(chunks):
    kv, sequence = make_kv(OF_QUERIES), Sequence(TOKENS)
    row = start(kv, OF_QUERIES)
    run(kv, row, sequence, chunks)
    found = statistics_of(kv, row)["residual_similarity"]

    sums = sequence.cosines[list(FULL_LAYERS)].sum(1).repeat_interleave(2)
    torch.testing.assert_close(found[:, 0, 0], sums, atol=1e-5, rtol=1e-5)
    assert found[:, 0, 1].tolist() == [TOKENS] * 4


# ---- layers that read the same lanes -------------------------------------------------------------


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
        torch.testing.assert_close(
            got.view(expected.shape), expected, atol=1e-5, rtol=1e-5, msg=statistic.name
        )


# ---- the batch -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "heads_apart"), [("gathered", False), ("auto", True)])
def test_statistics_do_not_depend_on_the_rest_of_the_batch(name, heads_apart):
    """Rows with all, some and no statistics, at different lengths and in mixed steps."""
    kv = make_kv(ALL, backend=backend(name), heads_apart=heads_apart)
    requested_statistics = [ALL, (AttentionSum("max"), QueryRing(6)), (), ALL]
    rows = [start(kv, statistics) for statistics in requested_statistics]
    cuts = [
        chunk_ranges("chunks"),
        chunk_ranges("whole"),
        chunk_ranges("tokens"),
        chunk_ranges("tokens"),
    ]
    while any(cuts):
        due = {
            row: (Sequence(TOKENS, seed), *chunks.pop(0))
            for seed, (row, chunks) in enumerate(zip(rows, cuts, strict=True))
            if chunks
        }
        step(kv, due)

    for seed, (row, statistics, chunks) in enumerate(
        zip(rows, requested_statistics, ["chunks", "whole", "tokens", "tokens"], strict=True)
    ):
        alone = make_kv(ALL, backend=backend(name), heads_apart=heads_apart)
        other = start(alone, statistics)
        run(alone, other, Sequence(TOKENS, seed), chunks)
        found, expected = statistics_of(kv, row), statistics_of(alone, other)
        assert found.keys() == expected.keys() == {s.name for s in statistics}
        for statistic in expected:
            torch.testing.assert_close(
                found[statistic], expected[statistic], atol=1e-6, rtol=1e-6, msg=statistic
            )


class RecordsSumRequests:
    """A backend that records for which calls column sums were requested."""

    def __init__(self):
        self._inner, self.sums = backend("gathered"), []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def attend(self, *arguments, column_sums=None):
        self.sums.append(column_sums is not None)
        return self._inner.attend(*arguments, column_sums=column_sums)


def requested(statistics, rows, tokens):
    """For each of the three layers, whether a step requests column sums."""
    recording = RecordsSumRequests()
    kv = make_kv(statistics, backend=recording)
    step(kv, {start(kv, names): (Sequence(TOKENS), 0, tokens) for names in rows})
    return recording.sums


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
    assert requested(ALL, rows, tokens) == layers


@pytest.mark.parametrize("name", ["gathered", "auto"])
def test_attention_output_is_equal_with_and_without_statistics(name):
    outputs = []
    for statistics in ((), ALL):
        kv = make_kv(ALL, backend=backend(name))
        row = start(kv, statistics)
        outputs.append(
            [step(kv, {row: (Sequence(TOKENS), *chunks)}) for chunks in chunk_ranges("chunks")]
        )

    for plain, with_statistics in zip(*outputs, strict=True):
        assert torch.equal(plain, with_statistics)


def test_scratch_of_column_sums_is_reported():
    """Eight heads of 16 slots (13, rounded up to a cache line) for one row: 6 * 16 * 4 bytes."""
    kv = make_kv(SLOT_STATISTICS)
    assert kv.peak_scratch_bytes == 0
    step(kv, {start(kv, SLOT_STATISTICS): (Sequence(TOKENS), 0, 13)})

    assert kv.peak_scratch_bytes == NUM_HEADS * 16 * 4


# ---- evicted tokens, forked and swapped rows -----------------------------------------------------


@pytest.mark.parametrize("name", ["gathered", "auto"])
def test_statistics_of_an_evicted_token_are_cleared_before_its_slot_is_reused(name):
    kv, sequence, rng = (
        make_kv(SLOT_STATISTICS, backend=backend(name), heads_apart=True),
        Sequence(TOKENS),
        np,
    )
    row, lanes = start(kv, SLOT_STATISTICS), accounts(Sequence(TOKENS))
    for first, end in chunk_ranges("chunks"):
        step(kv, {row: (sequence, first, end)})
        for lane in lanes:
            for position in range(first, end):
                lane.see(position, SLOT_STATISTICS)
        if end in (13, 22, 30, 33):
            evict_random_tokens(kv, row, lanes, rng.random.default_rng(end))

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
