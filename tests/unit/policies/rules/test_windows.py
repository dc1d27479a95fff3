"""Policies on recorded recent queries, compared with plain implementations."""

import numpy as np
import pytest
import torch

from quire.kernels.latent import LatentHeads
from quire.layout.statistics import QueryRing
from quire.policies import windows
from quire.policies.rkv import RKV, mean_similarity
from quire.policies.snapkv import SnapKV
from quire.policies.tova import TOVA
from quire.policies.view import KVView
from quire.policies.windows import column_sums
from support.histories import (
    REDUCE,
    Slots,
    best,
    keep_of,
    make_history,
    retained_positions,
    softmax,
)
from support.pairwise import every_pair

GROUPS = [1, 3]


def window_rows(history, lane, head, window):
    """Weights of the last queries over the cached tokens: {query: {token: weight}}."""
    rows = {}
    for query in range(max(0, history.tokens - window), history.tokens):
        seen = [t for t in history.cached[lane] if t <= query]
        logits = history.keys[lane, seen] @ history.query(lane, head, query) * history.scale(lane)
        rows[query] = dict(zip(seen, softmax(logits), strict=True))
    return rows


@pytest.mark.parametrize("group", GROUPS)
def test_tova_retains_by_the_weights_of_the_last_query_of_a_layer(group):
    history = make_history(group=group, ragged=False)
    policy = TOVA()
    view = history.view(policy.statistics)
    keep = keep_of(view, 0.5)

    retained = retained_positions(view, policy.select(view, keep))

    for lane, tokens in enumerate(retained):
        layer = range(lane // 2 * 2, lane // 2 * 2 + 2)
        last = [
            window_rows(history, of, head, 1)[history.tokens - 1]
            for of in layer
            for head in range(group)
        ]
        scores = {t: np.mean([row[t] for row in last]) for t in history.cached[lane]}
        assert tokens == best(scores, (), int(keep[lane]))


@pytest.mark.parametrize("group", GROUPS)
def test_tova_with_lane_scope_retains_a_set_per_kv_head(group):
    history = make_history(group=group, seed=1)
    policy = TOVA(scope="lane", sinks=1)
    view = history.view(policy.statistics)
    keep = keep_of(view, 0.5)

    retained = retained_positions(view, policy.select(view, keep))

    for lane, tokens in enumerate(retained):
        last = [window_rows(history, lane, h, 1)[history.tokens - 1] for h in range(group)]
        scores = {t: np.mean([row[t] for row in last]) for t in history.cached[lane]}
        assert tokens == best(scores, {0}, int(keep[lane]))


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
        view = KVView(
            torch.arange(tokens).expand(len(keys), -1),
            tokens,
            heads_per_layer=len(keys),
            statistics={ring.name: record},
            slots=Slots(keys, keys),
            head_dim=keys.shape[2],
            layer_scales=(0.4,),
        )
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
    view = history.view(policy.statistics)
    keep = keep_of(view, 0.6)

    retained = retained_positions(view, policy.select(view, keep))

    for lane, tokens in enumerate(retained):
        cached = history.cached[lane]
        before = cached[:-window]
        by_head = []
        for head in range(group):
            rows = window_rows(history, lane, head, window)
            sums = [sum(row[t] for row in rows.values()) for t in before]
            by_head.append(pooled(sums, kernel, pooling))
        reduced = REDUCE[heads](by_head, axis=0)
        scores = dict(zip(before, reduced, strict=True))
        assert tokens == best(scores, {0, *cached[-window:]}, int(keep[lane]))


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
    view = history.view(policy.statistics)
    keep = keep_of(view, 0.6)

    retained = retained_positions(view, policy.select(view, keep))

    for lane, tokens in enumerate(retained):
        cached = history.cached[lane]
        before, keys = cached[:-window], history.keys[lane, cached]
        rows = []
        for query in range(history.tokens - window, history.tokens):
            queries = np.stack([history.query(lane, head, query) for head in range(group)])
            logits = queries @ history.keys[lane, before].T * history.scale(lane)
            rows.append(softmax(logits.max(axis=0)))
        importance = pooled(np.mean(rows, axis=0), 3, "max")
        size = block or len(keys)
        blocks = [similarity(keys[i : i + size], 0.4) for i in range(0, len(keys), size)]
        redundancy = softmax(np.concatenate(blocks))
        scores = {
            t: 0.3 * promoted - 0.7 * redundant
            for t, promoted, redundant in zip(before, importance, redundancy, strict=False)
        }
        assert tokens == best(scores, {0, *cached[-window:]}, int(keep[lane]))


def test_rkv_ignores_the_newest_similar_key():
    """Keys a = (1, 0), b = (0, 1), c = (1, 0), d = (1, 0), threshold 0.5; 4 tokens.

    Rows: a is similar to c, d: ignores d, adds 1 to c. b is similar to none: no change.
    c is similar to a, d: ignores d, adds 1 to a. d is similar to a, c: ignores c, adds 1 to a.
    Column sums: a 2, b 0, c 1, d 0; means: 0.5, 0, 0.25, 0.
    """
    keys = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]])

    mean = mean_similarity(keys, torch.ones(1, 4, dtype=torch.bool), threshold=0.5)

    assert mean.tolist() == [[0.5, 0.0, 0.25, 0.0]]


@pytest.mark.parametrize("block", [0, 64])
def test_similarity_is_independent_of_the_slice_size(block, monkeypatch):
    keys = torch.randn(3, 150, 4, generator=torch.Generator().manual_seed(0))
    live = torch.arange(150) < torch.tensor([150, 97, 4])[:, None]
    keys = keys * live[:, :, None]
    expected = mean_similarity(keys, live, threshold=0.5, block_tokens=block)
    monkeypatch.setattr(windows, "SCRATCH_NUMBERS", 1)

    assert torch.equal(mean_similarity(keys, live, threshold=0.5, block_tokens=block), expected)
    assert not expected[~live].any()


def test_window_scores_are_independent_of_the_slice_size(monkeypatch):
    history = make_history(tokens=30, fixed=6)
    policies = [TOVA(), SnapKV(window=6), RKV(window=6)]
    views = [history.view(policy.statistics) for policy in policies]
    expected = [policy.score(view) for policy, view in zip(policies, views, strict=True)]
    monkeypatch.setattr(windows, "SCRATCH_NUMBERS", 1)

    for policy, view, scores in zip(policies, views, expected, strict=True):
        assert torch.allclose(policy.score(view), scores, rtol=0, atol=1e-6)


def test_scratch_memory_of_slices_is_bounded():
    parts = list(windows.slices(1000, windows.SCRATCH_NUMBERS // 3))

    assert {part.stop - part.start for part in parts} == {3}
    assert len(list(windows.slices(5, 10 * windows.SCRATCH_NUMBERS))) == 5
