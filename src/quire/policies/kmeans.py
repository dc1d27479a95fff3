"""Representatives by clustering: what KVCrush is compared with (Jha et al. 2025, figure 6).

Important tokens as in `kvcrush`; the rest is clustered by Lloyd's algorithm into as many clusters
as there are representatives, and of each cluster the token nearest its mean stays. On signatures,
or on the layer's keys. S * B distances in each of `rounds`, where `kvcrush` takes S in all: the
paper saw a run take three times as long.

Differs from the paper: it names no start and no number of rounds; clusters start at the tokens that
`kvcrush` would cut slices at (evenly over positions), so nothing is drawn; a cluster that loses all
its tokens keeps its mean.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError, UnknownName
from quire.policies.crushed import Asked, on_host
from quire.policies.crushed_share import CrushedShare
from quire.policies.registry import register
from quire.policies.signatures.units import Marks

SIGNATURES, KEYS = "signatures", "keys"
FEATURES = (SIGNATURES, KEYS)
MOST_ROUNDS = 1000  # a request may say how many
_AS_NEAR = 1 + 1e-9  # both points of a pair are as near to its mean, but for rounding


@register("kmeans")
@dataclass(frozen=True, slots=True)
class KMeans(CrushedShare):
    """Keep what the base rule finds important, and of the rest one token of each cluster.

    Attributes:
        base: the rule; what it protects stays protected. It must look at queries or keys.
        seed: without effect; nothing is drawn by lot.
        share: of the budget left after protection, for representatives; 0: none.
        representatives: inside (they take their share of the cap) or additive (on top of it).
        on: what is clustered, signatures or keys.
        rounds: of Lloyd's algorithm.
    """

    cost = "the base rule's for each query head; tokens times representatives distances a round"

    on: str = SIGNATURES
    rounds: int = 10

    def __post_init__(self) -> None:
        CrushedShare.__post_init__(self)
        if not 1 <= self.rounds <= MOST_ROUNDS:
            raise ConfigError(f"expected rounds from 1 to {MOST_ROUNDS}, got {self.rounds}")
        if self.on not in FEATURES:
            raise UnknownName("kind of features (on)", self.on, FEATURES)

    def represent(self, requested: Asked, grouped: Marks, count: NDArray[np.int64]) -> Marks:
        features, chosen = self._features(requested, grouped), np.zeros_like(grouped)
        for layer, wanted in enumerate(count.tolist()):
            units = np.flatnonzero(grouped[layer])
            own = features[layer].T[units].astype(np.float64)
            near = _nearest_means(own, min(wanted, len(units)), self.rounds)
            chosen[layer, units[near]] = True
        return chosen

    def _features(self, requested: Asked, grouped: Marks) -> NDArray[Any]:
        """[layer, feature, unit]."""
        if self.on == SIGNATURES:
            return requested.signatures(grouped).bits
        keys = requested.view.by_layer(requested.view.keys.transpose(1, 2)).flatten(1, 2)
        return requested.units.side_by_side(on_host(keys[:, :, requested.units.columns]))


def _nearest_means(points: NDArray[np.float64], clusters: int, rounds: int) -> NDArray[np.int64]:
    """Of each cluster the point nearest its mean, ties to the first; no point twice."""
    if not clusters:
        return np.empty(0, dtype=np.int64)
    try:
        from scipy.cluster.vq import kmeans2
    except ImportError as error:
        raise ConfigError("kmeans needs SciPy: pip install 'quire[kmeans]'") from error
    start = points[np.arange(clusters) * len(points) // clusters]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of clusters that lose all their points
        means, _ = kmeans2(points, start, iter=rounds, minit="matrix", missing="warn")
    chosen: list[int] = []
    free = np.ones(len(points), dtype=bool)
    for mean in means:
        far = np.where(free, ((points - mean) ** 2).sum(axis=1), np.inf)
        chosen.append(int((far <= far.min() * _AS_NEAR).argmax()))
        free[chosen[-1]] = False
    return np.array(chosen)
