"""Clusters of signatures and of keys, against plain ones."""

import numpy as np
import pytest
import torch

from quire.layout.statistics import AttentionSum
from quire.policies.h2o import H2O
from quire.policies.kmeans import KMeans
from quire.policies.view import KVView
from unit.policies.histories import Slots, best, retained_positions
from unit.policies.plain_kvcrush import history_of, of_layers, plain_count

pytest.importorskip("scipy")
BASE = H2O(recent=4, sinks=2)


def plain_kmeans(points, clusters, rounds):
    """Numbers of the points nearest the means, ties to the first, no point twice."""
    means = [points[i * len(points) // clusters] for i in range(clusters)]
    for _ in range(rounds):
        near = [int(np.argmin([np.linalg.norm(p - mean) for mean in means])) for p in points]
        for number in range(clusters):
            own = [p for p, n in zip(points, near, strict=True) if n == number]
            means[number] = np.mean(own, axis=0) if own else means[number]
    chosen = []
    for mean in means:
        free = {n: np.linalg.norm(p - mean) for n, p in enumerate(points) if n not in chosen}
        chosen.append(next(n for n in free if free[n] <= min(free.values()) + 1e-9))
    return chosen


@pytest.mark.parametrize("rounds", [1, 5])
def test_of_each_cluster_of_keys_the_token_nearest_its_mean_stays(rounds):
    history, policy = history_of(), KMeans(base=BASE, on="keys", share=0.5, rounds=rounds)
    view, keep, expected = history.view(policy.statistics), 30, []
    for number, (_, tokens, of_head, must, _) in enumerate(of_layers(history, policy, keep, 1)):
        lanes = range(number * history.heads, (number + 1) * history.heads)
        free = [t for t in tokens if t not in must]
        mean = {t: float(np.mean([scores[t] for scores in of_head])) for t in free}
        count = plain_count(policy, keep - len(must), mean)
        promoted = best(mean, [], keep - len(must) - count)
        grouped = [t for t in free if t not in promoted]
        points = [np.concatenate([history.keys[lane, t] for lane in lanes]) for t in grouped]
        stays = {grouped[n] for n in plain_kmeans(points, count, rounds)}
        expected += [sorted({*must, *promoted, *stays})] * history.heads

    kept = policy.select(view, torch.full((len(view.positions),), keep))

    assert retained_positions(view, kept) == expected


def test_of_each_kind_of_signature_one_token_stays():
    """Two heads, four kept: 0 to 3 by one of them, 0, 1, 6 and 7 by the other.

    Important are 0 and 1. The rest says 10 10 00 00 01 01: clusters start at 2 and 5, so the second
    one has 4 to 7, whose mean (0, 1/2) is as near to all of them.
    """
    each = AttentionSum().each()
    scores = torch.tensor([[9.0, 8, 5, 4, 1, 1, 0, 0], [9.0, 8, 0, 0, 1, 1, 5, 4]])
    keys = torch.zeros(1, 8, 2)
    view = KVView(
        torch.arange(8)[None],
        8,
        group=2,
        statistics={each.name: scores},
        slots=Slots(keys, keys),
        head_dim=2,
    )

    kept = KMeans(base=H2O(recent=0), share=0.5).select(view, torch.tensor([4]))

    assert retained_positions(view, kept) == [[0, 1, 2, 4]]
