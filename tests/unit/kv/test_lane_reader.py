"""Lane readers: slots of a sequence by position, one lane per KV head, and masks back to slots."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import PolicyError
from quire.kv.lane_reader import LaneReader
from quire.layout.statistics import AttentionSum, QueryRing
from support.statistics_account import FULL_LAYERS, HEAD_DIM, Sequence, evict, make_kv, start, step

STATISTICS = (AttentionSum(), QueryRing(4))


def evicted_row(heads_apart, seed, page_tokens=4):
    """A row after three evictions, and the expected positions of each lane."""
    kv, sequence = (
        make_kv(STATISTICS, heads_apart=heads_apart, page_tokens=page_tokens),
        Sequence(40),
    )
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
                evicted = rng.random(int((reader.positions[lane] >= 0).sum())) < rng.choice(
                    [0.1, 0.6]
                )
            if not heads_apart:
                evicted[:] = (
                    np.arange(len(evicted)) % 3 == 1
                )  # lanes of a group of layers: equal counts
            keep[lane, : len(evicted)] = torch.from_numpy(~evicted)
            held[lane] = [
                p for p, is_evicted in zip(held[lane], evicted, strict=True) if not is_evicted
            ]
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


def test_reader_of_one_layer_equals_its_part_of_all_layers():
    kv, _, row, _ = evicted_row(heads_apart=True, seed=1)
    whole = LaneReader(kv, "full", row)
    for layer in range(2):
        part, lanes = (
            LaneReader(kv, "full", row, range(layer, layer + 1)),
            slice(2 * layer, 2 * layer + 2),
        )
        width = part.positions.shape[1]
        assert part.layers == (FULL_LAYERS[layer],)
        assert torch.equal(part.positions, whole.positions[lanes, :width])
        assert torch.equal(part.keys(), whole.keys()[lanes, :width])
        for name, numbers in part.statistics.items():
            expected = whole.statistics[name][lanes]
            assert torch.equal(numbers, expected if "ring" in name else expected[:, :width])
        mask = part.positions >= 0
        assert part.unsort(mask).sum(axis=1).tolist() == mask.sum(dim=1).tolist()


def test_different_masks_of_heads_in_one_page_are_rejected():
    kv, _, row, _ = evicted_row(heads_apart=False, seed=0)
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


def test_empty_row_has_no_slots():
    kv = make_kv(STATISTICS)
    reader = LaneReader(kv, "full", start(kv, STATISTICS))

    assert reader.positions.shape == (4, 0)
    assert reader.keys().shape == (4, 0, HEAD_DIM)
