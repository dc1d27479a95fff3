"""Rules around another one with numbers by hand, and known mistakes of implementations."""

import math
from dataclasses import FrozenInstanceError, dataclass

import numpy as np
import pytest
import torch

from quire.errors import ConfigError, PolicyError
from quire.layout.model import HeadShape
from quire.layout.statistics import AttentionSum
from quire.models.observing import OutputProjections
from quire.policies.average import Average
from quire.policies.base import LANE, LAYER, EvictionPolicy, ScorePolicy
from quire.policies.criticalkv import CriticalKV
from quire.policies.eviction import make_eviction
from quire.policies.expected_attention import ExpectedAttention
from quire.policies.h2o import H2O
from quire.policies.keydiff import KeyDiff
from quire.policies.knorm import KNorm
from quire.policies.lagkv import LagKV
from quire.policies.recent import Recent
from quire.policies.registry import make_policy, policy_of, registered
from quire.policies.signatures.query_heads import by_query_head
from quire.policies.threshold import Threshold
from quire.policies.tova import TOVA
from quire.policies.value_norm import ValueNorm
from quire.policies.view import KVView
from quire.policies.windows import pool, reduce_group
from support.histories import (
    Rotations,
    Slots,
    best,
    changed,
    keep_of,
    make_history,
    retained_positions,
)


def two_tokens_view():
    """Attention sums 3 2 1 0 of tokens whose value norms are 1, 5 (3 and 4), 2 and 9."""
    values = torch.tensor([[[1.0, 0.0], [3.0, 4.0], [0.0, 2.0], [9.0, 0.0]]])
    sums = {AttentionSum().name: torch.tensor([[3.0, 2.0, 1.0, 0.0]])}
    return KVView(torch.arange(4)[None], 4, statistics=sums, slots=Slots(values, values))


@pytest.mark.parametrize(
    ("options", "scores"),
    [
        ({}, [3, 10, 2, 0]),  # 3 * 1, 2 * 5, 1 * 2, 0 * 9
        ({"power": 0.0}, [3, 2, 1, 0]),
        ({"power": 2.0}, [3, 50, 4, 0]),
        ({"epsilon": 1.0}, [4, 15, 4, 9]),
    ],
)
def test_scores_are_multiplied_by_value_norms(options, scores):
    rule = ValueNorm(base=H2O(recent=0), **options)

    assert rule.score(two_tokens_view())[0].tolist() == pytest.approx(scores)
    nested = make_policy("value_norm:base=(value_norm:base=(h2o:recent=0))")
    assert nested.score(two_tokens_view())[0].tolist() == pytest.approx([3, 50, 4, 0])


def test_statistics_protection_and_min_cap_are_those_of_the_base():
    rule = make_policy("value_norm:base=(h2o:recent=7,sinks=2,heads=max),power=2")

    assert rule.base == H2O(recent=7, sinks=2, heads="max")
    assert rule.power == 2
    assert rule.statistics == (AttentionSum("max"),)
    assert rule.min_cap == 10
    assert ValueNorm(base=TOVA()).scope == LAYER

    view = make_history(tokens=40, group=2, layers=(1, 2)).view(rule.statistics)
    keep = torch.full((view.positions.shape[0],), 12)
    assert rule.protected(view, keep).equal(rule.base.protected(view, keep))


@pytest.mark.parametrize("base", ["h2o", "average", "roco", "snapkv:window=4", "tova", "sinks"])
@pytest.mark.parametrize("options", ["value_norm:power=0", "criticalkv:first=1", "threshold:tau=0"])
def test_rule_without_a_change_equals_the_base_rule(base, options):
    wrapped, alone = make_policy(f"{options},base=({base})"), make_policy(base)
    history = make_history(tokens=60, group=2, layers=(1, 2), ragged=alone.scope == LANE)
    view = history.view(alone.statistics)
    keep = torch.full((view.positions.shape[0],), 20)
    assert wrapped.select(view, keep).equal(alone.select(view, keep))


class Below(KNorm):
    has_negative_scores = False


class Unscored(EvictionPolicy):
    def select(self, view, keep, piece_tokens=1):
        return view.live


def test_base_with_negative_scores_is_refused_by_name():
    for rule in (ValueNorm(base=Below()), CriticalKV(base=Below()), Threshold(base=Below())):
        name = rule.name
        with pytest.raises(PolicyError, match=f"{name} needs scores >= 0, and Below returned neg"):
            rule.select(two_tokens_view(), torch.tensor([3]))
        for base in ("knorm", "keydiff", "rkv", "scissorhands", "triattention"):
            with pytest.raises(ConfigError, match=f"{name} needs scores >= 0, and .* has negative"):
                make_policy(f"{name}:base={base}")
    expected = "value_norm reads the scores of its base, and Unscored returns none"
    with pytest.raises(ConfigError, match=expected):
        ValueNorm(base=Unscored())


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("value_norm:power=-1", "power >= 0"),
        ("value_norm:epsilon=-1", "epsilon >= 0"),
        ("criticalkv:epsilon=-1", "epsilon >= 0"),
        ("criticalkv:first=1.5", "0 <= first <= 1, .* got 1.5"),
        ("criticalkv:base=kvcrush", "nest criticalkv inside"),
        ("threshold:base=kvcrush", "nest threshold inside"),
        ("threshold:tau=-1", "tau >= 0"),
        ("threshold:recent=-1", "recent >= 0"),
        ("threshold:mass=0", "0 < mass <= 1, .* got 0.0"),
        ("threshold:mass=1.1", "0 < mass <= 1, .* got 1.1"),
    ],
)
def test_wrong_options_are_refused(text, error):
    with pytest.raises(ConfigError, match=error):
        make_policy(text)


def six_tokens_view():
    """Tokens whose projected values have the lengths 1 1 1 4 3 60, by hand.

    Two query heads share the lane. The first projects (a, b) to itself, the second to (2a, 0):
    the mean of their lengths |a| + |b| and 2 |a| is (3 |a| + |b|) / 2.
    """
    values = torch.tensor([[[0, 2], [0, -2], [0, 2], [2, 2], [-2, 0], [40, 0]]]).float()
    weight = torch.tensor([[1.0, 0, 2, 0], [0, 1, 0, 0]])
    heads = HeadShape(query_heads=2, kv_heads=1, key_dim=2, value_dim=2)
    more = {"statistics": {AttentionSum().name: torch.tensor([[6.0, 4, 3, 1, 1, 0]])}, "group": 2}
    more |= {"slots": Slots(values, values)}
    more["projection"] = OutputProjections({0: [lambda: weight]}, [heads])
    return KVView(torch.arange(6)[None], 6, **more)


@pytest.mark.parametrize(
    ("options", "piece_tokens", "retained"),
    [
        # 0 and 1 by score; then 3 * 1, 1 * 4, 1 * 3 and almost 0 * 60: of the equal 3, epsilon
        # decides for the longer value
        ("", 1, [0, 1, 3, 4]),
        ("epsilon=0", 1, [0, 1, 2, 3]),
        ("epsilon=1", 1, [0, 1, 3, 5]),  # 4 * 1, 2 * 4, 2 * 3, 1 * 60
        ("epsilon=1,first=0.7", 1, [0, 1, 3, 5]),  # floor(2.8)
        ("epsilon=1,first=0.75", 1, [0, 1, 2, 5]),
        ("epsilon=1,first=0", 1, [0, 3, 4, 5]),  # 7, 5, 4, 8, 6, 60
        ("epsilon=1,base=(h2o:recent=1,sinks=0)", 1, [0, 3, 4, 5]),  # 5 is protected; floor(1.5)
        # pieces by score: 5, 2, 0.5; the rest by (4 + 8) / 2 and (6 + 60) / 2
        ("epsilon=1", 2, [0, 1, 4, 5]),
        ("", 2, [0, 1, 2, 3]),
    ],
)
def test_criticalkv_selects_by_score_and_then_by_projected_values(options, piece_tokens, retained):
    base = "" if "base=" in options else ",base=(h2o:recent=0)"
    rule = make_policy(f"criticalkv:{options}{base}".replace(":,", ":"))

    found = rule.select(six_tokens_view(), torch.tensor([4]), piece_tokens)

    assert found[0].nonzero().flatten().tolist() == retained
    with pytest.raises(PolicyError, match="without output projections; use value_norm"):
        rule.select(changed(six_tokens_view(), projection=None), torch.tensor([4]))


@pytest.mark.parametrize("base", ["h2o:recent=3,sinks=2", "snapkv:window=4", "tova"])
@pytest.mark.parametrize("first", [0.0, 0.5, 0.8])
def test_criticalkv_equals_a_plain_selection(base, first):
    rule = make_policy(f"criticalkv:base=({base}),first={first}")
    alone = rule.base
    history = make_history(tokens=60, group=2, layers=(1, 2), ragged=alone.scope == LANE)
    view, keep = history.view(rule.statistics), 20
    scores = alone.score(view).double().numpy()
    protected = alone.protected(view, torch.full((4,), keep)).numpy()
    weighted = scores + 1e-4
    for lane, layer in enumerate((1, 1, 2, 2)):
        for slot, token in enumerate(history.cached[lane]):
            value = history.values[lane, token]
            heads = view.projection.matrices(layer)
            weighted[lane, slot] *= np.mean([np.abs(of @ value).sum() for of in heads])
    if alone.scope == LAYER:
        for both in (scores, weighted):
            both[:] = both.reshape(2, 2, -1).mean(axis=1).repeat(2, axis=0)
    expected = []
    for lane, cached in enumerate(history.cached):
        held = np.flatnonzero(protected[lane]).tolist()
        slots = range(len(cached))
        count = math.floor(round(first * (keep - len(held)), 9))
        stage = best({s: scores[lane, s] for s in slots}, held, len(held) + count)
        expected.append(best({s: weighted[lane, s] for s in slots}, stage, keep))

    retained = rule.select(view, torch.full((4,), keep))

    assert [lane.nonzero().flatten().tolist() for lane in retained] == expected


def test_criticalkv_scores_query_heads_apart_in_kvcrush():
    """Each head sets its bits by the length behind its own columns."""
    view = six_tokens_view()
    each = {AttentionSum().each().name: view.statistic(AttentionSum()).expand(2, 6)}
    heads = by_query_head(changed(view, statistics=each), (AttentionSum(),))
    assert view.projected_lengths().tolist() == [[1, 1, 1, 4, 3, 60]]
    assert heads.projected_lengths().tolist() == [[2, 2, 2, 4, 2, 40], [0, 0, 0, 4, 4, 80]]


@pytest.mark.parametrize(
    ("options", "keep", "piece_tokens", "retained"),
    [
        # scores 8 4 2 1 1 0 with mean 16 / 6 = 2.67
        ("tau=0.5", 5, 1, [0, 1, 2]),  # >= 1.33
        ("tau=0.5", 2, 1, [0, 1]),  # the cap
        ("tau=0.375", 5, 1, [0, 1, 2, 3, 4]),  # >= 1
        ("tau=0", 5, 1, [0, 1, 2, 3, 4]),
        ("tau=9", 5, 1, [0]),  # the best, whatever the threshold
        ("tau=0,mass=0.8", 5, 1, [0, 1, 2]),  # 8 + 4 < 12.8 <= 8 + 4 + 2
        ("tau=0,mass=0.75", 5, 1, [0, 1]),  # 8 + 4 = 12
        ("tau=0,mass=0.9", 5, 1, [0, 1, 2, 3, 4]),  # both tokens with the score at the border
        ("tau=0,mass=0.9", 4, 1, [0, 1, 2, 3]),
        ("tau=2,mass=0.9", 5, 1, [0]),  # >= 5.33
        ("tau=2,mass=0.9", 6, 1, [0, 1, 2, 3, 4, 5]),  # a lane within its cap evicts nothing
        # of the scores before the newest token, the mean is 16 / 5 = 3.2
        ("tau=0.5,recent=1", 5, 1, [0, 1, 2, 5]),  # >= 1.6
        ("tau=0.7,recent=1", 5, 1, [0, 1, 5]),  # >= 2.24
        ("tau=0.7,recent=1,base=(h2o:recent=2)", 5, 1, [0, 1, 4, 5]),  # mean 3.75: >= 2.63
        # pieces with means 6, 1.5, 0.5 and mean 2.67
        ("tau=0.5", 5, 2, [0, 1, 2, 3]),
        ("tau=0.6", 5, 2, [0, 1]),
        ("tau=0,mass=0.7", 5, 2, [0, 1]),  # 12 >= 11.2
        ("tau=0,mass=0.8", 5, 2, [0, 1, 2, 3]),  # 12 < 12.8 <= 15
    ],
)
def test_threshold_evicts_more_than_the_cap_requires(options, keep, piece_tokens, retained):
    base = "" if "base=" in options else ",base=(h2o:recent=0)"
    rule = make_policy(f"threshold:{options}{base}")
    sums = {AttentionSum().name: torch.tensor([[8.0, 4, 2, 1, 1, 0]])}

    view = changed(six_tokens_view(), statistics=sums)
    found = rule.select(view, torch.tensor([keep]), piece_tokens)

    assert found[0].nonzero().flatten().tolist() == retained


@pytest.mark.parametrize("base", ["h2o:recent=3,sinks=2", "snapkv:window=4", "tova", "roco"])
@pytest.mark.parametrize(("tau", "mass"), [(0.9, 1.0), (0.0, 0.5), (0.9, 0.6)])
def test_threshold_equals_a_plain_selection(base, tau, mass):
    rule = make_policy(f"threshold:base=({base}),tau={tau},mass={mass},recent=5")
    alone, keep = rule.base, torch.tensor([30, 30, 25, 25])
    history = make_history(tokens=60, group=2, layers=(1, 2), ragged=alone.scope == LANE)
    view = history.view(rule.statistics)
    scores = alone.score(view).double().numpy()
    if alone.scope == LAYER:
        scores = scores.reshape(2, 2, -1).mean(axis=1).repeat(2, axis=0)
    protected = rule.protected(view, keep)
    within = alone.choose(view, alone.score(view), protected, keep).numpy()

    retained = rule.select(view, keep)

    for lane, cached in enumerate(history.cached):
        free = [s for s in range(len(cached)) if not protected[lane, s]]
        ranked = sorted((scores[lane, s] for s in free), reverse=True)
        sums = np.cumsum(ranked)
        border = next(s for s, total in zip(ranked, sums, strict=True) if total >= mass * sums[-1])
        lowest = max(tau * sums[-1] / len(free), border if mass < 1 else 0)
        slots = np.flatnonzero(within[lane])
        expected = [s for s in slots if protected[lane, s] or scores[lane, s] >= lowest]
        assert retained[lane].nonzero().flatten().tolist() == expected
        assert len(expected) <= keep[lane]
    assert retained.sum() < keep.sum()


@pytest.mark.parametrize(
    ("base", "recent", "cap"),
    [
        ("h2o:recent=64", 64, 65),  # the same tokens
        ("h2o:recent=64", 10, 65),
        ("h2o:recent=8,sinks=4", 64, 69),
        ("h2o:sinks=4", 2, 9),  # half of 9 are 4
        ("h2o:sinks=4", 10, 15),
        ("tova", 5, 6),
    ],
)
def test_threshold_needs_the_larger_number_of_recent_tokens(base, recent, cap):
    rule = f"threshold:base=({base}),recent={recent}"
    assert make_policy(rule).min_cap == cap
    assert make_eviction(f"{rule},cap={cap + 1},every=1").text
    with pytest.raises(ConfigError, match=f"the rule needs {cap};"):
        make_eviction(f"{rule},cap={cap},every=1")


SCORING = sorted(name for name, rule in registered().items() if issubclass(rule, ScorePolicy))


def view_of_sums(policy, positions, sums, next_position):
    """One lane with a sum for each slot."""
    statistics = {policy.statistics[0].name: torch.tensor([sums])}
    return KVView(torch.tensor([positions]), next_position, statistics=statistics)


def after(view, retained):
    """The view of the next eviction: compacted slots in order of positions."""
    assert len(set(retained.sum(dim=1).tolist())) == 1
    lanes = view.positions.shape[0]
    sides = (x[retained].view(lanes, -1, view.head_dim) for x in (view.keys, view.values))
    positions = view.positions[retained].view(lanes, -1)
    return changed(view, positions=positions, slots=Slots(*sides))


def test_1_retained_tokens_keep_their_order():
    view = make_history(tokens=60, evictions=0).view()
    compacted = after(view, KeyDiff().select(view, torch.full((4,), 40)))

    newest = Recent(sinks=1).select(compacted, torch.full((4,), 10))

    assert (compacted.positions.diff(dim=1) > 0).all()
    retained = retained_positions(compacted, newest)
    for lane, tokens in zip(compacted.positions, retained, strict=True):
        first = [0] if 0 in lane else []
        assert tokens == sorted({*first, *lane[len(first) - 10 :].tolist()})
    again = LagKV(sinks=0, lag=10).select(compacted, torch.full((4,), 25))
    assert (again[:, -10:]).all()  # the newest partition, not the best-scored tokens


def test_2_age_is_the_distance_of_positions_not_of_slots():
    """Positions 0, 90, 99 of 100: seen by 100, 10, 1 queries, not 3, 2, 1.

    Means 10/100 = .1, 2/10 = .2, .15/1 = .15: evict the first. By slots: 3.3, 1, .15.
    """
    view = view_of_sums(Average(), [0, 90, 99], [10.0, 2.0, 0.15], next_position=100)
    assert retained_positions(view, Average().select(view, torch.tensor([2]))) == [[90, 99]]


def test_3_future_positions_start_at_the_sequence_length():
    starts = []

    @dataclass
    class RecordingRotations(Rotations):
        def mean_rotation(self, layer, positions):
            starts.append((layer, positions))
            return super().mean_rotation(layer, positions)

    history = make_history(tokens=50, evictions=4)
    policy = ExpectedAttention(future=16)
    view = changed(history.view(policy.statistics), rotation=RecordingRotations(history.dim))
    policy.select(view, keep_of(view, 0.5))

    assert view.positions.shape[1] < 50
    assert starts == [(0, range(50, 66)), (2, range(50, 66))]


@pytest.mark.parametrize(
    "name", ["average", "keydiff", "knorm", "roco", "scissorhands", "tova", "h2o", "random"]
)
def test_4_sinks_and_newest_tokens_are_protected_independent_of_scores(name):
    policy = policy_of(name, {"sinks": "2", "recent": "3"})
    history = make_history(tokens=40, evictions=2, ragged=False)
    history.weights[:, :, :, [0, 1, 37, 38, 39]] = 0.0
    history.keys[:, [0, 1, 37, 38, 39]] *= 100.0
    view = history.view(policy.statistics)

    for tokens in retained_positions(view, policy.select(view, torch.full((4,), 7))):
        assert {0, 1, 37, 38, 39} < set(tokens)


def test_5_sums_are_compared_in_full_precision():
    """300 and 300.1 are one number in bfloat16, whose steps are 2 there."""
    view = view_of_sums(H2O(recent=0), [0, 1], [300.0, 300.1], next_position=1000)
    assert torch.tensor(300.1).bfloat16() == torch.tensor(300.0).bfloat16()
    assert retained_positions(view, H2O(recent=0).select(view, torch.tensor([1]))) == [[1]]


def test_6_group_reductions_are_mean_max_and_sum():
    """Three query heads: token 0 gets .9 0 0, token 1 gets .4 .4 .4."""
    weights = torch.tensor([[[0.9, 0.4], [0.0, 0.4], [0.0, 0.4]]])
    assert reduce_group(weights, "mean")[0].tolist() == pytest.approx([0.3, 0.4])
    assert reduce_group(weights, "max")[0].tolist() == pytest.approx([0.9, 0.4])
    assert reduce_group(weights, "sum")[0].tolist() == pytest.approx([0.9, 1.2])


@pytest.mark.parametrize(
    "name", ["h2o", "h2o_sinks", "average", "roco", "scissorhands", "snapkv", "expected_attention"]
)
def test_6_unknown_group_reduction_is_refused(name):
    with pytest.raises(ConfigError, match="heads to be one of mean, max, sum, got 'median'"):
        policy_of(name, {"heads": "median"})


def test_7_pooling_precedes_the_group_reduction():
    """Heads 4 0 0 and 0 0 4, maximum of three neighbours: the middle has the highest score.

    Pooled, then reduced: 4 4 0 and 0 4 4, mean 2 4 2. In reverse order: 2 0 2, pooled 2 2 2.
    """
    weights = torch.tensor([[[4.0, 0.0, 0.0], [0.0, 0.0, 4.0]]])

    pooled = reduce_group(pool(weights, 3, "max"), "mean")

    assert pooled.tolist() == [[2.0, 4.0, 2.0]]


@pytest.mark.parametrize("name", SCORING)
def test_8_rules_have_no_state_between_sequences(name):
    policy, fresh = policy_of(name, {}), policy_of(name, {})
    first, second = (
        make_history(tokens=tokens, evictions=1, seed=seed, ragged=False).view(policy.statistics)
        for tokens, seed in ((60, 1), (40, 2))
    )
    assert policy.score(first).dtype in (torch.float32, torch.float64)
    assert torch.equal(policy.score(second), fresh.score(second))
    assert policy == fresh
    assert hash(policy) == hash(fresh)
    with pytest.raises((FrozenInstanceError, TypeError)):
        policy.sinks = 3


def test_tova_can_evict_the_newest_token_unless_protected():
    """Only its own query has attended to it, possibly with a low weight, as published."""
    history = make_history(tokens=30, evictions=0, layers=(0,), heads=1, group=1)
    history.keys[:, 29] = -100 * history.query(0, 0, 29)
    view = history.view(TOVA().statistics)
    assert 29 not in retained_positions(view, TOVA().select(view, torch.tensor([20])))[0]
    assert 29 in retained_positions(view, TOVA(recent=1).select(view, torch.tensor([20])))[0]
