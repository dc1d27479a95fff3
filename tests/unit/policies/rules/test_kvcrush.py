"""KVCrush and its relatives against plain ones: lists, sets and sums, token by token."""

from dataclasses import replace
from math import ceil

import numpy as np
import pytest
import torch

from quire.errors import ConfigError, UnknownName, UnsoundCombination
from quire.layout.statistics import AttentionSum, LowAttentionCount
from quire.policies.average import Average
from quire.policies.eviction import make_eviction
from quire.policies.h2o import H2O
from quire.policies.kvcrush import KVCrush
from quire.policies.kvcrush_openvino import KVCrushOpenVINO
from quire.policies.lane_shape import LaneShape
from quire.policies.recent import Recent
from quire.policies.roco import RoCo
from quire.policies.scissorhands import Scissorhands
from quire.policies.signatures import anchors
from quire.policies.signatures.anchors import hamming
from quire.policies.signatures.query_heads import by_query_head, first_heads
from quire.policies.snapkv import SnapKV
from quire.policies.value_norm import ValueNorm
from quire.policies.view import KVView
from unit.policies.histories import best, changed, make_history, retained_positions
from unit.policies.plain_kvcrush import (
    history_of,
    of_layers,
    pieces_of,
    plain_anchor,
    plain_distance,
    plain_kvcrush,
)

BASES = [
    H2O(recent=4, sinks=2),
    H2O(power=2),
    SnapKV(window=4),
]
BASE = BASES[0]
PLAIN_ANCHORS = [anchors.RANDOM, anchors.ALTERNATING, anchors.MEAN, anchors.ZEROS, anchors.ONES]


def check(history, policy, keep, piece=1):
    view = history.view(policy.statistics)
    wanted = torch.full((len(view.positions),), keep)

    kept = retained_positions(view, policy.select(view, wanted, piece))

    assert kept == plain_kvcrush(history, policy, keep, piece)
    assert len(kept[0]) < len(history.cached[0])


# ---- kvcrush -----------------------------------------------------------------------------------


@pytest.mark.parametrize("anchor", PLAIN_ANCHORS)
@pytest.mark.parametrize("base", BASES, ids=lambda base: type(base).__name__ + str(base.least_cap))
@pytest.mark.parametrize("group", [1, 3])
def test_kvcrush_keeps_what_the_plain_one_keeps(base, anchor, group):
    for seed in range(3):
        history = history_of(group=group, seed=seed)
        check(history, KVCrush(base=base, anchor=anchor, share=0.5, seed=seed), 30)


@pytest.mark.parametrize("anchor", [anchors.MEAN, anchors.ALTERNATING])
@pytest.mark.parametrize("piece", [2, 5])
def test_kvcrush_keeps_whole_pieces_with_their_tokens_bits_side_by_side(piece, anchor):
    for seed in range(3):
        history = history_of(tokens=90, seed=seed)
        check(history, KVCrush(base=BASE, anchor=anchor, share=0.5), 50, piece)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.3, 0.9])
def test_a_share_of_what_is_left_is_for_representatives(share):
    check(history_of(), KVCrush(base=BASE, share=share), 36)


def test_more_query_heads_than_a_word_has_bits():
    """80 of them: two words."""
    check(history_of(tokens=30, group=40), KVCrush(base=BASE, share=0.5), 18)


@pytest.mark.parametrize("piece", [1, 3])
def test_layers_of_other_fullness_lose_as_many_as_each_may(piece):
    history = history_of(tokens=80)
    per_layer = len(history.cached[0])
    history.cached[0] = history.cached[1] = history.cached[0][:-20]
    policy = KVCrush(base=BASE, share=0.5)
    view = history.view(policy.statistics)

    for first, second in ((30, 40), (41, 33), (per_layer - 20, 40)):
        keep = torch.tensor([first, first, second, second])
        kept = retained_positions(view, policy.select(view, keep, piece))
        expected = [plain_kvcrush(history, policy, number, piece) for number in (first, second)]
        assert kept == [*expected[0][:2], *expected[1][2:]]


def test_additive_representatives_come_on_top_of_the_cap():
    """46 would stay, 6 of them protected: 40 left, half of it on top, and 20 are representatives.

    So many whatever the schedule: a cap of 55 of which 9 leave at a time leaves 46 too.
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


def test_figure_3_by_hand():
    """8 tokens, 4 heads, budget 4, half of it for representatives; anchor zeros.

    Each head would keep its four best (x). By the sums 0 and 1 are important; the rest is grouped.

        token        0     1     2     3     4     5     6     7
        head 0      90 x  80 x   1     0    40 x   2    30 x   3
        head 1      90 x  80 x   2     0    40 x   1     3    30 x
        head 2      90 x  80 x   1     0     2    40 x   3    30 x
        head 3      90 x   1    30 x   0     2    40 x   3    50 x
        sum        360   241    34     0    84    83    39   113
        signature 1111  1110  0001  0000  1100  0011  1000  0111
        distance                 1     0     2     2     1     3     to 0000

    Sorted by distance and position 3 2 6 4 5 7; slices 3 2 6 and 4 5 7; their middles 2 and 5 stay.
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

    kept = policy.select(view, torch.tensor([4]))

    assert retained_positions(view, kept) == [[0, 1, 2, 5]]


def test_a_random_pick_is_another_with_another_seed():
    history = history_of(tokens=200)
    policies = [KVCrush(base=BASE, pick="random", share=0.5, seed=seed) for seed in (0, 1)]
    view = history.view(policies[0].statistics)
    keep = torch.full((len(view.positions),), 60)

    first, other = (policy.select(view, keep) for policy in policies)

    check(history, policies[0], 60)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("pick", ["middle", "random"])
@pytest.mark.parametrize("anchor", [anchors.RANDOM, anchors.MEAN, anchors.FARTHEST])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_several_anchors_share_the_representatives_in_proportion(anchor, count, pick):
    for seed in range(2):
        history = history_of(tokens=100, seed=seed)
        policy = KVCrush(base=BASE, anchor=anchor, anchors=count, share=0.5, pick=pick, seed=seed)
        check(history, policy, 50)


def test_anchors_that_find_all_signatures_alike_are_one():
    """Nobody tells tokens apart: those at the lowest positions are important, slices are even."""
    each = AttentionSum().each()
    view = KVView(torch.arange(12)[None], 12, group=3, statistics={each.name: torch.ones(3, 12)})

    for count, anchor in ((1, "mean"), (1, "ones"), (4, "farthest"), (2, "mean"), (8, "random")):
        policy = KVCrush(base=H2O(recent=0), share=0.5, anchor=anchor, anchors=count)
        kept = policy.select(view, torch.tensor([6]))
        # heads would keep 0 to 5, so 3, 4, 5 and 6 to 11 are two kinds
        assert kept[0, :3].all()
        assert int(kept.sum()) == 6


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_a_dynamic_share_is_a_part_of_the_share_by_layer(share):
    for seed in range(3):
        policy = KVCrush(base=BASE, share=share, dynamic=True)
        history = history_of(seed=seed)
        check(history, policy, 36)
        assert plain_kvcrush(history, policy, 36) != plain_kvcrush(
            history, KVCrush(base=BASE, share=share), 36
        )


def test_one_distance_is_measured_for_each_token_and_anchor(monkeypatch):
    """Linear in tokens: counted, not timed. Two layers; what is protected is not measured."""
    measured, protected = [], BASE.sinks + BASE.recent

    def counted(words, anchor):
        measured.append(words.shape[0] * words.shape[1])
        return hamming(words, anchor)

    monkeypatch.setattr(anchors, "hamming", counted)
    for number in (1, 4):
        policy = KVCrush(base=BASE, anchors=number)
        view = history_of(tokens=100).view(policy.statistics)
        measured.clear()
        policy.select(view, torch.full((len(view.positions),), 50))
        assert sum(measured) == number * 2 * (view.positions.shape[1] - protected)


def test_a_dynamic_share_is_whole_where_all_score_alike_and_nothing_where_few_have_all():
    statistic = AttentionSum().each()
    policy = KVCrush(base=H2O(recent=0), share=0.5, dynamic=True, anchor="zeros")
    flat = torch.ones(1, 20)
    peaked = torch.where(torch.arange(20) < 6, 1.0, 0.0)[None] * torch.arange(20.0, 0, -1)

    def promoted(scores):
        view = KVView(torch.arange(20)[None], 20, layers=(0,), statistics={statistic.name: scores})
        kept = policy.select(view, torch.tensor([8]))[0]
        return int(kept[:8].sum()), int(kept.sum())

    assert promoted(peaked) == (8, 8)
    assert promoted(flat) == (5, 8)  # 0 to 3; and 5, which stands for 4 to 7: the head keeps them


# ---- what a head says --------------------------------------------------------------------------


def test_a_view_by_query_heads_scores_each_as_if_it_were_alone():
    """A rule on the view of heads gives what it gives a model without groups."""
    history = history_of(group=3)
    for base in [*BASES, SnapKV(window=6, kernel=1)]:
        policy = KVCrush(base=base)
        view = history.view(policy.statistics)
        scores = base.score(by_query_head(view, base.statistics))
        for lane in range(len(history.cached)):
            for head in range(3):
                alone = make_history(tokens=60, group=3, layers=(0, 2), ragged=False)
                alone.raw = alone.raw[:, head : head + 1]
                alone.weights = alone.weights[:, head : head + 1]
                expected = base.score(alone.view(base.statistics))[lane]
                torch.testing.assert_close(scores[lane * 3 + head], expected)


@pytest.mark.parametrize("base", [*BASES, RoCo(sinks=1, recent=2)], ids=str)
def test_a_bit_says_whether_the_head_alone_would_keep_the_token(base):
    """Also where a rule does more than rank its scores, as RoCo does."""
    view = history_of(group=3).view(KVCrush(base=base).statistics)
    keep = torch.full((len(view.positions),), 30)
    context = KVCrush(base=base).selection_context(view, keep, 1)

    alone = base.select(by_query_head(view, base.statistics), keep.repeat_interleave(3))

    assert torch.equal(context.all_bits.flatten(0, 1), alone)


def test_what_is_asked_once_a_layer_is_asked_of_its_first_head():
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


def test_packed_bits_come_back_and_their_distances_are_those_of_bits():
    rng = np.random.default_rng(0)
    for width in (1, 15, 16, 17, 31, 63, 64, 65, 200):
        made, anchor = rng.random((3, width, 9)) < 0.5, rng.random((3, width, 1)) < 0.5
        words = anchors.pack(made)

        assert words.shape == (3, 9, ceil(width / 64))
        assert (anchors.unpack(words, width) == made.transpose(0, 2, 1)).all()
        assert (anchors.hamming(words, anchors.pack(anchor)) == (made ^ anchor).sum(axis=1)).all()


def test_kept_signatures_are_those_of_the_first_time():
    """A token's bits are written down and read again; later ones are asked afresh."""
    history = history_of()
    policy = KVCrush(base=BASE, signatures="stored", share=0.5)
    view = history.view(policy.statistics)
    keep = torch.full((len(view.positions),), 30)
    context = policy.selection_context(view, keep, 1)
    before = context.all_bits.flatten(0, 1)

    decision = policy.decide(view, keep)
    noted = {s.name: n for s, n in decision.statistics.items()}
    until = noted["signed_until"]
    noted["signature_bits"] = torch.where(view.positions % 2 == 0, 7.0, 0.0)  # of all three heads
    noted["signed_until"] = torch.full_like(until, 40)
    again = policy.selection_context(
        changed(view, statistics={**view.statistics, **noted}), keep, 1
    )

    assert torch.equal(decision.retained, KVCrush(base=BASE, share=0.5).select(view, keep))
    assert until.unique().tolist() == [history.tokens - BASE.recent]
    positions = view.positions.repeat_interleave(3, dim=0)
    old, again = positions < 40, again.all_bits.flatten(0, 1)
    assert torch.equal(again[old], positions[old] % 2 == 0)
    assert torch.equal(again[~old], before[~old])


def test_signatures_are_written_down_when_a_token_may_leave_for_the_first_time():
    """Layer 0 loses nothing; in layer 1 the newest are protected. What was signed stays so."""
    history = history_of()
    policy = KVCrush(base=BASE, signatures="stored", share=0.5)
    view = history.view(policy.statistics)
    held = view.num_slots[:, 0]
    keep = torch.where(torch.arange(len(held)) < history.heads, held, 30)

    notes = {s.name: n for s, n in policy.decide(view, keep).statistics.items()}
    later = changed(
        view,
        statistics={
            **view.statistics,
            "signed_until": torch.full_like(notes["signed_until"], 58.0),
        },
    )
    again = {s.name: n for s, n in policy.decide(later, keep).statistics.items()}

    assert notes["signed_until"].flatten().tolist() == [0, 0, 56, 56]
    assert again["signed_until"].flatten().tolist() == [58] * 4


# ---- OpenVINO's --------------------------------------------------------------------------------


@pytest.mark.parametrize("anchor", PLAIN_ANCHORS)
def test_openvinos_form_keeps_what_the_plain_one_keeps(anchor):
    piece, keep = 4, 56
    for seed in range(3):
        history = history_of(tokens=90, seed=seed)
        policy = KVCrushOpenVINO(base=BASE, blocks=3, anchor=anchor, seed=seed)
        view = history.view(policy.statistics)
        expected = []
        for layer, tokens, of_head, must, _ in of_layers(history, policy, keep, piece):
            cut = pieces_of(tokens, piece)
            held = [p for p in cut if must & set(p) or len(p) < piece]
            free = [p for p in cut if p not in held]
            room = (keep - sum(map(len, held))) // piece
            mean = {t: np.mean([scores[t] for scores in of_head]) for t in tokens}
            may = [t for p in free for t in p]
            half = best({t: mean[t] for t in may}, [], len(may) // 2)
            chosen = best({n: sum(mean[t] for t in p) for n, p in enumerate(free)}, [], room - 3)
            signature = [[t in half for t in p] for p in free]
            own = plain_anchor(anchor, signature, layer, seed)
            leave = [n for n in range(len(free)) if n not in chosen]
            ordered = sorted(leave, key=lambda n: (plain_distance(signature[n], own), n))
            saved = [ordered[i * (len(ordered) // 3)] for i in range(3)]
            retained = [*held, *(free[n] for n in [*chosen, *saved])]
            expected += [sorted(t for p in retained for t in p)] * history.heads

        kept = policy.select(view, torch.full((len(view.positions),), keep), piece)

        assert retained_positions(view, kept) == expected


def view_of_sums(sums):
    """One layer, one query head, tokens at positions 0, 1, ... with these accumulated weights."""
    apart = AttentionSum().each()
    return KVView(
        torch.arange(len(sums))[None],
        len(sums),
        statistics={apart.name: torch.tensor([sums]), AttentionSum().name: torch.tensor([sums])},
    )


def test_openvinos_bits_are_of_accumulated_attention_which_the_base_rule_divides():
    """Pages of 2, 4 tokens stay: the best page and the one nearest to all zeros.

    token        0     1     2     3     4     5     6     7     8     9
    queries     10     9     8     7     6     5     4     3     2     1
    average      1     1    .5    .5   1.5   1.2     2     2     5     5      best page: 8, 9
    sum         10     9     4   3.5     9     6     8     6    10     5
    bits         1     1     0     0     1     0     1     0     1     0      nearest: 2, 3
    of average   0     0     0     0     1     0     1     1     1     1      nearest: 0, 1
    """
    view = view_of_sums([10.0, 9.0, 4.0, 3.5, 9.0, 6.0, 8.0, 6.0, 10.0, 5.0])
    policy = KVCrushOpenVINO(base=Average(), blocks=1, anchor=anchors.ZEROS)

    kept = policy.select(view, torch.tensor([4]), 2)

    assert retained_positions(view, kept) == [[2, 3, 8, 9]]


@pytest.mark.parametrize(
    ("base", "wanted"),
    [
        (Average(), [6.0, 4.0, 1.0]),
        (H2O(), [6.0, 4.0, 1.0]),
        (ValueNorm(base=Average(), power=2.0), [24.0, 16.0, 4.0]),
    ],
)
def test_what_a_rule_accumulates_is_its_score_before_division(base, wanted):
    view = replace(view_of_sums([6.0, 4.0, 1.0]), slots=Twos(), head_dim=1)

    assert base.accumulated(view, base.score(view)).tolist() == [wanted]


def test_rules_that_divide_other_statistics_accumulate_them_undivided():
    numbers = torch.tensor([[6.0, 4.0, 1.0]])
    low = LowAttentionCount()
    view = KVView(torch.arange(3)[None], 3, statistics={low.name: numbers})

    assert Scissorhands(share=True).accumulated(view, numbers).tolist() == [[-6.0, -4.0, -1.0]]
    sums = KVView(torch.arange(3)[None], 3, statistics={AttentionSum().name: numbers})
    assert RoCo().accumulated(sums, numbers / 2).tolist() == numbers.tolist()


class Twos:
    """Every key and value is 2."""

    def keys(self):
        return torch.full((1, 3, 1), 2.0)

    values = keys


# ---- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "error", "says"),
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
        ("kvcrush:cap=99,every=9,anchor=zeros,anchors=2", ConfigError, "are identical; use random"),
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
        (
            "kvcrush:cap=99,base=(h2o:cap=9,every=3)",
            ConfigError,
            "cap, every of .* after the",
        ),
        ("kvcrush:cap=99,every=9,anchors=65", ConfigError, "from 1 to 64 anchors, got 65"),
        ("kvcrush:cap=99,every=9,anchor=farthest", ConfigError, "anchors=2 or more"),
        ("kmeans:cap=99,every=9,rounds=1001", ConfigError, "rounds from 1 to 1000"),
        ("kmeans:cap=99,every=9,on=values", UnknownName, "signatures"),
        (
            "kvcrush_openvino:cap=2,when=prefill_end,granularity=page,blocks=1,base=(h2o:sinks=9)",
            ConfigError,
            "lower blocks or every",
        ),
        ("kvcrush_openvino:cap=99,every=9", UnsoundCombination, "use granularity=page"),
        ("kvcrush:cap=99,every=9,budget=ada", UnsoundCombination, "one set for all heads"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_way_out(text, error, says):
    with pytest.raises(error, match=says):
        make_eviction(text)


def test_the_least_cap_leaves_one_representative_and_one_less_is_refused():
    """h2o keeps half of what stays as newest: 7 kept leave 4 to choose, a quarter of them is 1."""
    policy = KVCrush()

    assert policy.least_cap == 7
    assert policy.least_retained(4) == 31 + 8  # four pieces of four to choose, 15 newest, two edges
    assert KVCrush(base=Recent2(), share=0.25).least_cap == 4


class Recent2(Recent):
    """A rule that protects nothing, for the arithmetic alone."""

    @property
    def scores_heads(self) -> bool:
        return True


def test_a_view_without_what_each_head_saw_is_refused():
    policy = KVCrush()
    view = changed(history_of().view(policy.statistics), statistics={})

    with pytest.raises(ConfigError.__base__, match="built without the statistic"):
        policy.select(view, view.num_slots[:, 0] - 1)
