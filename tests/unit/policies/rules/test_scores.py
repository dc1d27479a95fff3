"""Rules on sums, keys, windows and positions, KVzip, and rules around others, by plain code."""

import math
from dataclasses import FrozenInstanceError, dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from quire.errors import ConfigError, PolicyError, UnsoundCombination
from quire.kernels.latent import LatentHeads
from quire.layout.model import HeadShape
from quire.layout.statistics import AttentionMax, AttentionSum, QueryMoments, QueryRing, ScoringPass
from quire.models.observing import OutputProjections
from quire.policies import windows
from quire.policies.average import Average
from quire.policies.base import LANE, LAYER, EvictionPolicy, ScorePolicy
from quire.policies.criticalkv import CriticalKV
from quire.policies.eviction import LaneShape, make_eviction
from quire.policies.expected_attention import ExpectedAttention
from quire.policies.h2o import H2O
from quire.policies.h2o_sinks import H2OSinks
from quire.policies.keydiff import KeyDiff
from quire.policies.knorm import KNorm
from quire.policies.kvzip import KVzip
from quire.policies.lagkv import LagKV
from quire.policies.random import Random
from quire.policies.recent import Recent
from quire.policies.registry import make_policy, policy_of, registered
from quire.policies.rkv import RKV, mean_similarity
from quire.policies.roco import RoCo
from quire.policies.scissorhands import Scissorhands
from quire.policies.signatures.query_heads import by_query_head
from quire.policies.sinks import Sinks
from quire.policies.snapkv import SnapKV
from quire.policies.streaming import Streaming
from quire.policies.threshold import Threshold
from quire.policies.tova import TOVA
from quire.policies.triattention import TriAttention
from quire.policies.value_norm import ValueNorm
from quire.policies.view import KVView
from quire.policies.windows import column_sums, pool, reduce_group
from support.histories import (
    REDUCE,
    Rotations,
    Slots,
    best,
    changed,
    keep_of,
    make_history,
    retained_positions,
    rotation,
    softmax,
)
from support.pairwise import every_pair

GROUPS = [1, 3]
HEADS = ["mean", "max", "sum"]


def check(policy, history, reference, share=0.5):
    """The rule retains in each lane the tokens that `reference(lane, keep)` returns."""
    view = history.view(policy.statistics)
    keep = keep_of(view, share, policy.min_cap)

    retained = retained_positions(view, policy.select(view, keep))

    assert retained == [reference(lane, int(keep[lane])) for lane in range(len(history.cached))]
    lengths = zip(map(len, retained), map(len, history.cached), strict=True)
    assert any(own < held for own, held in lengths)


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

    check(H2O(heads=heads, power=power), history, reference, 0.6)


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

    check(H2OSinks(recent=recent), history, reference, 0.6)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("group", GROUPS)
def test_average_divides_by_the_queries_seen(group, heads):
    history = make_history(group=group, seed=2)

    def reference(lane, keep):
        scores = {t: np.mean(rows(history, lane, t, heads)) for t in history.cached[lane]}
        return best(scores, (), keep)

    check(Average(heads=heads), history, reference, 0.6)


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
    numbers = (means * ages)[None], ((stds**2 + means**2) * ages)[None]
    statistics = {x.name: own for x, own in zip(policy.statistics, numbers, strict=True)}
    view = KVView(torch.arange(6)[None], 6, statistics=statistics)

    retained = policy.select(view, torch.tensor([4]))

    assert retained_positions(view, retained) == [[2, 3, 4, 5]]


@every_pair(by_share=[False, True], heads=HEADS, group=GROUPS)
def test_scissorhands_counts_low_attention(group, heads, by_share):
    history = make_history(group=group, seed=5)

    def reference(lane, keep):
        scores = {}
        for token in history.cached[lane]:
            keys_seen = history.num_keys[lane, token:]
            weights = rows(history, lane, token, heads)
            low = [weight < 1 / n for weight, n in zip(weights, keys_seen, strict=True)]
            scores[token] = -np.float32(sum(low)) / (len(low) if by_share else 1)
        return best(scores, ends(history, lane, 0, 10), keep)

    check(Scissorhands(heads=heads, share=by_share), history, reference, share=0.7)


def test_keys_with_small_norms_or_unlike_the_mean_are_retained():
    history = make_history()

    def reference(lane, keep):
        cached = history.cached[lane]
        scores = {t: -np.linalg.norm(history.keys[lane, t]) for t in cached}
        return best(scores, {0, *cached[-2:]}, keep)

    check(KNorm(sinks=1, recent=2), history, reference)

    history = make_history(seed=1)

    def reference(lane, keep):
        cached = history.cached[lane]
        unit = {t: k / np.linalg.norm(k) for t in cached for k in [history.keys[lane, t]]}
        anchor = sum(unit.values()) / len(cached)
        scores = {t: -unit[t] @ anchor / np.linalg.norm(anchor) for t in cached}
        return best(scores, (), keep)

    check(KeyDiff(), history, reference)


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

    def reference(lane, keep):
        scores = lag_scores(history, lane, sinks, lag)
        fixed = [t for t in history.cached[lane] if t not in scores]
        return best(scores | dict.fromkeys(fixed, 0.0), fixed, keep)

    check(LagKV(sinks=sinks, lag=lag), history, reference, 0.7)


@every_pair(epsilon=[0.0, 0.02], heads=["mean", "max", "sum"], group=[1, 3])
def test_expected_attention_scores_by_predicted_future_queries(group, heads, epsilon):
    history = make_history(group=group, seed=3, layers=(0, 1))  # odd layers have no RoPE
    policy = ExpectedAttention(sinks=2, future=9, epsilon=epsilon, heads=heads)

    def reference(lane, keep):
        after_sinks = [t for t in history.cached[lane] if t >= 2]
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
        return best(scores, {0, 1}, keep)

    check(policy, history, reference)


@every_pair(group=[1, 3], heads=["mean", "max", "sum"], max_offset=[1, 40])
def test_triattention_scores_distances_from_centres_of_queries(group, heads, max_offset):
    """Keys before RoPE, and a cosine for each band and distance, as the paper has it."""
    history = make_history(group=group, seed=3, layers=(0, 1))  # odd layers have no RoPE
    policy, half = TriAttention(sinks=2, max_offset=max_offset, heads=heads), history.dim // 2

    def reference(lane, keep):
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
                age = history.tokens - 1 - token
                distances = [age + 2**n for n in range(6) if 2**n <= max_offset]
                phases = np.outer(distances, speeds) + np.angle(centre) - np.angle(key)
                series = (abs(centre) * abs(key) * np.cos(phases)).sum(axis=1).mean()
                row.append(series + ((1 - concentration) * size * abs(key)).sum())
            rows.append((np.array(row) - np.mean(row)) / np.std(row))
        score = REDUCE[heads](rows, axis=0)
        scores = dict(zip(after_sinks, score, strict=True)) | {0: 0.0, 1: 0.0}
        return best(scores, {0, 1}, keep)

    check(policy, history, reference)


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


def window_rows(history, lane, head, window):
    """Weights of the last queries over the cached tokens: {query: {token: weight}}."""
    rows = {}
    for query in range(max(0, history.tokens - window), history.tokens):
        seen = [t for t in history.cached[lane] if t <= query]
        logits = history.keys[lane, seen] @ history.query(lane, head, query) * history.scale(lane)
        rows[query] = dict(zip(seen, softmax(logits), strict=True))
    return rows


@pytest.mark.parametrize("scope", ["layer", "lane"])
@pytest.mark.parametrize("group", GROUPS)
def test_tova_retains_by_the_weights_of_the_last_query(group, scope):
    history = make_history(group=group, ragged=scope == "lane", seed=scope == "lane")

    def reference(lane, keep):
        of_layer = (lane // 2 * 2, lane // 2 * 2 + 1) if scope == "layer" else (lane,)
        heads = [(of, head) for of in of_layer for head in range(group)]
        last = [window_rows(history, *head, 1)[history.tokens - 1] for head in heads]
        scores = {t: np.mean([row[t] for row in last]) for t in history.cached[lane]}
        return best(scores, () if scope == "layer" else {0}, keep)

    check(TOVA() if scope == "layer" else TOVA(scope="lane", sinks=1), history, reference)


@pytest.mark.parametrize("window", [1, 4])
def test_weights_of_folded_queries_over_latents_are_those_of_the_heads(window):
    """Latents of 6 elements, projected to keys of 4 and values of 3; rotated parts of 2."""
    generator, heads, tokens = torch.Generator().manual_seed(0), 3, 9
    projection = torch.nn.Linear(6, heads * (4 + 3), bias=False)
    latent = LatentHeads(lambda: projection.weight, heads, 4, lambda value, key: (key, value))
    stored = torch.randn(tokens, 6 + 2, generator=generator)
    queries = torch.randn(window, heads, 4 + 2, generator=generator)
    by_head = (stored[:, :6] @ projection.weight.T).detach().view(tokens, heads, 7).transpose(0, 1)
    keys = torch.cat([by_head[..., :4], stored[:, 6:].expand(heads, -1, -1)], dim=2)
    marks, ring = torch.arange(tokens - window, tokens)[:, None] + 1.0, QueryRing(window)

    def sums(queries, keys):  # a lane for each KV head
        lanes = queries.view(window, len(keys), -1).transpose(0, 1)
        record = torch.cat([lanes, marks.expand(len(keys), -1, -1)], dim=2)
        more = {"statistics": {ring.name: record}, "slots": Slots(keys, keys)}
        more |= {"heads_per_layer": len(keys), "head_dim": keys.shape[2], "layer_scales": (0.4,)}
        view = KVView(torch.arange(tokens).expand(len(keys), -1), tokens, **more)
        return column_sums(view, ring).flatten(0, 1)

    found = sums(latent.fold(queries).flatten(1), stored[None])
    torch.testing.assert_close(found, sums(queries, keys), atol=1e-6, rtol=1e-5)


def pooled(values, kernel, pooling):
    half = kernel // 2
    padded = [0.0] * half + list(values) + [0.0] * half
    parts = [padded[i : i + kernel] for i in range(len(values))]
    return [max(part) if pooling == "max" else sum(part) / kernel for part in parts]


@every_pair(
    pool_by=[(1, "avg"), (5, "avg"), (5, "max"), (3, "max")],
    heads=["mean", "max", "sum"],
    group=GROUPS,
)
def test_snapkv_pools_each_query_head_and_then_reduces_the_group(group, heads, pool_by):
    kernel, pooling = pool_by
    window = 6
    history = make_history(group=group, tokens=44, fixed=window)
    policy = SnapKV(window=window, kernel=kernel, pooling=pooling, heads=heads, sinks=1)

    def reference(lane, keep):
        cached = history.cached[lane]
        before = cached[:-window]
        by_head = []
        for head in range(group):
            rows = window_rows(history, lane, head, window)
            sums = [sum(row[t] for row in rows.values()) for t in before]
            by_head.append(pooled(sums, kernel, pooling))
        reduced = REDUCE[heads](by_head, axis=0)
        return best(dict(zip(before, reduced, strict=True)), {0, *cached[-window:]}, keep)

    check(policy, history, reference, 0.6)


def test_partly_filled_window_uses_the_recorded_queries():
    history = make_history(tokens=12, evictions=1, fixed=3)
    ring = QueryRing(32)
    view = history.view([ring])

    sums = column_sums(view, ring)

    for lane, cached in enumerate(history.cached):
        for head in range(3):
            rows = window_rows(history, lane, head, 32)
            plain = [sum(row.get(t, 0.0) for row in rows.values()) for t in cached]
            assert sums[lane, head, : len(cached)].numpy() == pytest.approx(plain, abs=1e-5)
            assert not sums[lane, head, len(cached) :].any()


def similarity(keys, threshold):
    """R-KV's redundancy of each key before its softmax: plain loops over one block."""
    unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    cosines = unit @ unit.T
    for row in range(len(keys)):
        cosines[row, row] = 0.0
        similar = [column for column in range(len(keys)) if cosines[row, column] > threshold]
        if similar:
            cosines[row, similar[-1]] = 0.0
    return cosines.mean(axis=0)


@pytest.mark.parametrize("block", [0, 8, 100])
@pytest.mark.parametrize("group", GROUPS)
def test_rkv_mixes_importance_with_redundancy(group, block):
    window = 5
    history = make_history(group=group, tokens=44, fixed=window, seed=2, dim=4)
    policy = RKV(window=window, kernel=3, mix_lambda=0.3, threshold=0.4, block=block, sinks=1)

    def reference(lane, keep):
        cached = history.cached[lane]
        before, keys = cached[:-window], history.keys[lane, cached]
        weights = []
        for query in range(history.tokens - window, history.tokens):
            queries = np.stack([history.query(lane, head, query) for head in range(group)])
            logits = queries @ history.keys[lane, before].T * history.scale(lane)
            weights.append(softmax(logits.max(axis=0)))
        importance = pooled(np.mean(weights, axis=0), 3, "max")
        size = block or len(keys)
        blocks = [similarity(keys[i : i + size], 0.4) for i in range(0, len(keys), size)]
        both = zip(before, importance, softmax(np.concatenate(blocks)), strict=False)
        scores = {t: 0.3 * promoted - 0.7 * redundant for t, promoted, redundant in both}
        return best(scores, {0, *cached[-window:]}, keep)

    check(policy, history, reference, 0.6)


def test_rkv_ignores_the_newest_similar_key():
    """Keys a = (1, 0), b = (0, 1), c = (1, 0), d = (1, 0), threshold 0.5; 4 tokens.

    Rows: a is similar to c, d: ignores d, adds 1 to c. b is similar to none: no change.
    c is similar to a, d: ignores d, adds 1 to a. d is similar to a, c: ignores c, adds 1 to a.
    Column sums: a 2, b 0, c 1, d 0; means: 0.5, 0, 0.25, 0.
    """
    keys = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]])

    mean = mean_similarity(keys, torch.ones(1, 4, dtype=torch.bool), threshold=0.5)

    assert mean.tolist() == [[0.5, 0.0, 0.25, 0.0]]


def test_similarity_and_scores_are_independent_of_the_slice_size_which_is_bounded(monkeypatch):
    parts = list(windows.slices(1000, windows.SCRATCH_NUMBERS // 3))
    assert {part.stop - part.start for part in parts} == {3}
    assert len(list(windows.slices(5, 10 * windows.SCRATCH_NUMBERS))) == 5

    keys = torch.randn(3, 150, 4, generator=torch.Generator().manual_seed(0))
    live = torch.arange(150) < torch.tensor([150, 97, 4])[:, None]
    keys, history = keys * live[:, :, None], make_history(tokens=30, fixed=6)
    policies = [TOVA(), SnapKV(window=6), RKV(window=6)]
    views = [history.view(policy.statistics) for policy in policies]

    def results():
        blocks = [mean_similarity(keys, live, threshold=0.5, block_tokens=n) for n in (0, 64)]
        return blocks, [rule.score(view) for rule, view in zip(policies, views, strict=True)]

    blocks, expected = results()
    monkeypatch.setattr(windows, "SCRATCH_NUMBERS", 1)
    in_slices, scores = results()
    assert all(map(torch.equal, in_slices, blocks))
    assert not any(block[~live].any() for block in blocks)
    for found, whole in zip(scores, expected, strict=True):
        assert torch.allclose(found, whole, rtol=0, atol=1e-6)


WORD = (1 << 64) - 1


@pytest.mark.parametrize(
    ("policy", "sinks"),
    [(Recent(), 0), (Recent(sinks=2), 2), (Sinks(), 4), (Streaming(), 4), (Streaming(sinks=1), 1)],
)
def test_sinks_and_newest_tokens_are_retained(policy, sinks):
    history = make_history(ragged=False, fixed=1)

    def reference(lane, keep):
        first = [t for t in history.cached[lane] if t < sinks]
        return [*first, *[t for t in history.cached[lane] if t not in first][len(first) - keep :]]

    check(policy, history, reference)


def test_hash_is_splitmix64_and_only_streaming_rerotates_keys():
    assert {name for name, rule in registered().items() if rule().rerotates_keys} == {"streaming"}
    assert ValueNorm(base=Streaming()).rerotates_keys
    assert not ValueNorm(base=Sinks()).rerotates_keys
    # the first outputs of the published generator with state 0
    found = [splitmix64(i * 0x9E3779B97F4A7C15 & WORD) for i in range(3)]
    assert found == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x6C45D188009454F]


def splitmix64(number):
    number = (number + 0x9E3779B97F4A7C15) & WORD
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & WORD
    return number ^ (number >> 31)


@pytest.mark.parametrize("seed", [0, 7, 1 << 62])
def test_random_retains_by_a_hash_of_seed_layer_and_position(seed):
    history = make_history(ragged=False, layers=(3, 8))

    def reference(lane, keep):
        of_layer = splitmix64((splitmix64(seed) + (3, 8)[lane // 2]) & WORD)
        draws = {t: float(splitmix64((of_layer + t) & WORD) >> 11) for t in history.cached[lane]}
        return best(draws, (), keep)

    check(Random(seed=seed), history, reference)


def test_random_with_scope_lane_draws_other_tokens_for_each_head():
    view = make_history(tokens=40, evictions=0, layers=(3,), heads=2).view()

    one, other = Random().score(view)
    first, second = Random(scope="lane").score(view)

    assert (one == other).all()
    assert (one == first).all()
    assert (first != second).all()
    with pytest.raises(ConfigError, match="scope of a retained set"):
        Random(scope="head")
    with pytest.raises(ConfigError, match="expected recent >= 0, got -2"):
        Random(recent=-2)
    with pytest.raises(ConfigError, match="expected sinks >= 0, got -1"):
        Recent(sinks=-1)


def retained(policy, view, keep):
    [lane] = retained_positions(view, policy.select(view, torch.tensor([keep])))
    return lane


def view_of(keys, values=None, statistics=None):
    """One lane of two-dimensional keys."""
    keys = torch.tensor([keys], dtype=torch.float32)
    values = torch.zeros_like(keys) if values is None else torch.tensor([values])
    more = {"slots": Slots(keys, values), "head_dim": 2, "statistics": statistics or {}}
    return KVView(torch.arange(keys.shape[1])[None], keys.shape[1], **more)


def test_lagkv_scores_of_partitions():
    """Seven tokens, lag 2, no sinks: partitions (0 1) (2 3) (4 5), then 6.

    (0 1) by the next partition's least (0, 0) and width (2, 4): keys (2, 0) -> (1, 0), whose std
    with n - 1 is .71; (1, 2) -> (.5, .5), std 0: ranks 1, 0. (2 3) by the least (0, 0) and width
    (1, 1): (0, 0) has std 0, (2, 4) has 1.41: ranks 0, 1. All values are equal, width 0: no spread.
    Scores 1/2, 0, 0, 1/2; 4, 5 and 6 are retained. Evict 2 first (ties with 1), then 1, then 3.
    """
    policy = LagKV(sinks=0, lag=2)
    view = view_of([[2, 0], [1, 2], [0, 0], [2, 4], [0, 0], [1, 1], [9, 9]])
    assert policy.min_cap == 4
    assert policy.score(view)[0, :4].tolist() == [0.5, 0.0, 0.0, 0.5]
    for keep, tokens in ((6, [0, 1, 3, 4, 5, 6]), (5, [0, 3, 4, 5, 6]), (4, [0, 4, 5, 6])):
        assert retained(policy, view, keep) == tokens


class QuarterTurns:
    """RoPE of one band with w = pi / 2."""

    def mean_rotation(self, layer, positions):
        del layer
        turns = [(1.0, 0.0), (0.0, 1.0), (-1.0, 0.0), (0.0, -1.0)]
        cosine, sine = torch.tensor([turns[p % 4] for p in positions]).mean(dim=0)
        return torch.stack([torch.stack([cosine, -sine]), torch.stack([sine, cosine])])


def test_triattention_adds_the_series_and_the_norms():
    """Two queries with the sum (2, 0) and squares of 4.5: centre (1, 0), root mean square 1.5.

    Positions 5 and 6 turn the centre to (0, 1) and (-1, 0), on average (-0.5, 0.5). Each key adds
    1.5 - 1 = 0.5 of its norm:

        (0, 2)     1 + 1 = 2          (0, -2)   -1 + 1 = 0       (1, 1)   0 + 0.71 = 0.71
        (2, 0)    -1 + 1 = 0          (-4, 0)    2 + 2 = 4

    Their mean is 1.34, their scores have mean 0 and variance 1, and the order is that of S.
    """
    policy = TriAttention(sinks=0, max_offset=2)
    [sums] = policy.statistics
    assert sums == QueryMoments(skip=0, squares=True)
    statistics = {sums.name: torch.tensor([[[2.0, 2.0, 0.0, 4.5, 0.0]]])}
    view = view_of([[0, 2], [2, 0], [0, -2], [-4, 0], [1, 1]], statistics=statistics)
    view = replace(view, rotation=QuarterTurns())

    expected = torch.tensor([2.0, 0.0, 0.0, 4.0, 0.5 * 2**0.5])
    score = (expected - expected.mean()) / expected.std(correction=0)
    torch.testing.assert_close(policy.score(view)[0], score)
    assert retained(policy, view, 3) == [0, 3, 4]


PASS = ScoringPass(name="ab", first="AAA", later="BB", end="C", chunk_tokens=4, overlap=2)


def encode(text):
    return [ord(letter) - ord("A") + 100 for letter in text]


def test_prompts_are_repeated_in_chunks_that_fit_the_slots():
    """From the second chunk on, the text names the last tokens of the chunk before."""
    assert PASS.token_ids(range(9), encode) == (
        [100, 100, 100, 0, 1, 2, 3],
        [101, 101, 2, 3, 102, 4, 5, 6, 7],
        [101, 101, 6, 7, 102, 8],
    )
    assert PASS.token_ids(range(3), encode) == ([100, 100, 100, 0, 1, 2],)
    assert PASS.token_ids(range(5), lambda text: []) == ([0, 1, 2, 3], [2, 3, 4])
    encoded = []  # once
    PASS.token_ids(range(40), lambda text: encoded.append(text) or [])
    assert encoded == ["AAA", "BB", "C"]
    with pytest.raises(ConfigError, match="as 9 tokens, expected at most 7"):
        PASS.token_ids([1], lambda text: [0] * 3 * len(text))

    # one chunk: 3 bytes and 4 more. Several: 2 + 2 + 1 and twice 4
    assert [PASS.slots(tokens) for tokens in (1, 4, 5, 900)] == [1 + 7, 4 + 7, 4 + 13, 4 + 13]
    assert [PASS.tokens(tokens) for tokens in (4, 5, 9)] == [4 + 7, 5 + 2 * 13, 9 + 3 * 13]


@pytest.mark.parametrize(
    ("chunk", "prompt_tokens", "left", "found"),
    [
        (2048, 3000, 5192, 2048),
        (2048, 3000, 2061, 2048),  # 2048 and 13 of texts
        (2048, 3000, 2060, 2047),
        (2048, 900, 907, 2048),  # one chunk: 900 and 7
        (2048, 900, 906, 893),
        (2048, 3000, 77, 64),
        (2048, 3000, 76, r"64 tokens or more .* leave 76 of the context of 3076; shorten"),
        (2048, 3000, 0, "leave 0 of the context of 3000"),
        (64, 8000, 8000, 64),
        (63, 8000, 8000, r"chunk=63 divides .* 8000 .* into 127 parts; raise it to 64 or more"),
        (1, 8000, 8000, "into 8000 parts"),
        (1, 16, 100, 1),
        (1, 17, 100, r"into 17 parts; raise it to 2 or more"),
        (3, 40, 100, 3),
    ],
)
def test_chunks_fit_the_context_and_are_few_or_long(chunk, prompt_tokens, left, found):
    own = replace(PASS, chunk_tokens=chunk)
    if isinstance(found, str):
        with pytest.raises(ConfigError, match=found):
            own.within(prompt_tokens, prompt_tokens + left)
    else:
        fitted = own.within(prompt_tokens, prompt_tokens + left)
        assert fitted == replace(PASS, chunk_tokens=found)
        assert fitted.slots(prompt_tokens) <= left


def test_sinks_and_largest_weights_are_retained_once_after_a_scoring_pass():
    """Of weights .1 .9 .3 .9 .2 and .8, three tokens after a sink are kept, the lower tie first."""
    rule = KVzip(sinks=1)
    weights = torch.tensor([[0.1, 0.9, 0.3, 0.9, 0.2, 0.8]])
    view = KVView(torch.arange(6)[None], 6, statistics={rule.statistics[0].name: weights})
    retained = [rule.select(view, torch.tensor([n]))[0].nonzero()[:, 0].tolist() for n in (2, 4)]
    assert retained == [[0, 1], [0, 1, 3, 5]]

    lanes = LaneShape(num_layers=2, heads=2, page_tokens=4, page_bytes=256)
    spec = make_eviction("kvzip:cap=50%,chunk=100").for_request(300, lanes).spec

    assert (spec.when, spec.cap) == ("prefill_end", 150)
    assert spec.scoring == KVzip(chunk=100).statistics[0].scoring
    assert spec.scoring_slots(150) == 0  # the prompt is not evicted
    assert spec.scoring_slots(300) == 100 + len(spec.scoring.later) + 8 + len(":") + 2 * 4
    wrapped = make_eviction("value_norm:base=(kvzip:chunk=100),cap=50%").for_request(300, lanes)
    assert wrapped.spec.scoring == spec.scoring
    # statistics of passes with other chunks share a group
    for heads in ("max", "mean"):
        names = {AttentionMax(heads, of=KVzip(chunk=n).statistics[0].of).name for n in (8, 9)}
        assert names == {f"attention_max.{heads}.repeat"}
    for when in ("decode", "prefill_and_decode", "pressure"):
        with pytest.raises(UnsoundCombination, match=f"with when={when} tokens are evicted"):
            make_eviction(f"kvzip:cap=50%,when={when}")


# ---- rules around another one --------------------------------------------------------------------


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
    names = ("h2o", "h2o_sinks", "average", "roco", "scissorhands", "snapkv", "expected_attention")
    for name in names:
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
