"""KVCrush and its variants, compared with plain implementations."""

from dataclasses import replace
from math import ceil

import numpy as np
import pytest
import torch

from quire.errors import ConfigError, UnknownName, UnsoundCombination
from quire.layout.statistics import AttentionSum, LowAttentionCount
from quire.policies.average import Average
from quire.policies.eviction import LaneShape, make_eviction
from quire.policies.h2o import H2O
from quire.policies.kvcrush import KVCrush
from quire.policies.kvcrush_openvino import KVCrushOpenVINO
from quire.policies.recent import Recent
from quire.policies.roco import RoCo
from quire.policies.scissorhands import Scissorhands
from quire.policies.signatures import anchors
from quire.policies.signatures.anchors import hamming
from quire.policies.signatures.query_heads import by_query_head, first_heads
from quire.policies.snapkv import SnapKV
from quire.policies.value_norm import ValueNorm
from quire.policies.view import KVView
from support.histories import best, retained_positions
from support.native_selection import without_native_selection
from support.pairwise import every_pair
from support.plain_kvcrush import (
    history_of,
    of_layers,
    pieces_of,
    plain_anchor,
    plain_distance,
    plain_kvcrush,
)

BASES = [H2O(recent=4, sinks=2), H2O(power=2), SnapKV(window=4)]
BASE = BASES[0]
PLAIN_ANCHORS = [anchors.RANDOM, anchors.ALTERNATING, anchors.MEAN, anchors.ZEROS, anchors.ONES]


def check(history, policy, keep, piece=1):
    view = history.view(policy.statistics)
    keep_counts = torch.full((len(view.positions),), keep)

    retained = retained_positions(view, policy.select(view, keep_counts, piece))

    assert retained == plain_kvcrush(history, policy, keep, piece)
    assert len(retained[0]) < len(history.cached[0])


# ---- kvcrush -----------------------------------------------------------------------------------


@every_pair(anchor=PLAIN_ANCHORS, base=BASES, group=[1, 3])
def test_kvcrush_equals_the_plain_kvcrush(base, anchor, group):
    for seed in range(3):
        history = history_of(group=group, seed=seed)
        check(history, KVCrush(base=base, anchor=anchor, share=0.5, seed=seed), 30)


@pytest.mark.parametrize("anchor", [anchors.MEAN, anchors.ALTERNATING])
@pytest.mark.parametrize("piece", [2, 5])
def test_kvcrush_with_pieces_equals_the_plain_kvcrush(piece, anchor):
    for seed in range(3):
        history = history_of(tokens=90, seed=seed)
        check(history, KVCrush(base=BASE, anchor=anchor, share=0.5), 50, piece)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.3, 0.9])
def test_share_sets_the_number_of_representatives(share):
    check(history_of(), KVCrush(base=BASE, share=share), 36)


def test_kvcrush_with_more_query_heads_than_bits_of_a_word():
    """80 query heads: two words."""
    check(history_of(tokens=30, group=40), KVCrush(base=BASE, share=0.5), 18)


@pytest.mark.parametrize("piece", [1, 3])
def test_layers_of_different_length_evict_their_own_number(piece):
    history = history_of(tokens=80)
    num_cached = len(history.cached[0])
    history.cached[0] = history.cached[1] = history.cached[0][:-20]
    policy = KVCrush(base=BASE, share=0.5)
    view = history.view(policy.statistics)

    for first, second in ((30, 40), (41, 33), (num_cached - 20, 40)):
        keep = torch.tensor([first, first, second, second])
        retained = retained_positions(view, policy.select(view, keep, piece))
        expected = [plain_kvcrush(history, policy, number, piece) for number in (first, second)]
        assert retained == [*expected[0][:2], *expected[1][2:]]


def test_additive_representatives_are_added_to_the_cap():
    """46 tokens retained, 6 of them protected: half of the other 40, 20, are added.

    The number does not depend on the schedule: a cap of 55 with 9 evicted at a time retains 46 too.
    """
    policy = KVCrush(base=BASE, share=0.5, representatives="additive")
    lanes = LaneShape(num_layers=2, heads=2, page_tokens=16, page_bytes=1)

    def cap_of(text):
        rule = make_eviction(f"kvcrush:base=(h2o:sinks=2,recent=4),share=0.5,{text}")
        return rule.for_request(99, lanes).spec.cap

    assert policy.added_tokens(46) == 20
    assert cap_of("representatives=additive,cap=46,when=prefill_end") == 66
    assert cap_of("representatives=additive,cap=55,every=9") == 75
    check(history_of(tokens=99), policy, 66)


def test_figure_3_example():
    """8 tokens, 4 heads, budget 4, half of it for representatives; anchor zeros.

    Each head would retain its four best (x). The sums promote 0 and 1; the others are grouped.

        token        0     1     2     3     4     5     6     7
        head 0      90 x  80 x   1     0    40 x   2    30 x   3
        head 1      90 x  80 x   2     0    40 x   1     3    30 x
        head 2      90 x  80 x   1     0     2    40 x   3    30 x
        head 3      90 x   1    30 x   0     2    40 x   3    50 x
        sum        360   241    34     0    84    83    39   113
        signature 1111  1110  0001  0000  1100  0011  1000  0111
        distance                 1     0     2     2     1     3     to 0000

    Sorted by distance and position 3 2 6 4 5 7; slices 3 2 6 and 4 5 7: retain 2 and 5.
    """
    scores = torch.tensor(
        [
            [90.0, 80, 1, 0, 40, 2, 30, 3],
            [90, 80, 2, 0, 40, 1, 3, 30],
            [90, 80, 1, 0, 2, 40, 3, 30],
            [90, 1, 30, 0, 2, 40, 3, 50],
        ]
    )
    statistic = AttentionSum().each()
    view = KVView(
        torch.arange(8)[None], 8, layers=(0,), group=4, statistics={statistic.name: scores}
    )
    policy = KVCrush(base=H2O(recent=0), share=0.5, anchor="zeros")

    retained = policy.select(view, torch.tensor([4]))

    assert retained_positions(view, retained) == [[0, 1, 2, 5]]


def test_random_pick_depends_on_the_seed():
    history = history_of(tokens=200)
    policies = [KVCrush(base=BASE, pick="random", share=0.5, seed=seed) for seed in (0, 1)]
    view = history.view(policies[0].statistics)
    keep = torch.full((len(view.positions),), 60)

    first, other = (policy.select(view, keep) for policy in policies)

    check(history, policies[0], 60)
    assert not torch.equal(first, other)


def test_equal_signatures():
    """All tokens are equal: those at the lowest positions are promoted, slices are even."""
    each = AttentionSum().each()
    view = KVView(torch.arange(12)[None], 12, group=3, statistics={each.name: torch.ones(3, 12)})

    for anchor in ("mean", "ones", "random"):
        policy = KVCrush(base=H2O(recent=0), share=0.5, anchor=anchor)
        retained = policy.select(view, torch.tensor([6]))
        # heads would retain 0 to 5, so 3, 4, 5 and 6 to 11 are two groups
        assert retained[0, :3].all()
        assert int(retained.sum()) == 6


def test_one_distance_is_computed_per_token(monkeypatch):
    """Linear in tokens, by count. Two layers; protected tokens are not measured."""
    measured, protected = [], BASE.sinks + BASE.recent

    def counted(words, anchor):
        measured.append(words.shape[0] * words.shape[1])
        return hamming(words, anchor)

    monkeypatch.setattr(anchors, "hamming", counted)
    without_native_selection(monkeypatch)
    policy = KVCrush(base=BASE)
    view = history_of(tokens=100).view(policy.statistics)
    policy.select(view, torch.full((len(view.positions),), 50))

    assert sum(measured) == 2 * (view.positions.shape[1] - protected)


# ---- signatures --------------------------------------------------------------------------------


def test_view_by_query_heads_scores_each_head_separately():
    """A rule on the view by query heads equals the rule on a model without grouped heads."""
    history = history_of(group=3)
    for base in [*BASES, SnapKV(window=6, kernel=1)]:
        policy = KVCrush(base=base)
        view = history.view(policy.statistics)
        scores = base.score(by_query_head(view, base.statistics))
        for lane in range(len(history.cached)):
            for head in range(3):
                alone = replace(
                    history,
                    raw=history.raw[:, head : head + 1],
                    weights=history.weights[:, head : head + 1],
                )
                expected = base.score(alone.view(base.statistics))[lane]
                torch.testing.assert_close(scores[lane * 3 + head], expected)


@pytest.mark.parametrize("base", [*BASES, RoCo(sinks=1, recent=2)], ids=str)
def test_signature_bit_is_the_selection_of_the_head_alone(base):
    """Includes RoCo, which does more than rank its scores."""
    view = history_of(group=3).view(KVCrush(base=base).statistics)
    keep = torch.full((len(view.positions),), 30)
    context = KVCrush(base=base).selection_context(view, keep, 1)

    alone = base.select(by_query_head(view, base.statistics), keep.repeat_interleave(3))

    columns, must = context.units.columns, context.protected & context.rows.live
    free = ~must[:, None, columns].expand_as(context.own_bits)
    found = alone.view(context.score.shape)[:, :, columns]
    assert torch.equal(context.own_bits & free, found & free)


def test_first_heads_selects_the_first_head_of_each_layer():
    history = history_of(group=3)
    base = SnapKV(window=4)
    view = history.view([*base.statistics, AttentionSum(), AttentionSum().each()])
    found = first_heads(view)

    first = torch.arange(len(history.layers)) * history.heads
    assert torch.equal(found.positions, view.positions[first])
    assert torch.equal(found.keys, view.keys[first])
    for statistic in (*base.statistics, AttentionSum()):
        assert torch.equal(found.statistic(statistic), view.statistic(statistic)[first])
    heads = (first[:, None] * 3 + torch.arange(3)).flatten()
    each = AttentionSum().each()
    assert torch.equal(found.statistic(each), view.statistic(each)[heads])


def test_packed_bits_are_unpacked_with_equal_hamming_distances():
    rng = np.random.default_rng(0)
    for width in (1, 15, 16, 17, 31, 63, 64, 65, 200):
        bits, anchor = rng.random((3, width, 9)) < 0.5, rng.random((3, width, 1)) < 0.5
        words = anchors.pack(bits)

        assert words.shape == (3, 9, ceil(width / 64))
        assert (anchors.unpack(words, width) == bits.transpose(0, 2, 1)).all()
        assert (anchors.hamming(words, anchors.pack(anchor)) == (bits ^ anchor).sum(axis=1)).all()


# ---- OpenVINO's --------------------------------------------------------------------------------


@pytest.mark.parametrize("anchor", PLAIN_ANCHORS)
def test_kvcrush_openvino_equals_the_plain_version(anchor):
    piece, keep = 4, 56
    for seed in range(3):
        history = history_of(tokens=90, seed=seed)
        policy = KVCrushOpenVINO(base=BASE, blocks=3, anchor=anchor, seed=seed)
        view = history.view(policy.statistics)
        expected = []
        for layer, tokens, of_head, protected_tokens, _ in of_layers(history, policy, keep, piece):
            pieces = pieces_of(tokens, piece)
            protected_pieces = [p for p in pieces if protected_tokens & set(p) or len(p) < piece]
            free = [p for p in pieces if p not in protected_pieces]
            num_units = (keep - sum(map(len, protected_pieces))) // piece
            mean = {t: np.mean([scores[t] for scores in of_head]) for t in tokens}
            evictable = [t for p in free for t in p]
            half = best({t: mean[t] for t in evictable}, [], len(evictable) // 2)
            chosen = best(
                {n: sum(mean[t] for t in p) for n, p in enumerate(free)}, [], num_units - 3
            )
            signature = [[t in half for t in p] for p in free]
            anchor_bits = plain_anchor(policy, signature, layer)
            remaining = [n for n in range(len(free)) if n not in chosen]
            ordered = sorted(
                remaining, key=lambda n: (plain_distance(signature[n], anchor_bits), n)
            )
            representatives = [ordered[i * (len(ordered) // 3)] for i in range(3)]
            selected = [*protected_pieces, *(free[n] for n in [*chosen, *representatives])]
            expected += [sorted(t for p in selected for t in p)] * history.heads

        retained = policy.select(view, torch.full((len(view.positions),), keep), piece)

        assert retained_positions(view, retained) == expected


def view_of_sums(sums):
    """One layer, one query head, tokens at positions 0, 1, ... with these accumulated weights."""
    each = AttentionSum().each()
    return KVView(
        torch.arange(len(sums))[None],
        len(sums),
        statistics={each.name: torch.tensor([sums]), AttentionSum().name: torch.tensor([sums])},
    )


def test_openvino_signatures_use_undivided_attention_sums():
    """Pages of 2, 4 retained tokens: the best page and the page nearest to all zeros.

    token        0     1     2     3     4     5     6     7     8     9
    queries     10     9     8     7     6     5     4     3     2     1
    average      1     1    .5    .5   1.5   1.2     2     2     5     5      best page: 8, 9
    sum         10     9     4   3.5     9     6     8     6    10     5
    bits         1     1     0     0     1     0     1     0     1     0      nearest: 2, 3
    of average   0     0     0     0     1     0     1     1     1     1      nearest: 0, 1
    """
    view = view_of_sums([10.0, 9.0, 4.0, 3.5, 9.0, 6.0, 8.0, 6.0, 10.0, 5.0])
    policy = KVCrushOpenVINO(base=Average(), blocks=1, anchor=anchors.ZEROS)

    retained = policy.select(view, torch.tensor([4]), 2)

    assert retained_positions(view, retained) == [[2, 3, 8, 9]]


@pytest.mark.parametrize(
    ("base", "keep_counts"),
    [
        (Average(), [6.0, 4.0, 1.0]),
        (H2O(), [6.0, 4.0, 1.0]),
        (ValueNorm(base=Average(), power=2.0), [24.0, 16.0, 4.0]),
    ],
)
def test_accumulated_score_is_the_score_before_division(base, keep_counts):
    view = replace(view_of_sums([6.0, 4.0, 1.0]), slots=Twos(), head_dim=1)

    assert base.accumulated(view, base.score(view)).tolist() == [keep_counts]


def test_accumulated_score_of_other_statistics_is_undivided():
    numbers = torch.tensor([[6.0, 4.0, 1.0]])
    low = LowAttentionCount()
    view = KVView(torch.arange(3)[None], 3, statistics={low.name: numbers})

    assert Scissorhands(share=True).accumulated(view, numbers).tolist() == [[-6.0, -4.0, -1.0]]
    sums = KVView(torch.arange(3)[None], 3, statistics={AttentionSum().name: numbers})
    assert RoCo().accumulated(sums, numbers / 2).tolist() == numbers.tolist()


class Twos:
    """Keys and values that are all 2."""

    def keys(self):
        return torch.full((1, 3, 1), 2.0)

    values = keys


# ---- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("kvcrush:cap=99,every=9,share=1.0", ConfigError, "expected 0 <= share < 1"),
        ("kvcrush:cap=99,every=9,share=-0.1", ConfigError, "expected 0 <= share < 1"),
        (
            "kvcrush:cap=99,every=9,base=recent",
            ConfigError,
            "whose scores differ between query heads, got Recent; use",
        ),
        (
            "kvcrush:cap=99,every=9,base=(kvcrush:share=0.5)",
            ConfigError,
            "differ between query heads, got KVCrush",
        ),
        ("kvcrush:cap=99,every=9,anchor=meen", UnknownName, "mean"),
        ("kvcrush:cap=99,every=9,pick=first", UnknownName, "middle"),
        ("kvcrush:cap=99,every=9,representatives=outside", UnknownName, "inside"),
        ("kvcrush:cap=14,every=8", ConfigError, "needs 7; raise cap or share"),
        ("kvcrush:cap=99,every=9,share=0.01", ConfigError, "needs 199; raise cap or share"),
        ("kvcrush:cap=99,every=9,share=1e-12", ConfigError, "needs 1000000000000; raise cap or sh"),
        (
            "kvcrush:cap=99,every=9,base=(h2o:recent=999999999999)",
            ConfigError,
            "raise cap or share",
        ),
        ("kvcrush:cap=99,share=0,every=9,base=(h2o:recent=90)", ConfigError, "raise cap or lower"),
        ("value_norm:cap=99,every=9,base=kvcrush", ConfigError, "nest value_norm inside"),
        ("kvcrush:cap=99,base=(h2o:cap=9,every=3)", ConfigError, "cap, every of .* after the"),
        ("kmeans:cap=99,every=9,rounds=1001", ConfigError, "rounds from 1 to 1000"),
        ("kmeans:cap=99,every=9,on=values", UnknownName, "signatures"),
        (
            "kvcrush_openvino:cap=2,when=prefill_end,granularity=page,blocks=1,base=(h2o:sinks=9)",
            ConfigError,
            "lower blocks or every",
        ),
        ("kvcrush_openvino:cap=99,every=9", UnsoundCombination, "use granularity=page"),
        ("kvcrush:cap=99,every=9,budget=ada", UnsoundCombination, "one set for all heads"),
        ("kvcrush:cap=99,budget=ada", ConfigError, "sets=head of kvcrush"),
        ("kvcrush:cap=99,sets=lane", UnknownName, "layer"),
    ],
)
def test_invalid_kvcrush_options_are_refused_with_a_suggestion(text, error, message):
    with pytest.raises(error, match=message):
        make_eviction(text)


def test_min_cap_has_one_representative():
    """h2o retains half as newest: of 7 retained 4 are selected, a quarter of them is 1."""
    policy = KVCrush()

    assert policy.min_cap == 7
    assert policy.min_retained(4) == 31 + 8  # four pieces of four to select, 15 newest, two edges
    assert KVCrush(base=Recent2(), share=0.25).min_cap == 4


class Recent2(Recent):
    """A rule without protected tokens."""

    @property
    def scores_heads(self) -> bool:
        return True
