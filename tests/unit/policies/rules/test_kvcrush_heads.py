"""KVCrush with one retained set per KV head, and best picks."""

import numpy as np
import pytest
import torch

from quire.policies.average import Average
from quire.policies.base import LANE, LAYER
from quire.policies.budgets.ada import Ada
from quire.policies.eviction import Eviction
from quire.policies.expected_attention import ExpectedAttention
from quire.policies.h2o import H2O
from quire.policies.kmeans import KMeans
from quire.policies.kvcrush import KVCrush
from quire.policies.kvcrush_openvino import KVCrushOpenVINO
from quire.policies.roco import RoCo
from quire.policies.signatures import anchors, context
from quire.policies.signatures.context import aligned_words
from quire.policies.snapkv import SnapKV
from support.histories import changed, retained_positions
from support.native_selection import without_native_selection
from support.pairwise import every_pair
from support.plain_kvcrush import history_of, plain_kvcrush, ragged_history

BASES = [H2O(recent=4, sinks=2), SnapKV(window=4), RoCo(sinks=1, recent=2)]
BASE = BASES[0]
ANCHORS = [anchors.RANDOM, anchors.ALTERNATING, anchors.MEAN, anchors.ZEROS, anchors.ONES]


def check(history, policy, keep, piece=1):
    view = history.view(policy.statistics)
    keep_counts = torch.tensor(keep if isinstance(keep, list) else [keep] * len(view.positions))

    retained = retained_positions(view, policy.select(view, keep_counts, piece))

    assert retained == plain_kvcrush(history, policy, keep, piece)


@every_pair(anchor=ANCHORS, base=BASES[:2], group=[1, 3])
def test_sets_of_heads_equal_the_plain_version(base, anchor, group):
    for seed in range(3):
        policy = KVCrush(base=base, anchor=anchor, share=0.5, seed=seed, sets="head")
        check(history_of(group=group, seed=seed), policy, 30)
        check(ragged_history(group=group, seed=seed), policy, 26)


@pytest.mark.parametrize("piece", [2, 5])
def test_sets_of_heads_with_pieces_equal_the_plain_version(piece):
    for seed in range(3):
        policy = KVCrush(base=BASE, share=0.5, sets="head")
        check(history_of(tokens=90, seed=seed), policy, 50, piece)
        check(ragged_history(tokens=90, seed=seed), policy, 50, piece)


def test_heads_retain_their_own_number_of_tokens():
    check(ragged_history(), KVCrush(base=BASE, share=0.5, sets="head"), [20, 26, 31, 24])


@pytest.mark.parametrize("base", [H2O(recent=4), SnapKV(window=4), Average(), ExpectedAttention()])
def test_heads_without_representatives_retain_what_the_base_rule_retains(base):
    policy = KVCrush(base=base, share=0.0, sets="head")
    history = history_of()
    view = history.view((*policy.statistics, *base.statistics))
    keep = torch.full((4,), 30)

    assert torch.equal(policy.select(view, keep), base.select(view, keep))


@pytest.mark.parametrize("form", [KMeans, KVCrushOpenVINO])
def test_variants_have_sets_of_heads(form):
    policy = form(base=BASE, sets="head")
    view = ragged_history(tokens=90).view(policy.statistics)
    retained = policy.select(view, torch.full((4,), 52), 4)

    assert policy.scope == LANE
    assert form(base=BASE).scope == LAYER
    assert not torch.equal(view.positions[0][retained[0]], view.positions[1][retained[1]])


@every_pair(sets=["layer", "head"], piece=[1, 3])
def test_best_pick_is_the_highest_score_of_a_slice(sets, piece):
    for seed in range(3):
        policy = KVCrush(base=BASE, share=0.5, sets=sets, pick="best")
        check(history_of(tokens=90, seed=seed), policy, 50, piece)


def test_layers_that_evict_nothing_pick_nothing():
    history = history_of(tokens=60)
    policy = KVCrush(base=BASE, share=0.5, sets="head", pick="best")
    view = history.view(policy.statistics)
    held = view.num_slots[:, 0]
    keep = torch.where(torch.arange(len(held)) < history.heads, held, 30)

    assert policy.select(view, keep).sum(dim=1).tolist() == keep.tolist()


# ---- alignment ---------------------------------------------------------------------------------


@pytest.mark.parametrize("max_spread", [0, 99])
@pytest.mark.parametrize("group", [1, 3, 40])
def test_aligned_words_are_the_bits_of_all_heads_by_token(monkeypatch, group, max_spread):
    monkeypatch.setattr(context, "MAX_SPREAD", max_spread)
    history = ragged_history(group=1)
    positions = history.view().positions.numpy()
    rng = np.random.default_rng(0)
    bits = rng.random((4, group, positions.shape[1])) < 0.5
    must = (positions >= 0) & (rng.random(positions.shape) < 0.2)
    columns = slice(3, 21)

    found = aligned_words(bits[:, :, columns], must, positions, 2, columns)

    unpacked = anchors.unpack(found, 2 * group)
    inside = (np.arange(positions.shape[1]) >= 3) & (np.arange(positions.shape[1]) < 21)
    every = (bits & inside) | must[:, None]
    for lane in range(4):
        for column in range(18):
            position = positions[lane, 3 + column]
            for other in (lane // 2 * 2, lane // 2 * 2 + 1):
                at = np.flatnonzero(positions[other] == position)
                expected = every[other, :, at[0]] if len(at) else np.zeros(group, dtype=bool)
                first = other % 2 * group
                part = unpacked[lane, column, first : first + group]
                assert position < 0 or (part == expected).all()


# ---- budgets over heads --------------------------------------------------------------------------


def test_ada_divides_a_layer_over_the_sets_of_heads():
    """Heads retain unequal numbers, the same total, and as many representatives as their number."""
    history = history_of()
    policy = KVCrush(base=BASE, share=0.5, sets="head")
    view = history.view(policy.statistics)
    keep = torch.full((4,), 30)
    eviction = Eviction(policy=policy, budget=Ada(floor=0.0))

    retained = eviction.select(view, keep)
    counts = retained.sum(dim=1)

    assert view.by_layer(counts).sum(dim=1).tolist() == [60, 60]
    assert len(set(counts.tolist())) > 1
    assert retained_positions(view, retained) == plain_kvcrush(history, policy, counts.tolist())


# ---- C library -----------------------------------------------------------------------------------


def float32(view):
    statistics = {name: numbers.float() for name, numbers in view.statistics.items()}
    return changed(view, statistics=statistics)


@every_pair(
    anchor=["mean", "random"],
    pick=["middle", "best", "random"],
    sets=["layer", "head"],
    base=BASES[:2],
)
def test_the_c_library_and_numpy_decide_the_same(monkeypatch, base, sets, pick, anchor):
    policy = KVCrush(base=base, share=0.5, sets=sets, pick=pick, anchor=anchor)
    histories = [history_of(tokens=90, group=3, seed=seed) for seed in range(3)]
    if sets == "head":
        histories += [ragged_history(tokens=90, group=16, seed=seed) for seed in range(2)]
        histories += [ragged_history(tokens=90, group=40)]  # more heads than bits of a word
    views = [float32(history.view(policy.statistics)) for history in histories]
    keep = torch.full((4,), 50)
    found = [policy.select(view, keep, piece) for view in views for piece in (1, 3)]

    without_native_selection(monkeypatch)
    expected = [policy.select(view, keep, piece) for view in views for piece in (1, 3)]

    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
