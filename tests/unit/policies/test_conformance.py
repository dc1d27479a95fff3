"""Conformance of every registered policy with its default options."""

import sys
from dataclasses import fields
from functools import cache

import pytest
import torch

from quire.cli.options import documented_attributes
from quire.errors import ConfigError, PolicyError
from quire.layout.eviction import scoring_of
from quire.layout.statistics import QueryMoments, QueryRing
from quire.policies.base import LANE, LAYER, ScorePolicy
from quire.policies.eviction import make_eviction
from quire.policies.registry import policy_of, registered
from support.histories import Slots, changed, make_history, retained_positions, scale_of

PIECE = 4
NAMES = sorted(registered())
every_rule = pytest.mark.parametrize("name", NAMES)


def rules_that(condition):
    return pytest.mark.parametrize(
        "name", [name for name in NAMES if condition(policy_of(name, {}))]
    )


def reads_queries(policy):
    return any(isinstance(s, QueryRing | QueryMoments) for s in policy.statistics)


@cache
def history_of(*, ragged):
    """Long enough for every rule; a few tokens have been evicted before."""
    return make_history(tokens=310, fixed=40, evictions=4, group=2, layers=(1, 2), ragged=ragged)


@cache
def rule_and_view(name):
    policy = policy_of(name, {})
    return policy, history_of(ragged=policy.scope == LANE).view(policy.statistics)


def num_slots(view):
    return view.num_slots[:, 0]


def keep_counts(policy, view):
    """Numbers of tokens to retain, from the least cap to all."""
    least, most = policy.min_cap, int(num_slots(view).min())
    counts = {least, least + 1, (least + most) // 2, most - 1, most}
    return [torch.full_like(num_slots(view), count) for count in sorted(counts)] + [num_slots(view)]


def reordered(view, lanes, layers, heads):
    """The same lanes in another order, or a subset."""
    statistics = {}
    for name, values in view.statistics.items():  # rows of lanes or of their query heads
        each = len(values) // view.positions.shape[0]
        statistics[name] = values.unflatten(0, (-1, each))[lanes].flatten(0, 1)
    own = {"layers": layers, "heads_per_layer": heads, "statistics": statistics}
    own["layer_scales"] = tuple(scale_of(layer, view.head_dim) for layer in layers)
    slots = Slots(view.keys[lanes], view.values[lanes])
    return changed(view, positions=view.positions[lanes], slots=slots, **own)


def degenerate(view, slots=None):
    """Tokens that differ in position only: equal keys, zero sums and queries."""
    slots = slots or view.positions.shape[1]
    positions = torch.arange(slots).expand(view.positions.shape[0], slots)
    statistics = {}
    for name, values in view.statistics.items():
        statistics[name] = torch.zeros_like(values)
        if name.startswith("query_ring"):
            window = torch.arange(values.shape[1])
            statistics[name][:, slots % len(window) - 1, -1] = slots  # the last query only
        elif name.startswith("query_moments"):
            statistics[name] = torch.ones_like(values)
        elif values.dim() == 2:
            statistics[name] = statistics[name][:, :slots]
    keys = torch.ones(*positions.shape, view.head_dim)
    own = {"next_position": slots, "statistics": statistics, "slots": Slots(keys, keys)}
    return changed(view, positions=positions, **own)


@every_rule
def test_rule_documents_its_cost_and_options(name):
    policy = policy_of(name, {})
    documented = documented_attributes(type(policy).__doc__ or "")

    assert policy.cost
    assert set(documented) >= {field.name for field in fields(policy)}
    assert policy.scope in (LANE, LAYER)
    source = (sys.modules[type(policy).__module__].__doc__ or "").replace("papers", "paper")
    assert "Differs from the paper" in source or name == "random"


def assert_counts(policy, view, retained, keep):
    """Lanes retain `keep` slots; lanes that evict, with a rule that may retain fewer, 1 to that."""
    count = retained.sum(dim=1)
    if not policy.retains_fewer:
        assert count.tolist() == keep.tolist()
    assert ((count >= 1) & (count <= keep)).all()
    assert (count == keep)[keep == num_slots(view)].all()


@every_rule
def test_rule_retains_exactly_the_requested_number_and_protected_slots(name):
    policy, view = rule_and_view(name)

    different = num_slots(view) - torch.arange(4) * 3
    if policy.scope == LAYER:
        different = view.by_layer(different).amin(dim=1, keepdim=True).expand(-1, 2).flatten()
    for keep in (*keep_counts(policy, view), different):
        retained = policy.select(view, keep)
        assert_counts(policy, view, retained, keep)
        assert not (retained & ~view.live).any()
        if isinstance(policy, ScorePolicy) and keep is not different:
            protected = policy.protected(view, keep)
            assert not (protected & ~retained).any()
            assert (protected.sum(dim=1) < keep).all()


@rules_that(lambda policy: isinstance(policy, ScorePolicy))
def test_ties_retain_the_lower_positions(name):
    policy, view = rule_and_view(name)
    same = degenerate(view)
    keep = torch.full_like(num_slots(same), policy.min_cap + 5)
    protected = policy.protected(same, keep)

    retained = policy.choose(same, torch.zeros(same.positions.shape), protected, keep)

    for lane in range(len(keep)):
        free = [p for p in range(same.positions.shape[1]) if not protected[lane, p]]
        lowest = free[: int(keep[lane] - protected[lane].sum())]
        expected = protected[lane].clone()
        expected[lowest] = True
        assert retained[lane].equal(expected)


@every_rule
@pytest.mark.parametrize("slots", [1, 2, None])
def test_scores_of_identical_tokens_are_finite(name, slots):
    policy, view = rule_and_view(name)
    same = degenerate(view, slots)

    if isinstance(policy, ScorePolicy):
        assert torch.isfinite(policy.score(same)).all()
    keep = torch.full_like(num_slots(same), policy.min_cap)
    if (keep <= num_slots(same)).all():
        assert policy.select(same, keep).sum(dim=1).tolist() == keep.tolist()


@every_rule
def test_selection_is_independent_of_other_lanes_and_their_order(name):
    policy, view = rule_and_view(name)
    keep = torch.full_like(num_slots(view), policy.min_cap + 9)
    together = policy.select(view, keep)

    backwards = policy.select(reordered(view, [3, 2, 1, 0], (2, 1), 2), keep)
    assert torch.equal(backwards, together[[3, 2, 1, 0]])
    alone = policy.select(reordered(view, [2, 3], (2,), 2), keep[2:])

    assert torch.equal(alone, together[2:])
    if policy.scope == LANE:
        for lane in range(4):
            single = reordered(view, [lane], (view.layers[lane // 2],), 1)
            assert torch.equal(policy.select(single, keep[:1]), together[lane : lane + 1])


@every_rule
def test_selection_is_independent_of_padding(name):
    policy, view = rule_and_view(name)
    keep = torch.full_like(num_slots(view), policy.min_cap + 9)
    pad = torch.nn.functional.pad
    statistics = {
        own: pad(values, (0, 7)) if values.dim() == 2 else values
        for own, values in view.statistics.items()
    }
    slots = Slots(pad(view.keys, (0, 0, 0, 7)), pad(view.values, (0, 0, 0, 7)))
    positions = pad(view.positions, (0, 7), value=-1)
    padded = changed(view, positions=positions, statistics=statistics, slots=slots)

    retained = retained_positions(padded, policy.select(padded, keep))
    assert retained == retained_positions(view, policy.select(view, keep))


@rules_that(lambda policy: policy.scope == LAYER)
def test_heads_of_a_layer_scope_rule_retain_one_set(name):
    policy, view = rule_and_view(name)

    keep = torch.full_like(num_slots(view), policy.min_cap + 9)
    retained = view.by_layer(policy.select(view, keep))

    assert torch.equal(retained[:, 0], retained[:, 1])


@every_rule
def test_rule_is_deterministic_and_does_not_modify_its_inputs(name):
    policy, view = rule_and_view(name)
    keep = torch.full_like(num_slots(view), policy.min_cap + 9)
    inputs = [view.positions, keep, view.keys, view.values, *view.statistics.values()]
    before = [values.clone() for values in inputs]

    first, second = policy.select(view, keep), policy.select(view, keep)

    assert torch.equal(first, second)
    assert all(torch.equal(value, copy) for value, copy in zip(inputs, before, strict=True))


@every_rule
def test_rule_retains_whole_pieces_within_the_limit(name):
    policy, view = rule_and_view(name)
    least = policy.min_cap + 2 * PIECE
    slots = view.positions.shape[1]

    for count in (least, (least + int(num_slots(view).min())) // 2, int(num_slots(view).min())):
        keep = torch.full_like(num_slots(view), count)
        retained = policy.select(view, keep, PIECE)
        assert (retained.sum(dim=1) <= keep).all()
        assert policy.retains_fewer or (retained.sum(dim=1) > keep - 2 * PIECE).all()
        for start in range(0, slots, PIECE):
            piece = slice(start, start + PIECE)
            is_whole = (retained[:, piece] | ~view.live[:, piece]).all(dim=1)
            assert (is_whole | ~retained[:, piece].any(dim=1)).all()


@rules_that(lambda policy: policy.statistics)
def test_view_without_statistics_is_refused_by_name(name):
    policy, view = rule_and_view(name)
    with pytest.raises(PolicyError, match="built without the statistic"):
        policy.select(changed(view, statistics={}), num_slots(view) - 1)


@rules_that(reads_queries)
def test_rule_on_queries_is_refused_without_recorded_queries(name):
    policy, view = rule_and_view(name)
    empty = {name: torch.zeros_like(values) for name, values in view.statistics.items()}
    with pytest.raises(PolicyError, match="no query"):
        policy.select(changed(view, statistics=empty), num_slots(view) - 1)


@every_rule
def test_too_small_cap_is_refused(name):
    policy = policy_of(name, {})
    least, options = policy.min_cap, "granularity=page," if policy.needs_pieces else ""
    leaving = 0 if scoring_of(policy.statistics) else 3  # evicted once, to the cap

    assert make_eviction(f"{name}:{options}cap={least + leaving},every=3").policy == policy
    if least > 1:
        cap = least + leaving - 1
        with pytest.raises(ConfigError, match=r"raise cap\b.* every"):
            make_eviction(f"{name}:{options}cap={cap - policy.added_tokens(cap)},every=3")
