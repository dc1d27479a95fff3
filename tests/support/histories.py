"""Sequences with past evictions, and statistics that a policy may read, plainly in float64.

Tokens are processed one at a time: a token is cached, then attends to all cached tokens; at some
times a few tokens are evicted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch

from quire.layout import statistics as stats
from quire.layout.statistics import Statistic
from quire.policies.view import KVView

REDUCE = {"mean": np.mean, "max": np.max, "sum": np.sum}


@dataclass
class History:
    """One sequence; lane = layer * heads + KV head.

    Attributes:
        cached: cached positions of each lane, ascending.
        keys, values: [lane, token, dim], of all tokens including evicted ones; keys after RoPE.
        raw: queries before RoPE, [lane, group, token, dim].
        weights: [lane, group, query, token]; 0 if the token was not cached.
        num_keys: number of cached keys that each query attended to, [lane, query].
    """

    heads: int
    layers: tuple[int, ...]
    cached: list[list[int]]
    keys: np.ndarray
    values: np.ndarray
    raw: np.ndarray
    weights: np.ndarray
    num_keys: np.ndarray

    @property
    def tokens(self) -> int:
        return self.keys.shape[1]

    @property
    def dim(self) -> int:
        return self.keys.shape[2]

    def scale(self, lane: int) -> float:
        """The softmax scale of a lane's layer."""
        return scale_of(self.layers[lane // self.heads], self.dim)

    def query(self, lane: int, head: int, position: int) -> np.ndarray:
        """The query after RoPE."""
        return rotation(position, self.dim) @ self.raw[lane, head, position]

    def record(self, statistic: Statistic) -> np.ndarray:
        """The record of a statistic, as `quire.layout.statistics` describes it."""
        lanes = range(len(self.cached))
        if isinstance(statistic, stats.QueryRing):
            return np.stack([self._ring(lane, statistic.window) for lane in lanes])
        if isinstance(statistic, stats.QueryMoments):
            return np.stack([self._moments(lane, statistic) for lane in lanes])
        if not statistic.per_slot:
            return np.ones((len(self.cached), 1, 2))
        if statistic.apart:
            group = range(self.raw.shape[1])
            return np.stack([self._padded(statistic, i, (h,)) for i in lanes for h in group])
        return np.stack([self._padded(statistic, lane, None) for lane in lanes])

    def _padded(self, statistic: Statistic, lane: int, heads: tuple[int, ...] | None) -> np.ndarray:
        """One value per slot, over all or some query heads of a lane; 0 after the last slot."""
        values = np.zeros(max(map(len, self.cached)))
        for slot, token in enumerate(self.cached[lane]):
            values[slot] = self._of_weights(statistic, lane, token, heads)
        return values

    def _of_weights(
        self, statistic: Statistic, lane: int, token: int, heads: tuple[int, ...] | None
    ) -> float:
        weights = self.weights[lane, slice(None) if heads is None else list(heads), token:, token]
        weights_seen = REDUCE[statistic.heads](weights, axis=0)
        if isinstance(statistic, stats.AttentionSum):
            return weights_seen.sum()
        if isinstance(statistic, stats.SquareSum):
            return (weights_seen**2).sum()
        if isinstance(statistic, stats.AttentionMax):  # as if all queries were of the pass
            return weights_seen.max(initial=0)
        return (weights_seen < 1 / self.num_keys[lane, token:]).sum()

    def _ring(self, lane: int, window: int) -> np.ndarray:
        group = self.raw.shape[1]
        ring = np.zeros((window, group * self.dim + 1))
        for position in range(max(0, self.tokens - window), self.tokens):
            heads = [self.query(lane, head, position) for head in range(group)]
            ring[position % window] = [*np.concatenate(heads), position + 1]
        return ring

    def _moments(self, lane: int, statistic: stats.QueryMoments) -> np.ndarray:
        values = []
        for queries in self.raw[lane, :, statistic.skip :]:
            products = sum((np.outer(q, q) for q in queries), np.zeros((self.dim, self.dim)))
            products = np.diag(products) if statistic.squares else products
            values += [len(queries), *queries.sum(axis=0), *products.ravel()]
        return np.array([values])

    def view(self, statistics: Iterable[Statistic] = ()) -> KVView:
        """The view of a policy that declares these statistics: float32."""
        longest = max(map(len, self.cached))
        positions = [[*lane, *[-1] * (longest - len(lane))] for lane in self.cached]
        return KVView(
            positions=torch.tensor(positions),
            next_position=self.tokens,
            heads_per_layer=self.heads,
            layers=self.layers,
            prompt_tokens=self.tokens,
            statistics={s.name: torch.tensor(self.record(s)).float() for s in statistics},
            slots=Slots(self._slots(self.keys, longest), self._slots(self.values, longest)),
            head_dim=self.dim,
            layer_scales=tuple(scale_of(layer, self.dim) for layer in self.layers),
            rotation=Rotations(self.dim),
            projection=Projections(self.dim, self.raw.shape[1]),
            group=self.raw.shape[1],
        )

    def _slots(self, values: np.ndarray, longest: int) -> torch.Tensor:
        slots = torch.zeros(len(self.cached), longest, self.dim)
        for lane, cached in enumerate(self.cached):
            slots[lane, : len(cached)] = torch.tensor(values[lane, cached]).float()
        return slots


@dataclass
class Slots:
    """Keys and values of a view."""

    of_keys: torch.Tensor
    of_values: torch.Tensor

    def keys(self) -> torch.Tensor:
        return self.of_keys

    def values(self) -> torch.Tensor:
        return self.of_values


@dataclass
class Rotations:
    """RoPE by whole matrices, averaged one by one; odd layers have none."""

    dim: int

    def mean_rotation(self, layer: int, positions: Sequence[int]) -> torch.Tensor:
        if layer % 2:
            return torch.eye(self.dim)
        rotations = [rotation(position, self.dim) for position in positions]
        return torch.tensor(np.mean(rotations, axis=0)).float()


@dataclass
class Projections:
    """Output projections in which all KV heads of a layer have the columns of the same heads."""

    dim: int
    group: int

    def matrix(self, layer: int, head: int) -> np.ndarray:
        """The columns [hidden, dim] of a query head of each group."""
        return np.random.default_rng((layer, head)).normal(size=(2 * self.dim, self.dim))

    def lengths(self, layers: tuple[int, ...], values: torch.Tensor) -> torch.Tensor:
        by_layer = values.view(len(layers), -1, *values.shape[1:]).double()
        found = [
            torch.stack([(of @ torch.tensor(m).T).abs().sum(-1) for m in self.matrices(n)]).mean(0)
            for n, of in zip(layers, by_layer, strict=True)
        ]
        return torch.stack(found).flatten(0, 1).float()

    def matrices(self, layer: int) -> list[np.ndarray]:
        """Those of all heads of a group."""
        return [self.matrix(layer, head) for head in range(self.group)]


def scale_of(layer: int, dim: int) -> float:
    """The softmax scale of a layer: a model whose layers differ."""
    return dim**-0.5 * (1 + layer)


@cache
def rotation(position: int, dim: int) -> np.ndarray:
    """The RoPE matrix of a position: halves paired, base 50."""
    half = dim // 2
    angle = position * 50.0 ** (-np.arange(half) / half)
    cosine, sine = np.diag(np.cos(angle)), np.diag(np.sin(angle))
    return np.block([[cosine, -sine], [sine, cosine]])


def softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def make_history(
    *,
    tokens: int = 40,
    layers: tuple[int, ...] = (0, 2),
    heads: int = 2,
    group: int = 3,
    dim: int = 6,
    evictions: int = 3,
    seed: int = 0,
    ragged: bool = True,
    fixed: int = 4,
) -> History:
    """Draw a history with some random tokens evicted at `evictions` times.

    Args:
        ragged: lanes evict different numbers of tokens; else the lanes of a layer evict the same.
        fixed: number of first and of last tokens that are never evicted.
    """
    random = np.random.default_rng(seed)
    lanes = len(layers) * heads
    shape = (lanes, tokens, dim)
    history = History(
        heads=heads,
        layers=layers,
        cached=[[] for _ in range(lanes)],
        keys=random.normal(size=shape),
        values=random.normal(size=shape),
        raw=random.normal(size=(lanes, group, tokens, dim)) + 0.5,
        weights=np.zeros((lanes, group, tokens, tokens)),
        num_keys=np.zeros((lanes, tokens), dtype=int),
    )
    times = set(random.choice(np.arange(fixed + 4, tokens), evictions, replace=False).tolist())
    for position in range(tokens):
        for lane in range(lanes):
            _attend(history, lane, position)
        if position in times:
            _evict(history, random, tokens - fixed, fixed, ragged=ragged)
    return history


def _attend(history: History, lane: int, position: int) -> None:
    cached = history.cached[lane]
    cached.append(position)
    history.num_keys[lane, position] = len(cached)
    for head in range(history.raw.shape[1]):
        products = history.keys[lane, cached] @ history.query(lane, head, position)
        logits = products * history.scale(lane)
        history.weights[lane, head, position, cached] = softmax(logits)


def _evict(
    history: History, random: np.random.Generator, before: int, fixed: int, *, ragged: bool
) -> None:
    for lane, cached in enumerate(history.cached):
        if not ragged and lane % history.heads:
            history.cached[lane] = list(history.cached[lane - 1])
            continue
        free = [token for token in cached if fixed <= token < before]
        count = min(2 + (lane if ragged else 0), len(free))
        evicted = set(random.choice(free, count, replace=False).tolist()) if free else set()
        history.cached[lane] = [token for token in cached if token not in evicted]


def best(scores: dict[int, float], protected: Iterable[int], keep: int) -> list[int]:
    """The protected tokens and the best of the rest, ties to the lower position; ascending."""
    protected = set(protected)
    rest = sorted((p for p in scores if p not in protected), key=lambda p: (-scores[p], p))
    return sorted([*protected, *rest[: keep - len(protected)]])


def retained_positions(view: KVView, retained: torch.Tensor) -> list[list[int]]:
    """Retained positions, by lane."""
    return [lane[mask].tolist() for lane, mask in zip(view.positions, retained, strict=True)]


def keep_of(view: KVView, share: float, least: int = 1) -> torch.Tensor:
    """This fraction of the slots of each lane, at least `least`."""
    num_slots = view.num_slots[:, 0]
    return torch.minimum(num_slots, (num_slots * share).long().clamp_min(least))


def changed(view: KVView, **changes: object) -> KVView:
    """The view with other fields."""
    return replace(view, **changes)
