"""Known mistakes of eviction implementations; the conformance of all rules finds others.

In this order: order of retained tokens, age, lengths, protection, precision, grouped heads,
pooling, state.
"""

from dataclasses import FrozenInstanceError, dataclass

import pytest
import torch

from quire.errors import ConfigError
from quire.policies.average import Average
from quire.policies.base import ScorePolicy
from quire.policies.expected_attention import ExpectedAttention
from quire.policies.h2o import H2O
from quire.policies.keydiff import KeyDiff
from quire.policies.lagkv import LagKV
from quire.policies.recent import Recent
from quire.policies.registry import policy_of, registered
from quire.policies.tova import TOVA
from quire.policies.view import KVView
from quire.policies.windows import pool, reduce_group
from support.histories import Rotations, Slots, changed, keep_of, make_history, retained_positions

SCORING = sorted(name for name, rule in registered().items() if issubclass(rule, ScorePolicy))


def view_of_sums(policy, positions, sums, next_position):
    """One lane with a sum for each slot."""
    [statistic] = policy.statistics
    return KVView(
        positions=torch.tensor([positions]),
        next_position=next_position,
        statistics={statistic.name: torch.tensor([sums])},
    )


def after(view, retained):
    """The view of the next eviction: compacted slots in order of positions."""
    assert len(set(retained.sum(dim=1).tolist())) == 1
    lanes = view.positions.shape[0]
    return changed(
        view,
        positions=view.positions[retained].view(lanes, -1),
        slots=Slots(
            view.keys[retained].view(lanes, -1, view.head_dim),
            view.values[retained].view(lanes, -1, view.head_dim),
        ),
    )


def test_1_retained_tokens_keep_their_order():
    view = make_history(tokens=60, evictions=0).view()
    compacted = after(view, KeyDiff().select(view, torch.full((4,), 40)))

    newest = Recent(sinks=1).select(compacted, torch.full((4,), 10))

    assert (compacted.positions.diff(dim=1) > 0).all()
    for lane, tokens in zip(
        compacted.positions, retained_positions(compacted, newest), strict=True
    ):
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
    "policy",
    [
        policy_of(name, {"sinks": "2", "recent": "3"})
        for name in ("average", "keydiff", "knorm", "roco", "scissorhands", "tova", "h2o", "random")
    ],
)
def test_4_sinks_and_newest_tokens_are_protected_independent_of_scores(policy):
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


@pytest.mark.parametrize("name", SCORING)
def test_5_scores_are_float32_or_wider(name):
    policy = policy_of(name, {})
    view = make_history(tokens=40, evictions=0, ragged=False).view(policy.statistics)

    assert policy.score(view).dtype in (torch.float32, torch.float64)


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
    policy.score(first)

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
