"""What every registered rule promises, with its default options: one suite over the registry."""

import sys
from collections.abc import Callable
from dataclasses import fields
from functools import cache

import pytest
import torch

from quire.cli.options import documented_attributes
from quire.errors import ConfigError, PolicyError
from quire.layout.statistics import QueryMoments, QueryRing
from quire.policies.base import LANE, LAYER, EvictionPolicy, ScorePolicy
from quire.policies.eviction import make_eviction
from quire.policies.registry import policy_of, registered
from quire.policies.view import KVView
from unit.policies.histories import (
    History,
    Slots,
    changed,
    make_history,
    retained_positions,
)

PIECE = 4
NAMES = sorted(registered())
every_rule = pytest.mark.parametrize("name", NAMES)


def rules_that(hold: Callable[[EvictionPolicy], object]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", [name for name in NAMES if hold(policy_of(name, {}))])


def asks_queries(policy: EvictionPolicy) -> bool:
    return any(isinstance(s, QueryRing | QueryMoments) for s in policy.statistics)


@cache
def history_of(*, ragged: bool) -> History:
    """Long enough for every rule; a few tokens have left before."""
    return make_history(tokens=310, fixed=40, evictions=4, group=2, layers=(1, 2), ragged=ragged)


@cache
def rule_and_view(name: str) -> tuple[EvictionPolicy, KVView]:
    policy = policy_of(name, {})
    return policy, history_of(ragged=policy.scope == LANE).view(policy.statistics)


def held(view: KVView) -> torch.Tensor:
    return view.num_slots[:, 0]


def shares(policy: EvictionPolicy, view: KVView) -> list[torch.Tensor]:
    """Numbers to keep, from the least that makes sense to all."""
    least, most = policy.least_cap, int(held(view).min())
    counts = {least, least + 1, (least + most) // 2, most - 1, most}
    return [torch.full_like(held(view), count) for count in sorted(counts)] + [held(view)]


def reordered(view: KVView, lanes: list[int], layers: tuple[int, ...], heads: int) -> KVView:
    """The same lanes in another order, or some of them."""
    assert view.slots is not None
    return changed(
        view,
        positions=view.positions[lanes],
        layers=layers,
        heads_per_layer=heads,
        statistics={name: taken(view, numbers, lanes) for name, numbers in view.statistics.items()},
        slots=Slots(view.keys[lanes], view.values[lanes]),
    )


def taken(view: KVView, numbers: torch.Tensor, lanes: list[int]) -> torch.Tensor:
    """Of some lanes, or of all their query heads."""
    each = len(numbers) // view.positions.shape[0]
    return numbers.unflatten(0, (-1, each))[lanes].flatten(0, 1)


def degenerate(view: KVView, slots: int | None = None) -> KVView:
    """Nothing tells tokens apart but their positions: equal keys, sums and queries of zeros."""
    slots = slots or view.positions.shape[1]
    positions = torch.arange(slots).expand(view.positions.shape[0], slots)
    made = {}
    for name, numbers in view.statistics.items():
        made[name] = torch.zeros_like(numbers)
        if name.startswith("query_ring"):
            made[name] = torch.zeros_like(numbers)
            places = torch.arange(numbers.shape[1])
            made[name][:, slots % len(places) - 1, -1] = slots  # the last query alone
        elif name.startswith("query_moments"):
            made[name] = torch.ones_like(numbers)
        elif numbers.dim() == 2:
            made[name] = made[name][:, :slots]
    keys = torch.ones(*positions.shape, view.head_dim)
    return changed(
        view, positions=positions, next_position=slots, statistics=made, slots=Slots(keys, keys)
    )


@every_rule
def test_a_rule_says_what_it_costs_and_what_its_options_mean(name):
    policy = policy_of(name, {})
    documented = documented_attributes(type(policy).__doc__ or "")

    assert policy.cost
    assert set(documented) >= {field.name for field in fields(policy)}
    assert policy.scope in (LANE, LAYER)
    assert "Differs from the paper" in source_of(policy) or name == "random"


def source_of(policy: EvictionPolicy) -> str:
    return (sys.modules[type(policy).__module__].__doc__ or "").replace("papers", "paper")


@every_rule
def test_exactly_as_many_stay_as_are_asked_for(name):
    policy, view = rule_and_view(name)

    for keep in shares(policy, view):
        kept = policy.select(view, keep)
        assert kept.sum(dim=1).tolist() == keep.tolist()
        assert not (kept & ~view.live).any()


@every_rule
def test_unequal_numbers_of_lanes_are_kept_too(name):
    policy, view = rule_and_view(name)
    keep = held(view) - torch.arange(4) * 3
    if policy.scope == LAYER:
        keep = view.by_layer(keep).amin(dim=1, keepdim=True).expand(-1, 2).flatten()

    assert policy.select(view, keep).sum(dim=1).tolist() == keep.tolist()


@rules_that(lambda policy: isinstance(policy, ScorePolicy))
def test_what_is_protected_stays_and_leaves_room_for_one(name):
    policy, view = rule_and_view(name)

    for keep in shares(policy, view):
        protected = policy.protected(view, keep)
        assert not (protected & ~policy.select(view, keep)).any()
        assert (protected.sum(dim=1) < keep).all()


@rules_that(lambda policy: isinstance(policy, ScorePolicy))
def test_ties_keep_the_lower_positions(name):
    policy, view = rule_and_view(name)
    same = degenerate(view)
    keep = torch.full_like(held(same), policy.least_cap + 5)
    protected = policy.protected(same, keep)

    kept = policy.choose(same, torch.zeros(same.positions.shape), protected, keep)

    for lane in range(len(keep)):
        free = [p for p in range(same.positions.shape[1]) if not protected[lane, p]]
        lowest = free[: int(keep[lane] - protected[lane].sum())]
        assert kept[lane].nonzero().flatten().tolist() == sorted(
            [*lowest, *protected[lane].nonzero().flatten().tolist()]
        )


@every_rule
@pytest.mark.parametrize("slots", [1, 2, None])
def test_scores_are_finite_when_nothing_tells_tokens_apart(name, slots):
    policy, view = rule_and_view(name)
    same = degenerate(view, slots)

    if isinstance(policy, ScorePolicy):
        assert torch.isfinite(policy.score(same)).all()
    keep = torch.full_like(held(same), policy.least_cap)
    if (keep <= held(same)).all():
        assert policy.select(same, keep).sum(dim=1).tolist() == keep.tolist()


@every_rule
def test_the_order_of_lanes_does_not_matter(name):
    policy, view = rule_and_view(name)
    keep = torch.full_like(held(view), policy.least_cap + 9)
    lanes = [3, 2, 1, 0]

    kept = policy.select(reordered(view, lanes, (2, 1), 2), keep)

    assert torch.equal(kept, policy.select(view, keep)[lanes])


@every_rule
def test_companions_do_not_matter(name):
    policy, view = rule_and_view(name)
    keep = torch.full_like(held(view), policy.least_cap + 9)
    together = policy.select(view, keep)

    alone = policy.select(reordered(view, [2, 3], (2,), 2), keep[2:])

    assert torch.equal(alone, together[2:])
    if policy.scope == LANE:
        for lane in range(4):
            one = reordered(view, [lane], (view.layers[lane // 2],), 1)
            assert torch.equal(policy.select(one, keep[:1]), together[lane : lane + 1])


@every_rule
def test_slots_that_are_not_there_do_not_matter(name):
    policy, view = rule_and_view(name)
    keep = torch.full_like(held(view), policy.least_cap + 9)
    more = torch.nn.functional.pad
    padded = changed(
        view,
        positions=more(view.positions, (0, 7), value=-1),
        statistics={
            name: more(numbers, (0, 7)) if numbers.dim() == 2 else numbers
            for name, numbers in view.statistics.items()
        },
        slots=Slots(more(view.keys, (0, 0, 0, 7)), more(view.values, (0, 0, 0, 7))),
    )

    kept = policy.select(padded, keep)

    assert retained_positions(padded, kept) == retained_positions(view, policy.select(view, keep))


@rules_that(lambda policy: policy.scope == LAYER)
def test_heads_agree_where_a_layer_has_one_set(name):
    policy, view = rule_and_view(name)

    kept = view.by_layer(policy.select(view, torch.full_like(held(view), policy.least_cap + 9)))

    assert torch.equal(kept[:, 0], kept[:, 1])


@every_rule
def test_a_rule_changes_nothing_and_answers_alike_twice(name):
    policy, view = rule_and_view(name)
    keep = torch.full_like(held(view), policy.least_cap + 9)
    given = [view.positions, keep, view.keys, view.values, *view.statistics.values()]
    before = [numbers.clone() for numbers in given]

    first, second = policy.select(view, keep), policy.select(view, keep)

    assert torch.equal(first, second)
    assert all(torch.equal(now, then) for now, then in zip(given, before, strict=True))


@every_rule
def test_whole_pieces_stay_and_never_more_than_may(name):
    policy, view = rule_and_view(name)
    least = policy.least_cap + 2 * PIECE
    slots = view.positions.shape[1]

    for count in (least, (least + int(held(view).min())) // 2, int(held(view).min())):
        keep = torch.full_like(held(view), count)
        kept = policy.select(view, keep, PIECE)
        assert (kept.sum(dim=1) <= keep).all()
        assert (kept.sum(dim=1) > keep - 2 * PIECE).all()
        for start in range(0, slots, PIECE):
            piece = slice(start, start + PIECE)
            stays = (kept[:, piece] | ~view.live[:, piece]).all(dim=1)
            assert (stays | ~kept[:, piece].any(dim=1)).all()


@rules_that(lambda policy: policy.statistics)
def test_a_rule_without_its_statistics_is_refused_by_name(name):
    policy, view = rule_and_view(name)

    with pytest.raises(PolicyError, match="built without the statistic"):
        policy.select(changed(view, statistics={}), held(view) - 1)


@rules_that(asks_queries)
def test_a_rule_that_asks_queries_is_refused_when_there_are_none(name):
    policy, view = rule_and_view(name)
    none = {name: torch.zeros_like(numbers) for name, numbers in view.statistics.items()}

    with pytest.raises(PolicyError, match="no query"):
        policy.select(changed(view, statistics=none), held(view) - 1)


@every_rule
def test_a_cap_that_is_too_small_is_refused_before_anything_runs(name):
    least = policy_of(name, {}).least_cap

    policy = policy_of(name, {})
    how = "granularity=page," if policy.needs_pieces else ""

    assert make_eviction(f"{name}:{how}cap={least + 3},every=3").policy == policy
    if least > 1:
        with pytest.raises(ConfigError, match=r"raise cap\b.* every"):
            make_eviction(f"{name}:{how}cap={least + 2 - policy.added_tokens(least + 2)},every=3")
