"""Policies on keys and values, compared with plain implementations."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from quire.errors import PolicyError
from quire.policies.expected_attention import ExpectedAttention
from quire.policies.keydiff import KeyDiff
from quire.policies.knorm import KNorm
from quire.policies.lagkv import LagKV
from quire.policies.triattention import TriAttention
from support.histories import (
    REDUCE,
    best,
    changed,
    keep_of,
    make_history,
    retained_positions,
    rotation,
    softmax,
)
from support.pairwise import every_pair


def test_knorm_retains_keys_with_the_smallest_norm():
    history = make_history()
    policy = KNorm(sinks=1, recent=2)
    view = history.view()
    keep = keep_of(view, 0.5)

    retained = retained_positions(view, policy.select(view, keep))

    for lane, tokens in enumerate(retained):
        cached = history.cached[lane]
        scores = {t: -np.linalg.norm(history.keys[lane, t]) for t in cached}
        assert tokens == best(scores, {0, *cached[-2:]}, int(keep[lane]))


def test_keydiff_retains_keys_min_similar_to_the_mean_direction():
    history = make_history(seed=1)
    view = history.view()
    keep = keep_of(view, 0.5)

    retained = retained_positions(view, KeyDiff().select(view, keep))

    for lane, tokens in enumerate(retained):
        cached = history.cached[lane]
        unit = {t: k / np.linalg.norm(k) for t in cached for k in [history.keys[lane, t]]}
        anchor = sum(unit.values()) / len(cached)
        scores = {t: -unit[t] @ anchor / np.linalg.norm(anchor) for t in cached}
        assert tokens == best(scores, (), int(keep[lane]))


def lag_scores(history, lane, sinks, lag):
    """Rank / lag of the evictable tokens; the others are protected."""
    cached = history.cached[lane]
    rest = [t for t in cached if t >= sinks]
    partitions = [rest[i : i + lag] for i in range(0, len(rest) - lag + 1, lag)]
    scores = {}
    for tokens, following in pairwise(partitions):
        weight = np.zeros(lag)
        for vectors in (history.keys[lane], history.values[lane]):
            low, high = vectors[following].min(axis=0), vectors[following].max(axis=0)
            scaled = (vectors[tokens] - low) / (high - low)
            weight += softmax(scaled.std(axis=1, ddof=1)) / 2
        for rank, index in enumerate(np.argsort(weight)):
            scores[tokens[index]] = rank / lag
    return scores


@pytest.mark.parametrize("ragged", [True, False])
@pytest.mark.parametrize(("sinks", "lag"), [(4, 7), (0, 5), (3, 10)])
def test_lagkv_ranks_tokens_relative_to_the_next_partition(sinks, lag, ragged):
    history = make_history(tokens=60, seed=2, ragged=ragged)
    policy = LagKV(sinks=sinks, lag=lag)
    view = history.view()
    keep = keep_of(view, 0.7, policy.min_cap)

    retained = retained_positions(view, policy.select(view, keep))

    for lane, tokens in enumerate(retained):
        scores = lag_scores(history, lane, sinks, lag)
        fixed = [t for t in history.cached[lane] if t not in scores]
        all_scores = scores | dict.fromkeys(fixed, 0.0)
        assert tokens == best(all_scores, fixed, int(keep[lane]))


@every_pair(epsilon=[0.0, 0.02], heads=["mean", "max", "sum"], group=[1, 3])
def test_expected_attention_scores_by_predicted_future_queries(group, heads, epsilon):
    history = make_history(group=group, seed=3, layers=(0, 1))  # odd layers have no RoPE
    policy = ExpectedAttention(sinks=2, future=9, epsilon=epsilon, heads=heads)
    view = history.view(policy.statistics)
    keep = keep_of(view, 0.5)

    retained = retained_positions(view, policy.select(view, keep))

    for lane, tokens in enumerate(retained):
        cached = history.cached[lane]
        after_sinks = [t for t in cached if t >= 2]
        future = range(history.tokens, history.tokens + 9)
        rotated = np.mean([rotation(position, history.dim) for position in future], axis=0)
        rotated = rotated if lane < 2 else np.eye(history.dim)
        rows = []
        for head in range(group):
            queries = history.raw[lane, head, 2:]
            mean = rotated @ queries.mean(axis=0)
            spread = rotated @ np.cov(queries.T, bias=True) @ rotated.T
            keys = history.keys[lane, after_sinks]
            scale = history.scale(lane)
            linear = keys @ mean * scale
            square = np.einsum("ti,ij,tj->t", keys, spread, keys) * scale**2 / 2
            rows.append(softmax(linear + square))
        norms = np.linalg.norm(history.values[lane, after_sinks], axis=1)
        score = (REDUCE[heads](rows, axis=0) + epsilon) * norms
        scores = dict(zip(after_sinks, score, strict=True)) | {0: 0.0, 1: 0.0}
        assert tokens == best(scores, {0, 1}, int(keep[lane]))


@every_pair(group=[1, 3], heads=["mean", "max", "sum"], max_offset=[1, 40])
def test_triattention_scores_distances_from_centres_of_queries(group, heads, max_offset):
    """Keys before RoPE, and a cosine for each band and distance, as the paper has it."""
    history = make_history(group=group, seed=3, layers=(0, 1))  # odd layers have no RoPE
    policy = TriAttention(sinks=2, max_offset=max_offset, heads=heads)
    view = history.view(policy.statistics)
    keep, half = keep_of(view, 0.5), history.dim // 2

    retained = retained_positions(view, policy.select(view, keep))

    for lane, tokens in enumerate(retained):
        after_sinks = [t for t in history.cached[lane] if t >= 2]
        turns = lane < 2
        speeds = 50.0 ** (-np.arange(half) / half) if turns else np.zeros(history.dim)

        def bands(vectors, turns=turns):
            return vectors[:, :half] + 1j * vectors[:, half:] if turns else vectors + 0j

        rows = []
        for head in range(group):
            queries = bands(history.raw[lane, head, 2:])
            centre, size = queries.mean(axis=0), np.sqrt((abs(queries) ** 2).mean(axis=0))
            concentration, row = abs(centre) / size, []
            for token in after_sinks:
                key = history.keys[lane, token]
                before = rotation(token, history.dim).T @ key if turns else key
                [key] = bands(before[None])
                distances = [
                    history.tokens - 1 - token + 2**n for n in range(6) if 2**n <= max_offset
                ]
                phases = np.outer(distances, speeds) + np.angle(centre) - np.angle(key)
                series = (abs(centre) * abs(key) * np.cos(phases)).sum(axis=1).mean()
                row.append(series + ((1 - concentration) * size * abs(key)).sum())
            rows.append((np.array(row) - np.mean(row)) / np.std(row))
        score = REDUCE[heads](rows, axis=0)
        scores = dict(zip(after_sinks, score, strict=True)) | {0: 0.0, 1: 0.0}
        assert tokens == best(scores, {0, 1}, int(keep[lane]))


@pytest.mark.parametrize("policy", [ExpectedAttention(), TriAttention()])
def test_rules_on_recorded_queries_without_one_are_refused(policy):
    history = make_history()
    view = history.view(policy.statistics)
    [moments] = policy.statistics
    empty = torch.zeros_like(view.statistics[moments.name])

    with pytest.raises(PolicyError, match="no query after the sinks was recorded"):
        policy.select(changed(view, statistics={moments.name: empty}), keep_of(view, 0.5))
    with pytest.raises(PolicyError, match="built without rotations"):
        policy.select(changed(view, rotation=None), keep_of(view, 0.5))
