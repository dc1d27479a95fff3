"""Tokens in full precision, promoted or encoded again, against an account token by token."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ConfigError, InvariantError
from quire.kernels.gathered import GatheredAttention
from quire.kernels.reference_backend import ReferenceAttention, attend_reference
from quire.kernels.token_precision import records_of
from quire.kv.compaction import Kind, commit_compaction, plan_compaction
from quire.kv.lane_reader import LaneReader, RowLanes, VectorReader
from quire.kv.resealing import Resealing
from quire.kv.sharing import (
    reference_pages,
    reference_statistics,
    referenced_statistics_pages,
    start_from_references,
)
from quire.kv.step import StepAttention
from quire.layout.pages import KEY, VALUE
from support.full_precision_account import (
    CPU,
    DIMS,
    HEAD_DIM,
    MATH,
    MODEL,
    NUM_HEADS,
    NUM_KV_HEADS,
    PAGE,
    WINDOW,
    CheckedMemory,
    play,
)
from support.lanes import AllPages

FORMATS = ["int4+residual=5", "int4+sinks=3", "int8/int4+sinks=2+residual=6", "int4_page/int4"]
FORMATS += ["int4_page/int8+sinks=1", "int2_page+residual=2", "int4_page/int4+sinks=2+residual=7"]


ALL_PAGES = AllPages(text="", pages=6, dense_layers=0)


def memory_of(text, *, heads_apart=False, seed=0, backend=GatheredAttention, sparse=None):
    attention, form = backend(CPU) if backend is GatheredAttention else backend(), "plain=float32"
    options = {"evicting": True, "heads_apart": heads_apart, "sparse": sparse}
    return CheckedMemory(f"{text}+{form}", attention, seed, **options)


def by_turns(formats, others):
    """Every format with every one of the others; fast with one of them, by turns."""
    return [
        pytest.param(text, other, marks=[] if i % len(others) == j else [pytest.mark.slow])
        for i, text in enumerate(formats)
        for j, other in enumerate(others)
    ]


@pytest.mark.parametrize(("text", "backend"), by_turns(FORMATS, ("gathered", "reference")))
@settings(max_examples=2)
@given(seed=st.integers(0, 10_000))
def test_attention_equals_the_account_for_all_chunk_lengths(text, backend, seed):
    attention = GatheredAttention(CPU) if backend == "gathered" else ReferenceAttention()
    play(CheckedMemory(f"{text}+plain=float32", attention, seed))


@pytest.mark.parametrize("heads_apart", [False, True])
@pytest.mark.parametrize("text", [text for text in FORMATS if "page" not in text])
@settings(max_examples=2)
@given(seed=st.integers(0, 10_000))
def test_attention_equals_the_account_after_token_evictions(text, heads_apart, seed):
    for sparse in (None, ALL_PAGES):
        checked = memory_of(text, heads_apart=heads_apart, seed=seed, sparse=sparse)
        play(checked, checked.evict_tokens)


@pytest.mark.parametrize(("text", "heads_apart"), by_turns(FORMATS, (False, True)))
@settings(max_examples=2)
@given(seed=st.integers(0, 10_000))
def test_attention_equals_the_account_after_page_evictions(text, heads_apart, seed):
    for sparse in (None, ALL_PAGES):
        checked = memory_of(text, heads_apart=heads_apart, seed=seed, sparse=sparse)
        play(checked, checked.evict_pages)


@pytest.mark.parametrize("text", FORMATS)
def test_tokens_of_a_step_in_parts_are_stored_as_in_a_chunk(text):
    """As parts of a chunk with other RoPE, or recomputed outputs with sparse attention."""
    found, counts = [], ((11,), (5, 6), (1, 4, 1, 5))
    for parts in counts:
        checked = memory_of(text)
        row = np.array([checked.start()])
        checked.memory.grow(row, np.array([11], dtype=np.int32))
        drawn = [checked.draw(11) for _ in MODEL.layers]
        first = 0
        for count in parts:
            tokens, later = (np.array([x], dtype=np.int32) for x in (count, 11 - first - count))
            step = StepAttention(checked.kv, row, tokens, later=later)
            for layer, vectors in enumerate(drawn):
                step.attend(layer, MATH, *(x[first : first + count] for x in vectors))
            first += count
        checked.memory.grow(row, np.array([1], dtype=np.int32))
        step = StepAttention(checked.kv, row, np.array([1], dtype=np.int32))
        found.append([step.attend(i, MATH, *checked.draw(1)) for i in range(len(MODEL.layers))])
    for parts in found[1:]:
        for one, other in zip(found[0], parts, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_rows_with_sinks_can_be_truncated_and_with_a_residual_window_to_zero_only():
    """The newest tokens of an earlier length are no longer in full precision."""
    checked = CheckedMemory("int4_page/int4+plain=float32", GatheredAttention(CPU))
    row = checked.start()
    checked.step({row: 7})

    with pytest.raises(ConfigError, match=r"newest 3 tokens .* truncated from 7 to 6"):
        checked.memory.truncate(row, 6)
    checked.memory.truncate(row, 7)
    checked.memory.truncate(row, 0)

    checked.memory.check()
    assert not checked.memory.row_bytes(row)

    checked = CheckedMemory("int4+sinks=3+plain=float32", GatheredAttention(CPU))
    row = checked.start()
    checked.step({row: 7})

    checked.memory.truncate(row, 5)

    _, lanes = checked.account.rows[row]
    for lane in lanes:
        del lane.pages[1][1:]
    checked.account.rows[row] = (5, lanes)
    checked.step({row: 1})
    checked.step({row: 3})


PROMOTED_FORMATS = [
    "int2+residual=6+promoted=3:int8",
    "int4+sinks=2+residual=4+promoted=2:int4/fp8",
    "int4:group=8/int2+residual=9+promoted=5:int8/int4_outliers",
]


def recorded_positions(checked, row):
    """Positions of the tokens with a record, [lanes, records]; -1 for free records."""
    buffer = checked.kv.promoted["full"]
    return buffer.marks[torch.from_numpy(buffer.table.pages[row, :, 0]).long()].long().numpy() - 1


def promote_and_evict(checked, row, *, pages=False):
    """Promote random tokens of each lane, then evict some tokens or pages."""
    buffer = checked.kv.promoted["full"]
    window = checked.kv.full_precision["full"]
    length = int(checked.memory.lengths[row])
    reader = LaneReader(checked.kv, "full", row)
    found = recorded_positions(checked, row)
    per_layer = len(found) // 2
    for lane, positions in enumerate(reader.lane_positions):
        found[lane][~np.isin(found[lane], positions)] = -1
        newest = positions[(positions >= length - window.tokens.recent) & (positions >= 0)]
        candidates = checked.rng.permutation(np.setdiff1d(newest, found[lane]))
        free = np.flatnonzero(found[lane] < 0)
        chosen = candidates[: min(len(free), int(checked.rng.integers(4)))].astype(np.int64)
        at = np.full(len(chosen), lane), free[: len(chosen)]
        index = np.searchsorted(positions[: np.count_nonzero(positions >= 0)], chosen)
        key, value = (VectorReader(reader, plane).lost(at[0], index) for plane in (KEY, VALUE))
        buffer.put(row, at, chosen, (key, value))
        heads = range(2) if per_layer == 1 else range(lane % 2, lane % 2 + 1)
        for position in chosen.tolist():
            checked.account.promote_token(row, (0, 2)[lane // per_layer], position, heads)
    checked.compare(row)
    (checked.evict_pages if pages else checked.evict_tokens)(row)


@pytest.mark.parametrize(
    ("text", "heads_apart", "backend"),
    [
        pytest.param(text, apart, backend, marks=[] if (i + j + k) % 2 == 0 else [pytest.mark.slow])
        for i, text in enumerate(PROMOTED_FORMATS)
        for j, apart in enumerate((False, True))
        for k, backend in enumerate(("gathered", "reference"))
    ],
)
@settings(max_examples=2)
@given(seed=st.integers(0, 10_000), pages=st.booleans(), sparse=st.sampled_from([None, ALL_PAGES]))
def test_attention_equals_the_account_with_promoted_tokens(
    text, heads_apart, backend, seed, pages, sparse
):
    attention = GatheredAttention if backend == "gathered" else ReferenceAttention
    options = {"heads_apart": heads_apart, "seed": seed, "sparse": sparse}
    checked = memory_of(text, backend=attention, **options)

    play(checked, lambda row: promote_and_evict(checked, row, pages=pages))

    rows = checked.account.rows
    pages = [page for _, lanes in rows.values() for lane in lanes for page in lane.pages]
    records = sum(np.count_nonzero(recorded_positions(checked, row) >= 0) for row in rows)
    assert records >= sum(bool(token.promoted) for page in pages for token in page)


def test_cached_prefix_is_shared_without_records():
    """Pages without records are not copied."""
    checked = memory_of(PROMOTED_FORMATS[0])
    row = checked.start()
    checked.step({row: 2 * PAGE})
    assert (recorded_positions(checked, row) == -1).all()  # cleared, with any previous content
    free_bytes = checked.memory.free_bytes
    pages = referenced_statistics_pages(checked.memory, row)
    statistics = reference_statistics(checked.memory, row)
    copied = sum(page_class.page_bytes * n for page_class, n in pages.items())

    assert set(statistics.pages) == {"full.full_precision", f"window_{WINDOW}.full_precision"}
    assert free_bytes - checked.memory.free_bytes == copied
    shared_row = start_from_references(
        checked.memory, [reference_pages(checked.memory, row, 0, 2 * PAGE)], statistics
    )
    assert (recorded_positions(checked, shared_row) == -1).all()
    checked.memory.check()


def test_records_of_returns_minus_one_without_record_in_memory_for_the_lane_only():
    marks = torch.tensor([[0, 8, 3], [0, 0, 0]], dtype=torch.int32)
    positions = torch.tensor([[2, 7, 0, 999, -1], [2, 7, 0, -50, 1 << 30]])

    found = records_of(marks, positions)

    assert found.tolist() == [[2, 1, -1, -1, -1], [-1] * 5]

    # A table of all possible positions would need a terabyte.
    furthest = (1 << 31) - 2
    marks = torch.tensor([[0, furthest + 1]], dtype=torch.int32).repeat(64, 1)
    positions = torch.tensor([[0, furthest - 1, furthest]]).repeat(64, 1)

    assert records_of(marks, positions).tolist() == [[-1, -1, 1]] * 64


PAGE_FORMATS = ["int4_page", "int2_page/int4:group=8", "int4/int4_page+residual=6+sinks=2"]


def read(checked, row, *, whole_window=False):
    """Key and value, one after the other, of each (head of the group, position)."""
    reader = RowLanes(checked.kv, "full", row)
    sides = (VectorReader(reader, plane, whole_window=whole_window) for plane in (KEY, VALUE))
    both = torch.cat([side.read() for side in sides], dim=2)
    live = (reader.positions >= 0).nonzero().tolist()
    return {(lane, int(reader.positions[lane, slot])): both[lane, slot] for lane, slot in live}


def evict_lanes(checked, row, kind, share=0.3):
    """Evict random tokens, others in each lane of the table; at least two remain."""
    table = checked.memory.tables["full"]
    held = table.num_slots[row]
    keep = checked.rng.random((len(held), int(held.max()))) >= share
    keep[:, :2] = True
    if kind is Kind.KEEP_ORDER:  # all lanes retain as many
        keep[:] = keep[:1]
    plan = plan_compaction(checked.memory, "full", row, keep, kind)
    commit_compaction(checked.memory, plan, movers={"full": Resealing(checked.kv, "full", 1)})
    checked.memory.check()


def half_steps(checked, row):
    """The largest scale of all pages of a row, halved, for each element of key and value."""
    coded = checked.kv.store.views(checked.memory.tables["full"].group.page_class).coded
    pages = torch.from_numpy(checked.memory.tables["full"].row_pages(row)).long()
    scales = [side.planes[1][pages].float() for side in (coded.key, coded.value)]
    halves = torch.tensor([float(x[x.isfinite()].max()) / 2 for x in scales])
    return halves.repeat_interleave(torch.tensor(DIMS))


def attend_and_compare(checked, row, tokens):
    """Run a step without the account, and compare it with attention over what a reader returns."""
    checked.memory.grow(np.array([row]), np.array([tokens], dtype=np.int32))
    step = StepAttention(checked.kv, np.array([row]), np.array([tokens], dtype=np.int32))
    found = []
    for layer in range(len(MODEL.layers)):
        vectors = checked.draw(tokens)
        found.append((vectors[0], step.attend(layer, MATH, *vectors)))
    after = read(checked, row)
    for number, layer in enumerate((0, 2)):
        query, out = found[layer]
        for head in range(NUM_KV_HEADS):
            lane = number * NUM_KV_HEADS + head
            seen = torch.stack([x for (own, _), x in after.items() if own == lane])
            group = NUM_HEADS // NUM_KV_HEADS
            heads = slice(head * group, (head + 1) * group)
            at = {"query_positions": torch.tensor([len(seen)])}
            at["key_positions"] = torch.arange(len(seen))
            vectors = query[-1:, heads], seen[:, None, :HEAD_DIM], seen[:, None, HEAD_DIM:]
            expected, _ = attend_reference(*vectors, math=MATH, **at)
            torch.testing.assert_close(out[-1:, heads], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [Kind.FILL_HOLES, Kind.KEEP_ORDER])
@pytest.mark.parametrize("text", PAGE_FORMATS)
@settings(max_examples=5)
@given(seed=st.integers(0, 10_000), apart=st.booleans())
def test_retained_tokens_differ_by_half_a_step_of_their_new_pages(text, kind, seed, apart):
    checked = memory_of(text, heads_apart=apart, seed=seed)
    row = checked.start()
    checked.step({row: int(checked.rng.integers(5, 40))})
    for _ in range(4):
        before = read(checked, row, whole_window=True)

        evict_lanes(checked, row, kind)

        after, bound = read(checked, row), half_steps(checked, row) + 1e-4
        assert after.keys() <= before.keys()
        for token, numbers in after.items():
            assert ((numbers - before[token]).abs() <= bound).all()
        for tokens in (1, 1, int(checked.rng.integers(1, 9))):
            attend_and_compare(checked, row, tokens)


def test_a_page_without_moved_slots_keeps_its_codes_and_none_moves_without_a_mover():
    checked = memory_of("int4_page")
    row = checked.start()
    checked.step({row: 5 * PAGE})
    before = read(checked, row)
    keep = np.ones((checked.memory.tables["full"].group.num_lanes, 5 * PAGE), dtype=bool)
    keep[:, PAGE : PAGE + 2] = False
    mover = Resealing(checked.kv, "full", 1 << 20)

    plan = plan_compaction(checked.memory, "full", row, keep)
    commit_compaction(checked.memory, plan, movers={"full": mover})

    after = read(checked, row)
    untouched = [*range(PAGE), *range(2 * PAGE, 4 * PAGE)]
    assert all(torch.equal(after[lane, p], before[lane, p]) for lane in range(4) for p in untouched)
    assert mover.num_encoded == checked.memory.tables["full"].group.num_lanes

    checked = memory_of("int4_page")
    row = checked.start()
    checked.step({row: 12})
    keep = np.ones((checked.memory.tables["full"].group.num_lanes, 12), dtype=bool)
    keep[:, 1] = False

    with pytest.raises(InvariantError, match="the codec encodes whole pages"):
        commit_compaction(checked.memory, plan_compaction(checked.memory, "full", row, keep))


@pytest.mark.parametrize(("number", "widens"), [(2.2, False), (9.0, True)])
def test_a_channel_whose_range_holds_the_new_token_keeps_its_codes(number, widens):
    """Tokens within the range of a page move into it: the other tokens do not change at all."""
    codec = memory_of("int4_page").account.codecs[0]
    page = torch.tensor([0.0, 1.0, 3.0, 7.0])[None, :, None].expand(1, 4, HEAD_DIM).contiguous()
    planes = codec.encode(page)
    moved = codec.decode(planes).clone()
    moved[:, 1] = number
    decoded = codec.decode(codec.encode_again(moved, planes, torch.tensor([True])))

    if widens:
        assert (decoded - moved).abs().max() <= 9 / 15 / 2 + 1e-3
    else:
        assert torch.equal(decoded[:, [0, 2, 3]], codec.decode(planes)[:, [0, 2, 3]])
        assert ((decoded[:, 1] - number).abs() <= planes[1].float() / 2 + 1e-6).all()


def test_tokens_of_the_last_page_are_in_full_precision_until_it_is_full():
    """Seven of 13 slots remain in order: three tokens are relocated to a page that is open."""
    checked = memory_of("int2_page")
    row = checked.start()
    checked.step({row: 13})
    lanes = checked.memory.tables["full"].group.num_lanes
    keep = np.zeros((lanes, 13), dtype=bool)
    keep[:, [0, 1, 2, 3, 5, 6, 9]] = True
    before = read(checked, row)

    plan = plan_compaction(checked.memory, "full", row, keep, Kind.KEEP_ORDER)
    commit_compaction(checked.memory, plan, movers={"full": Resealing(checked.kv, "full", 1 << 20)})

    after = read(checked, row)
    assert all(torch.equal(after[0, p], before[0, p]) for p in (0, 1, 2, 3, 5, 6, 9))
    attend_and_compare(checked, row, 1)
    final = read(checked, row)
    assert any(not torch.equal(final[0, p], before[0, p]) for p in (5, 6, 9))


@pytest.mark.parametrize("backend", [GatheredAttention, ReferenceAttention])
def test_shared_pages_are_copied_before_they_are_encoded_again(backend):
    checked = memory_of("int4_page", backend=backend)
    row = checked.start()
    checked.step({row: 30})
    other = checked.fork(row)
    before = read(checked, other)

    evict_lanes(checked, row, Kind.FILL_HOLES)

    after = read(checked, other)
    assert all(torch.equal(after[token], before[token]) for token in before)
    attend_and_compare(checked, row, 3)
    attend_and_compare(checked, other, 3)


@pytest.mark.parametrize("kind", [Kind.FILL_HOLES, Kind.KEEP_ORDER])
def test_a_swapped_row_continues_as_if_it_had_stayed(kind):
    checked = memory_of(PAGE_FORMATS[0], seed=3)
    row = checked.start()
    checked.step({row: 30})
    evict_lanes(checked, row, kind)
    before = read(checked, row)

    row = checked.swap(row)

    after = read(checked, row)
    assert all(torch.equal(after[token], before[token]) for token in before)
    attend_and_compare(checked, row, 6)
