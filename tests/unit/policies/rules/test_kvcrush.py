"""KVCrush, its variants and k-means, compared with plain implementations."""

import sys
from dataclasses import replace
from importlib.util import find_spec
from math import ceil

import numpy as np
import pytest
import torch

from quire.errors import ConfigError, UnknownName, UnsoundCombination
from quire.eviction.eviction_rules import check_rules
from quire.layout.statistics import AttentionSum, LowAttentionCount
from quire.policies import choose, kvcrush
from quire.policies.average import Average
from quire.policies.base import LANE, LAYER
from quire.policies.budgets.ada import Ada
from quire.policies.eviction import Eviction, LaneShape, make_eviction
from quire.policies.expected_attention import ExpectedAttention
from quire.policies.h2o import H2O
from quire.policies.kmeans import KMeans
from quire.policies.kvcrush import KVCrush
from quire.policies.kvcrush_openvino import KVCrushOpenVINO
from quire.policies.recent import Recent
from quire.policies.roco import RoCo
from quire.policies.scissorhands import Scissorhands
from quire.policies.signatures import anchors, context
from quire.policies.signatures.anchors import hamming
from quire.policies.signatures.context import aligned_words
from quire.policies.signatures.query_heads import by_query_head, first_heads
from quire.policies.snapkv import SnapKV
from quire.policies.value_norm import ValueNorm
from quire.policies.view import KVView
from support.histories import Slots, best, changed, retained_positions
from support.pairwise import every_pair
from support.plain_kvcrush import (
    history_of,
    of_layers,
    pieces_of,
    plain_anchor,
    plain_count,
    plain_distance,
    plain_kvcrush,
    ragged_history,
)


def without_native_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (choose, context, kvcrush):
        monkeypatch.setattr(module, "native_selection", lambda: None)


BASES = [H2O(recent=4, sinks=2), H2O(power=2), SnapKV(window=4)]
BASE = BASES[0]
PLAIN_ANCHORS = [anchors.RANDOM, anchors.ALTERNATING, anchors.MEAN, anchors.ZEROS, anchors.ONES]


def check(history, policy, keep, piece=1):
    view = history.view(policy.statistics)
    keep_counts = torch.tensor(keep if isinstance(keep, list) else [keep] * len(view.positions))

    retained = retained_positions(view, policy.select(view, keep_counts, piece))

    assert retained == plain_kvcrush(history, policy, keep, piece)
    assert len(retained[0]) < len(history.cached[0])


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


def test_share_sets_the_number_of_representatives_also_of_80_query_heads_in_two_words():
    for share in (0.0, 0.25, 0.3, 0.9):
        check(history_of(), KVCrush(base=BASE, share=share), 36)
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
    rows = [90, 80, 1, 0, 40, 2, 30, 3], [90, 80, 2, 0, 40, 1, 3, 30]
    rows += [90, 80, 1, 0, 2, 40, 3, 30], [90, 1, 30, 0, 2, 40, 3, 50]
    statistics = {AttentionSum().each().name: torch.tensor(rows).float()}
    view = KVView(torch.arange(8)[None], 8, layers=(0,), group=4, statistics=statistics)
    policy = KVCrush(base=H2O(recent=0), share=0.5, anchor="zeros")

    retained = policy.select(view, torch.tensor([4]))

    assert retained_positions(view, retained) == [[0, 1, 2, 5]]


def test_random_picks_depend_on_the_seed_and_equal_signatures_on_positions():
    history = history_of(tokens=200)
    policies = [KVCrush(base=BASE, pick="random", share=0.5, seed=seed) for seed in (0, 1)]
    view = history.view(policies[0].statistics)
    keep = torch.full((len(view.positions),), 60)

    first, other = (policy.select(view, keep) for policy in policies)

    check(history, policies[0], 60)
    assert not torch.equal(first, other)

    # all tokens are equal: those at the lowest positions are promoted, slices are even
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


def test_view_by_query_heads_scores_each_head_separately():
    history = history_of(group=3)
    for base in [*BASES, SnapKV(window=6, kernel=1)]:
        policy = KVCrush(base=base)
        view = history.view(policy.statistics)
        scores = base.score(by_query_head(view, base.statistics))
        for lane in range(len(history.cached)):
            for head in range(3):
                own = {x: getattr(history, x)[:, head : head + 1] for x in ("raw", "weights")}
                alone = replace(history, **own)
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


def test_first_heads_are_selected_and_packed_bits_unpacked():
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

    rng = np.random.default_rng(0)
    for width in (1, 15, 16, 17, 31, 63, 64, 65, 200):
        bits, anchor = rng.random((3, width, 9)) < 0.5, rng.random((3, width, 1)) < 0.5
        words = anchors.pack(bits)

        assert words.shape == (3, 9, ceil(width / 64))
        assert (anchors.unpack(words, width) == bits.transpose(0, 2, 1)).all()
        assert (anchors.hamming(words, anchors.pack(anchor)) == (bits ^ anchor).sum(axis=1)).all()


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
            sums = {n: sum(mean[t] for t in p) for n, p in enumerate(free)}
            chosen = best(sums, [], num_units - 3)
            signature = [[t in half for t in p] for p in free]
            bits = plain_anchor(policy, signature, layer)
            remaining = [n for n in range(len(free)) if n not in chosen]
            ordered = sorted(remaining, key=lambda n: (plain_distance(signature[n], bits), n))
            representatives = [ordered[i * (len(ordered) // 3)] for i in range(3)]
            selected = [*protected_pieces, *(free[n] for n in [*chosen, *representatives])]
            expected += [sorted(t for p in selected for t in p)] * history.heads

        retained = policy.select(view, torch.full((len(view.positions),), keep), piece)

        assert retained_positions(view, retained) == expected


def view_of_sums(sums):
    """One layer, one query head, tokens at positions 0, 1, ... with these accumulated weights."""
    statistics = dict.fromkeys(
        (AttentionSum().each().name, AttentionSum().name), torch.tensor([sums])
    )
    return KVView(torch.arange(len(sums))[None], len(sums), statistics=statistics)


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


TWOS = torch.full((1, 3, 1), 2.0)


def test_accumulated_score_is_the_score_before_division_and_min_cap():
    view = replace(view_of_sums([6.0, 4.0, 1.0]), slots=Slots(TWOS, TWOS), head_dim=1)
    for base, factor in ((Average(), 1), (H2O(), 1), (ValueNorm(base=Average(), power=2.0), 4)):
        found = base.accumulated(view, base.score(view)).tolist()
        assert found == [[6.0 * factor, 4.0 * factor, 1.0 * factor]]

    numbers = torch.tensor([[6.0, 4.0, 1.0]])
    low = LowAttentionCount()
    view = KVView(torch.arange(3)[None], 3, statistics={low.name: numbers})

    assert Scissorhands(share=True).accumulated(view, numbers).tolist() == [[-6.0, -4.0, -1.0]]
    sums = KVView(torch.arange(3)[None], 3, statistics={AttentionSum().name: numbers})
    assert RoCo().accumulated(sums, numbers / 2).tolist() == numbers.tolist()
    # h2o retains half as newest: of 7 retained 4 are selected, a quarter of them is 1
    policy = KVCrush()
    assert policy.min_cap == 7
    assert policy.min_retained(4) == 31 + 8  # four pieces of four to select, 15 newest, two edges
    assert KVCrush(base=Recent2(), share=0.25).min_cap == 4


OPENVINO_OF_2 = (
    "kvcrush_openvino:cap=2,when=prefill_end,granularity=page,blocks=1,base=(h2o:sinks=9)"
)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("kvcrush:cap=99,every=9,share=1.0", ConfigError, "expected 0 <= share < 1"),
        ("kvcrush:cap=99,every=9,share=-0.1", ConfigError, "expected 0 <= share < 1"),
        ("kvcrush:cap=99,base=recent", ConfigError, "differ between query heads, got Recent; use"),
        ("kvcrush:cap=99,base=(kvcrush:share=0.5)", ConfigError, "query heads, got KVCrush"),
        ("kvcrush:cap=99,every=9,anchor=meen", UnknownName, "mean"),
        ("kvcrush:cap=99,every=9,pick=first", UnknownName, "middle"),
        ("kvcrush:cap=99,every=9,representatives=outside", UnknownName, "inside"),
        ("kvcrush:cap=14,every=8", ConfigError, "needs 7; raise cap or share"),
        ("kvcrush:cap=99,every=9,share=0.01", ConfigError, "needs 199; raise cap or share"),
        ("kvcrush:cap=99,every=9,share=1e-12", ConfigError, "needs 1000000000000; raise cap or sh"),
        ("kvcrush:cap=99,base=(h2o:recent=999999999999)", ConfigError, "raise cap or share"),
        ("kvcrush:cap=99,share=0,every=9,base=(h2o:recent=90)", ConfigError, "raise cap or lower"),
        ("value_norm:cap=99,every=9,base=kvcrush", ConfigError, "nest value_norm inside"),
        ("kvcrush:cap=99,base=(h2o:cap=9,every=3)", ConfigError, "cap, every of .* after the"),
        ("kmeans:cap=99,every=9,rounds=1001", ConfigError, "rounds from 1 to 1000"),
        ("kmeans:cap=99,every=9,on=values", UnknownName, "signatures"),
        (OPENVINO_OF_2, ConfigError, "lower blocks or every"),
        ("kvcrush_openvino:cap=99,every=9", UnsoundCombination, "use granularity=page"),
        ("kvcrush:cap=99,every=9,budget=ada", UnsoundCombination, "one set for all heads"),
        ("kvcrush:cap=99,budget=ada", ConfigError, "sets=head of kvcrush"),
        ("kvcrush:cap=99,sets=lane", UnknownName, "layer"),
    ],
)
def test_invalid_kvcrush_options_are_refused_with_a_suggestion(text, error, message):
    with pytest.raises(error, match=message):
        make_eviction(text)


class Recent2(Recent):
    """A rule without protected tokens."""

    @property
    def scores_heads(self):
        return True


needs_scipy = pytest.mark.skipif(find_spec("scipy") is None, reason="no scipy")


def plain_kmeans(points, clusters, rounds):
    """Numbers of the points nearest the means, ties to the first, no point twice."""
    means = [points[i * len(points) // clusters] for i in range(clusters)]
    for _ in range(rounds):
        near = [int(np.argmin([np.linalg.norm(p - mean) for mean in means])) for p in points]
        for number in range(clusters):
            members = [p for p, n in zip(points, near, strict=True) if n == number]
            means[number] = np.mean(members, axis=0) if members else means[number]
    chosen = []
    for mean in means:
        free = {n: np.linalg.norm(p - mean) for n, p in enumerate(points) if n not in chosen}
        chosen.append(next(n for n in free if free[n] <= min(free.values()) + 1e-9))
    return chosen


@needs_scipy
@pytest.mark.parametrize("rounds", [1, 5])
def test_kmeans_retains_the_token_nearest_to_each_key_cluster_mean(rounds):
    history, policy = history_of(), KMeans(base=BASE, on="keys", share=0.5, rounds=rounds)
    view, keep, expected = history.view(policy.statistics), 30, []
    layers = of_layers(history, policy, keep, 1)
    for number, (_, tokens, of_head, protected_tokens, _) in enumerate(layers):
        lanes = range(number * history.heads, (number + 1) * history.heads)
        free = [t for t in tokens if t not in protected_tokens]
        mean = {t: float(np.mean([scores[t] for scores in of_head])) for t in free}
        count = plain_count(policy, keep - len(protected_tokens))
        promoted = best(mean, [], keep - len(protected_tokens) - count)
        grouped = [t for t in free if t not in promoted]
        points = [np.concatenate([history.keys[lane, t] for lane in lanes]) for t in grouped]
        representatives = {grouped[n] for n in plain_kmeans(points, count, rounds)}
        expected += [sorted({*protected_tokens, *promoted, *representatives})] * history.heads

    retained = policy.select(view, torch.full((len(view.positions),), keep))

    assert retained_positions(view, retained) == expected


@needs_scipy
def test_kmeans_retains_one_token_per_signature_cluster():
    """Two heads that retain four tokens: 0 to 3 in the first, 0, 1, 6 and 7 in the second.

    0 and 1 are promoted. The other signatures are 10 10 00 00 01 01: clusters start at 2 and 5, so
    the second has 4 to 7, whose mean (0, 1/2) is equally near to all of them.
    """
    each = AttentionSum().each()
    scores = torch.tensor([[9.0, 8, 5, 4, 1, 1, 0, 0], [9.0, 8, 0, 0, 1, 1, 5, 4]])
    slots = Slots(torch.zeros(1, 8, 2), torch.zeros(1, 8, 2))
    more = {"statistics": {each.name: scores}, "slots": slots, "head_dim": 2}
    view = KVView(torch.arange(8)[None], 8, group=2, **more)

    retained = KMeans(base=H2O(recent=0), share=0.5).select(view, torch.tensor([4]))

    assert retained_positions(view, retained) == [[0, 1, 2, 4]]


@pytest.mark.parametrize("text", ["kmeans:cap=64", "kvcrush:base=(kmeans:base=(h2o)),cap=64"])
def test_missing_scipy_is_refused_when_the_rule_is_read(monkeypatch, text):
    monkeypatch.setitem(sys.modules, "scipy", None)

    expected = r"kmeans needs scipy .*pip install 'quire-llm\[kmeans\]'"
    with pytest.raises(ConfigError, match=expected):
        make_eviction(text)
    check_rules("full", "all")  # "all" means those that are installed
    with pytest.raises(ConfigError, match="needs scipy"):
        check_rules("full", "h2o; kmeans")


HEAD_BASES = [H2O(recent=4, sinks=2), SnapKV(window=4), RoCo(sinks=1, recent=2)]


@every_pair(anchor=PLAIN_ANCHORS, base=HEAD_BASES[:2], group=[1, 3])
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
    check(ragged_history(), policy, [20, 26, 31, 24])  # each head its own number


@pytest.mark.parametrize("base", [H2O(recent=4), SnapKV(window=4), Average(), ExpectedAttention()])
def test_heads_without_representatives_retain_what_the_base_rule_retains(base):
    policy = KVCrush(base=base, share=0.0, sets="head")
    history = history_of()
    view = history.view((*policy.statistics, *base.statistics))
    keep = torch.full((4,), 30)
    assert torch.equal(policy.select(view, keep), base.select(view, keep))


@pytest.mark.parametrize("form", [pytest.param(KMeans, marks=needs_scipy), KVCrushOpenVINO])
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


def float32(view):
    statistics = {name: numbers.float() for name, numbers in view.statistics.items()}
    return changed(view, statistics=statistics)


@every_pair(
    anchor=["mean", "random"],
    pick=["middle", "best", "random"],
    sets=["layer", "head"],
    base=HEAD_BASES[:2],
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
