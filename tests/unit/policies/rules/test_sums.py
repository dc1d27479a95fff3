"""Rules on sums of attention weights against plain ones."""

import numpy as np
import pytest
import torch

from quire.policies.average import Average
from quire.policies.h2o import H2O
from quire.policies.h2o_sinks import H2OSinks
from quire.policies.roco import RoCo
from quire.policies.scissorhands import Scissorhands
from quire.policies.view import KVView
from unit.policies.histories import REDUCE, best, keep_of, make_history, retained_positions

GROUPS = [1, 3]
HEADS = ["mean", "max", "sum"]


def check(policy, history, reference, share=0.6) -> None:
    """The rule keeps in each lane what `reference(lane, keep)` keeps."""
    view = history.view(policy.statistics)
    keep = keep_of(view, share, policy.least_cap)

    kept = retained_positions(view, policy.select(view, keep))

    assert kept == [reference(lane, int(keep[lane])) for lane in range(len(history.cached))]
    assert any(len(lane) < len(all_) for lane, all_ in zip(kept, history.cached, strict=True))


def rows(history, lane, token, heads):
    """The weight each query since gave a token, the group's heads reduced."""
    since = history.weights[lane, :, token:, token]
    return REDUCE[heads](since, axis=0)


def ends(history, lane, sinks, recent):
    cached = history.cached[lane]
    return {t for t in cached if t < sinks} | set(cached[len(cached) - recent :])


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("group", GROUPS)
def test_h2o_keeps_the_largest_sums_and_half_newest(group, heads, power):
    history = make_history(group=group)

    def reference(lane, keep):
        scores = {t: sum(rows(history, lane, t, heads) ** power) for t in history.cached[lane]}
        return best(scores, ends(history, lane, 0, keep // 2), keep)

    check(H2O(heads=heads, power=power), history, reference)


@pytest.mark.parametrize("held", range(60, 80))
def test_half_of_what_is_kept_leaves_room_for_the_edges_of_pieces(held):
    """43 stay at most, in pieces of 20; one sink and 21 newest alone would touch up to four."""
    policy = H2O(sinks=1)
    [sums] = policy.statistics
    positions = torch.arange(held)[None]
    view = KVView(positions, held, statistics={sums.name: positions.float()})

    kept = policy.select(view, torch.tensor([policy.least_cap + 2 * 20]), 20)

    assert kept.sum() <= 43
    assert kept[0, 0]


@pytest.mark.parametrize("recent", [-1, 0, 5])
def test_h2o_sinks_keeps_four_sinks_beside_them(recent):
    history = make_history(seed=1, fixed=1)  # sinks may have left before: none is made up

    def reference(lane, keep):
        scores = {t: sum(rows(history, lane, t, "mean")) for t in history.cached[lane]}
        newest = keep // 2 if recent == -1 else recent
        return best(scores, ends(history, lane, 4, newest), keep)

    check(H2OSinks(recent=recent), history, reference)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("group", GROUPS)
def test_average_divides_by_the_queries_that_saw_a_token(group, heads):
    history = make_history(group=group, seed=2)

    def reference(lane, keep):
        scores = {t: np.mean(rows(history, lane, t, heads)) for t in history.cached[lane]}
        return best(scores, (), keep)

    check(Average(heads=heads), history, reference)


def test_average_can_protect_both_ends():
    history = make_history(seed=3)

    def reference(lane, keep):
        scores = {t: np.mean(rows(history, lane, t, "mean")) for t in history.cached[lane]}
        return best(scores, ends(history, lane, 2, 3), keep)

    check(Average(sinks=2, recent=3), history, reference)


def roco_reference(history, sinks, recent, heads):
    def reference(lane, keep):
        cached = history.cached[lane]
        queries_seen = {t: rows(history, lane, t, heads) for t in cached}
        free = [t for t in cached if t not in ends(history, lane, sinks, recent)]
        steadiest = sorted(free, key=lambda t: (np.std(queries_seen[t]), -t))
        scope = steadiest[: max(keep - (len(cached) - len(free)), len(cached) - keep)]
        leaving = sorted(scope, key=lambda t: (np.mean(queries_seen[t]), -t))[: len(cached) - keep]
        return sorted(set(cached) - set(leaving))

    return reference


@pytest.mark.parametrize("share", [0.5, 0.6, 0.9])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("group", GROUPS)
def test_roco_lets_go_the_smallest_means_of_the_smallest_deviations(group, heads, share):
    history = make_history(group=group, seed=4, tokens=48)
    policy = RoCo(sinks=2, recent=5, heads=heads)

    check(policy, history, roco_reference(history, 2, 5, heads), share)


def test_roco_keeps_a_token_whose_weights_vary_though_its_mean_is_the_lowest():
    """Six tokens, four stay, no ends protected: the 4 steadiest may leave, the 2 lowest of them do.

    mean  0.10  0.30  0.05  0.20  0.40  0.50
    std   0.00  0.01  0.30  0.20  0.02  0.03    the 4 smallest: tokens 0, 1, 4, 5

    Tokens 2 and 3 stay though their means are low. Of the others 0 and 1 are lowest and leave.
    """
    policy = RoCo(sinks=0, recent=0)
    ages = torch.tensor([6.0, 5, 4, 3, 2, 1])
    means = torch.tensor([0.10, 0.30, 0.05, 0.20, 0.40, 0.50])
    stds = torch.tensor([0.00, 0.01, 0.30, 0.20, 0.02, 0.03])
    sums, squares = policy.statistics
    made = KVView(
        positions=torch.arange(6)[None],
        next_position=6,
        statistics={
            sums.name: (means * ages)[None],
            squares.name: ((stds**2 + means**2) * ages)[None],
        },
    )

    kept = policy.select(made, torch.tensor([4]))

    assert retained_positions(made, kept) == [[2, 3, 4, 5]]


@pytest.mark.parametrize("share_of_looks", [False, True])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("group", GROUPS)
def test_scissorhands_counts_low_attention_weights(group, heads, share_of_looks):
    history = make_history(group=group, seed=5)

    def reference(lane, keep):
        scores = {}
        for token in history.cached[lane]:
            requested = history.requested[lane, token:]
            low = [
                w < 1 / n for w, n in zip(rows(history, lane, token, heads), requested, strict=True)
            ]
            scores[token] = -np.float32(sum(low)) / (len(low) if share_of_looks else 1)
        return best(scores, ends(history, lane, 0, 10), keep)

    check(Scissorhands(heads=heads, share=share_of_looks), history, reference, share=0.7)
