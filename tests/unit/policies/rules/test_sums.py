"""Policies on sums of attention weights, compared with plain implementations."""

import numpy as np
import pytest
import torch

from quire.policies.average import Average
from quire.policies.h2o import H2O
from quire.policies.h2o_sinks import H2OSinks
from quire.policies.roco import RoCo
from quire.policies.scissorhands import Scissorhands
from quire.policies.view import KVView
from support.histories import REDUCE, best, keep_of, make_history, retained_positions
from support.pairwise import every_pair

GROUPS = [1, 3]
HEADS = ["mean", "max", "sum"]


def check(policy, history, reference, share=0.6) -> None:
    """The rule retains in each lane the tokens that `reference(lane, keep)` returns."""
    view = history.view(policy.statistics)
    keep = keep_of(view, share, policy.min_cap)

    retained = retained_positions(view, policy.select(view, keep))

    assert retained == [reference(lane, int(keep[lane])) for lane in range(len(history.cached))]
    assert any(
        len(lane) < len(cached) for lane, cached in zip(retained, history.cached, strict=True)
    )


def rows(history, lane, token, heads):
    """The weights of a token in all later queries, reduced over the heads of the group."""
    since = history.weights[lane, :, token:, token]
    return REDUCE[heads](since, axis=0)


def ends(history, lane, sinks, recent):
    cached = history.cached[lane]
    return {t for t in cached if t < sinks} | set(cached[len(cached) - recent :])


@every_pair(power=[1, 2], heads=HEADS, group=GROUPS)
def test_h2o_retains_the_largest_sums_and_the_newest_half(group, heads, power):
    history = make_history(group=group)

    def reference(lane, keep):
        scores = {t: sum(rows(history, lane, t, heads) ** power) for t in history.cached[lane]}
        return best(scores, ends(history, lane, 0, keep // 2), keep)

    check(H2O(heads=heads, power=power), history, reference)


@pytest.mark.parametrize("num_slots", range(60, 80))
def test_h2o_newest_half_is_reduced_by_the_edges_of_pieces(num_slots):
    """At most 43 are retained, in pieces of 20; one sink and 21 newest could touch four pieces."""
    policy = H2O(sinks=1)
    [sums] = policy.statistics
    positions = torch.arange(num_slots)[None]
    view = KVView(positions, num_slots, statistics={sums.name: positions.float()})

    retained = policy.select(view, torch.tensor([policy.min_cap + 2 * 20]), 20)

    assert retained.sum() <= 43
    assert retained[0, 0]


@pytest.mark.parametrize("recent", [-1, 0, 5])
def test_h2o_sinks_also_retains_four_sinks(recent):
    history = make_history(seed=1, fixed=1)  # sinks may have been evicted before

    def reference(lane, keep):
        scores = {t: sum(rows(history, lane, t, "mean")) for t in history.cached[lane]}
        newest = keep // 2 if recent == -1 else recent
        return best(scores, ends(history, lane, 4, newest), keep)

    check(H2OSinks(recent=recent), history, reference)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("group", GROUPS)
def test_average_divides_by_the_queries_seen(group, heads):
    history = make_history(group=group, seed=2)

    def reference(lane, keep):
        scores = {t: np.mean(rows(history, lane, t, heads)) for t in history.cached[lane]}
        return best(scores, (), keep)

    check(Average(heads=heads), history, reference)


def roco_reference(history, sinks, recent, heads):
    def reference(lane, keep):
        cached = history.cached[lane]
        weights = {t: rows(history, lane, t, heads) for t in cached}
        free = [t for t in cached if t not in ends(history, lane, sinks, recent)]
        smallest_std = sorted(free, key=lambda t: (np.std(weights[t]), -t))
        scope = smallest_std[: max(keep - (len(cached) - len(free)), len(cached) - keep)]
        evicted = sorted(scope, key=lambda t: (np.mean(weights[t]), -t))[: len(cached) - keep]
        return sorted(set(cached) - set(evicted))

    return reference


@every_pair(share=[0.5, 0.6, 0.9], heads=HEADS, group=GROUPS)
def test_roco_evicts_the_smallest_means_of_the_smallest_deviations(group, heads, share):
    history = make_history(group=group, seed=4, tokens=48)
    policy = RoCo(sinks=2, recent=5, heads=heads)

    check(policy, history, roco_reference(history, 2, 5, heads), share)


def test_roco_retains_a_token_with_low_mean_and_high_deviation():
    """Retain four of six tokens, none protected: of the 4 smallest std evict the 2 lowest means.

    mean  0.10  0.30  0.05  0.20  0.40  0.50
    std   0.00  0.01  0.30  0.20  0.02  0.03    the 4 smallest: tokens 0, 1, 4, 5

    Tokens 2 and 3 are retained although their means are low. Of the others evict 0 and 1.
    """
    policy = RoCo(sinks=0, recent=0)
    ages = torch.tensor([6.0, 5, 4, 3, 2, 1])
    means = torch.tensor([0.10, 0.30, 0.05, 0.20, 0.40, 0.50])
    stds = torch.tensor([0.00, 0.01, 0.30, 0.20, 0.02, 0.03])
    sums, squares = policy.statistics
    view = KVView(
        positions=torch.arange(6)[None],
        next_position=6,
        statistics={
            sums.name: (means * ages)[None],
            squares.name: ((stds**2 + means**2) * ages)[None],
        },
    )

    retained = policy.select(view, torch.tensor([4]))

    assert retained_positions(view, retained) == [[2, 3, 4, 5]]


@every_pair(by_share=[False, True], heads=HEADS, group=GROUPS)
def test_scissorhands_counts_low_attention(group, heads, by_share):
    history = make_history(group=group, seed=5)

    def reference(lane, keep):
        scores = {}
        for token in history.cached[lane]:
            keys_seen = history.num_keys[lane, token:]
            low = [
                w < 1 / n for w, n in zip(rows(history, lane, token, heads), keys_seen, strict=True)
            ]
            scores[token] = -np.float32(sum(low)) / (len(low) if by_share else 1)
        return best(scores, ends(history, lane, 0, 10), keep)

    check(Scissorhands(heads=heads, share=by_share), history, reference, share=0.7)
