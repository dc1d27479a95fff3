"""Pages of shared scales whose slots move: encoded again from what attention read before.

A lane reader before and after an eviction gives the numbers of every token. Bounds are half a step
of the scales that the pages have then.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import InvariantError
from quire.kernels.gathered import GatheredAttention
from quire.kernels.reference_backend import ReferenceAttention, attend_reference
from quire.kv.compaction import Kind, commit_compaction, plan_compaction
from quire.kv.lane_reader import RowLanes, VectorReader
from quire.kv.resealing import Resealing
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
    CheckedMemory,
)

FORMATS = ["int4_page", "int2_page/int4:group=8", "int4/int4_page+residual=6+sinks=2"]
RECORDS = "int2_page+residual=8+promoted=3:int4"


def memory_of(text: str, *, heads_apart: bool = False, seed: int = 0, backend=GatheredAttention):
    attention = backend(CPU) if backend is GatheredAttention else backend()
    return CheckedMemory(
        f"{text}+plain=float32", attention, seed, evicting=True, heads_apart=heads_apart
    )


def read(
    checked: CheckedMemory, row: int, *, whole_window: bool = False
) -> dict[tuple[int, int], torch.Tensor]:
    """Key and value, one after the other, of each (head of the group, position)."""
    reader = RowLanes(checked.kv, "full", row)
    sides = (VectorReader(reader, plane, whole_window=whole_window) for plane in (KEY, VALUE))
    both = torch.cat([side.read() for side in sides], dim=2)
    return {
        (lane, position): both[lane, slot]
        for lane, of_lane in enumerate(reader.positions.tolist())
        for slot, position in enumerate(of_lane)
        if position >= 0
    }


def evict(checked: CheckedMemory, row: int, kind: Kind, share: float = 0.3) -> None:
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


def half_steps(checked: CheckedMemory, row: int) -> torch.Tensor:
    """The largest scale of all pages of a row, halved, for each element of key and value."""
    coded = checked.kv.store.views(checked.memory.tables["full"].group.page_class).coded
    pages = torch.from_numpy(checked.memory.tables["full"].row_pages(row)).long()
    scales = [side.planes[1][pages].float() for side in (coded.key, coded.value)]
    halves = torch.tensor([float(x[x.isfinite()].max()) / 2 for x in scales])
    return halves.repeat_interleave(torch.tensor(DIMS))


def attend(checked: CheckedMemory, row: int, tokens: int) -> None:
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
            expected, _ = attend_reference(
                query[-1:, heads],
                seen[:, None, :HEAD_DIM],
                seen[:, None, HEAD_DIM:],
                math=MATH,
                query_positions=torch.tensor([len(seen)]),
                key_positions=torch.arange(len(seen)),
            )
            torch.testing.assert_close(out[-1:, heads], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [Kind.FILL_HOLES, Kind.KEEP_ORDER])
@pytest.mark.parametrize("text", FORMATS)
@settings(max_examples=5)
@given(seed=st.integers(0, 10_000), apart=st.booleans())
def test_retained_tokens_differ_by_half_a_step_of_their_new_pages(text, kind, seed, apart):
    checked = memory_of(text, heads_apart=apart, seed=seed)
    row = checked.start()
    checked.step({row: int(checked.rng.integers(5, 40))})
    for _ in range(4):
        before = read(checked, row, whole_window=True)

        evict(checked, row, kind)

        after, bound = read(checked, row), half_steps(checked, row) + 1e-4
        assert after.keys() <= before.keys()
        for token, numbers in after.items():
            assert ((numbers - before[token]).abs() <= bound).all()
        for tokens in (1, 1, int(checked.rng.integers(1, 9))):
            attend(checked, row, tokens)


def test_a_page_without_moved_slots_keeps_its_codes():
    checked = memory_of("int4_page")
    row = checked.start()
    checked.step({row: 5 * PAGE})
    before = read(checked, row)
    keep = np.ones((checked.memory.tables["full"].group.num_lanes, 5 * PAGE), dtype=bool)
    keep[:, PAGE : PAGE + 2] = False
    mover = Resealing(checked.kv, "full", 1 << 20)

    commit_compaction(
        checked.memory, plan_compaction(checked.memory, "full", row, keep), movers={"full": mover}
    )

    after = read(checked, row)
    untouched = [*range(PAGE), *range(2 * PAGE, 4 * PAGE)]
    assert all(torch.equal(after[lane, p], before[lane, p]) for lane in range(4) for p in untouched)
    assert mover.num_encoded == checked.memory.tables["full"].group.num_lanes


def test_a_channel_whose_range_holds_the_new_token_keeps_its_codes():
    """Tokens within the range of a page move into it: the other tokens do not change at all."""
    checked = memory_of("int4_page")
    codec = checked.account.codecs[0]
    page = torch.tensor([0.0, 1.0, 3.0, 7.0])[None, :, None].expand(1, 4, HEAD_DIM).contiguous()
    planes = codec.encode(page)
    moved = codec.decode(planes).clone()
    moved[:, 1] = 2.2

    again = codec.encode_again(moved, planes, torch.tensor([True]))

    decoded = codec.decode(again)
    stays = [0, 2, 3]
    assert torch.equal(decoded[:, stays], codec.decode(planes)[:, stays])
    assert ((decoded[:, 1] - 2.2).abs() <= planes[1].float() / 2 + 1e-6).all()


def test_a_token_outside_of_the_range_widens_it():
    codec = memory_of("int4_page").account.codecs[0]
    page = torch.linspace(0, 1, 4)[None, :, None].expand(1, 4, HEAD_DIM).contiguous()
    planes = codec.encode(page)
    moved = codec.decode(planes).clone()
    moved[:, 1] = 9.0

    decoded = codec.decode(codec.encode_again(moved, planes, torch.tensor([True])))

    assert (decoded - moved).abs().max() <= 9 / 15 / 2 + 1e-3


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
    attend(checked, row, 1)
    final = read(checked, row)
    assert any(not torch.equal(final[0, p], before[0, p]) for p in (5, 6, 9))


@pytest.mark.parametrize("backend", [GatheredAttention, ReferenceAttention])
def test_shared_pages_are_copied_before_they_are_encoded_again(backend):
    checked = memory_of("int4_page", backend=backend)
    row = checked.start()
    checked.step({row: 30})
    other = checked.fork(row)
    before = read(checked, other)

    evict(checked, row, Kind.FILL_HOLES)

    after = read(checked, other)
    assert all(torch.equal(after[token], before[token]) for token in before)
    attend(checked, row, 3)
    attend(checked, other, 3)


@pytest.mark.parametrize("kind", [Kind.FILL_HOLES, Kind.KEEP_ORDER])
def test_a_swapped_row_continues_as_if_it_had_stayed(kind):
    checked = memory_of(FORMATS[0], seed=3)
    row = checked.start()
    checked.step({row: 30})
    evict(checked, row, kind)
    before = read(checked, row)

    row = checked.swap(row)

    after = read(checked, row)
    assert all(torch.equal(after[token], before[token]) for token in before)
    attend(checked, row, 6)


def test_slots_of_pages_with_shared_scales_do_not_move_without_a_mover():
    checked = memory_of("int4_page")
    row = checked.start()
    checked.step({row: 12})
    keep = np.ones((checked.memory.tables["full"].group.num_lanes, 12), dtype=bool)
    keep[:, 1] = False

    with pytest.raises(InvariantError, match="the codec encodes whole pages"):
        commit_compaction(checked.memory, plan_compaction(checked.memory, "full", row, keep))
