"""K-means of signatures and of keys, compared with a plain implementation."""

import sys

import numpy as np
import pytest
import torch

from quire.errors import ConfigError
from quire.eviction.eviction_rules import check_rules
from quire.layout.statistics import AttentionSum
from quire.policies.eviction import make_eviction
from quire.policies.h2o import H2O
from quire.policies.kmeans import KMeans
from quire.policies.view import KVView
from support.histories import Slots, best, retained_positions
from support.plain_kvcrush import history_of, of_layers, plain_count

pytest.importorskip("scipy")
BASE = H2O(recent=4, sinks=2)


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


@pytest.mark.parametrize("rounds", [1, 5])
def test_kmeans_retains_the_token_nearest_to_each_key_cluster_mean(rounds):
    history, policy = history_of(), KMeans(base=BASE, on="keys", share=0.5, rounds=rounds)
    view, keep, expected = history.view(policy.statistics), 30, []
    for number, (_, tokens, of_head, protected_tokens, _) in enumerate(
        of_layers(history, policy, keep, 1)
    ):
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


def test_kmeans_retains_one_token_per_signature_cluster():
    """Two heads that retain four tokens: 0 to 3 in the first, 0, 1, 6 and 7 in the second.

    0 and 1 are promoted. The other signatures are 10 10 00 00 01 01: clusters start at 2 and 5, so
    the second has 4 to 7, whose mean (0, 1/2) is equally near to all of them.
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

    retained = KMeans(base=H2O(recent=0), share=0.5).select(view, torch.tensor([4]))

    assert retained_positions(view, retained) == [[0, 1, 2, 4]]


@pytest.mark.parametrize("text", ["kmeans:cap=64", "kvcrush:base=(kmeans:base=(h2o)),cap=64"])
def test_missing_scipy_is_refused_when_the_rule_is_read(monkeypatch, text):
    monkeypatch.setitem(sys.modules, "scipy", None)

    with pytest.raises(
        ConfigError, match=r"kmeans needs scipy .*pip install 'quire-llm\[kmeans\]'"
    ):
        make_eviction(text)


def test_missing_scipy_refuses_only_engines_that_name_the_rule(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)

    check_rules("full", "all")  # "all" means those that are installed
    with pytest.raises(ConfigError, match="needs scipy"):
        check_rules("full", "h2o; kmeans")
