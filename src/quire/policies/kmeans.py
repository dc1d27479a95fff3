"""Representatives by clustering: the baseline of KVCrush (Jha et al. 2025, figure 6).

Important tokens are selected as in `kvcrush`. Lloyd's algorithm clusters the rest into as many
clusters as there are representatives, and the token nearest to the mean of each cluster is
retained. The features are signatures, or the keys of the heads that share a retained set. Each of
`rounds` rounds computes S * B distances; `kvcrush` computes S in all. The paper measured three
times the run time.

Differs from the paper: it specifies neither the initial means nor the number of rounds. Here
clusters start at the tokens where `kvcrush` would cut slices (evenly over positions), so nothing is
random. A cluster that loses all its tokens keeps its mean.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError, UnknownName
from quire.policies.crushed import CrushedShare
from quire.policies.registry import register
from quire.policies.signatures.context import SelectionContext, on_host
from quire.policies.signatures.units import Marks

SIGNATURES, KEYS = "signatures", "keys"
FEATURES = (SIGNATURES, KEYS)
MAX_ROUNDS = 1000  # a request may set the number
_AS_NEAR = 1 + 1e-9  # tolerates rounding: both points of a pair are equally near to its mean


@register("kmeans")
@dataclass(frozen=True, slots=True)
class KMeans(CrushedShare):
    """Retain the tokens with the base rule's highest scores, and one of each cluster of the rest.

    Attributes:
        base: the rule; tokens it protects are always retained. It must read queries or keys.
        seed: no effect; nothing is random.
        sets: layer (one retained set for all heads of a layer) or head (one for each KV head).
        share: fraction of the budget left after protection that representatives get; 0: none.
        representatives: inside (part of the cap) or additive (in addition to the cap).
        on: features to cluster, signatures or keys.
        rounds: rounds of Lloyd's algorithm.
    """

    cost = "the base rule for each query head; tokens times representatives distances per round"
    extra = "kmeans"

    on: str = SIGNATURES
    rounds: int = 10

    def __post_init__(self) -> None:
        CrushedShare.__post_init__(self)
        if not 1 <= self.rounds <= MAX_ROUNDS:
            raise ConfigError(f"expected rounds from 1 to {MAX_ROUNDS}, got {self.rounds}")
        if self.on not in FEATURES:
            raise UnknownName("kind of features (on)", self.on, FEATURES)

    def represent(
        self, context: SelectionContext, grouped: Marks, count: NDArray[np.int64]
    ) -> Marks:
        features, chosen = self._features(context, grouped), np.zeros_like(grouped)
        for layer, wanted in enumerate(count.tolist()):
            units = np.flatnonzero(grouped[layer])
            own = features[layer].T[units].astype(np.float64)
            near = _nearest_means(own, min(wanted, len(units)), self.rounds)
            chosen[layer, units[near]] = True
        return chosen

    def _features(self, context: SelectionContext, grouped: Marks) -> NDArray[Any]:
        """Return the features to cluster, [layer, feature, unit]."""
        if self.on == SIGNATURES:
            return context.signatures(grouped).bits
        keys = context.view.keys.transpose(1, 2)
        keys = keys.reshape(len(context.score), -1, keys.shape[2])  # of all heads of a set
        return context.units.side_by_side(on_host(keys[:, :, context.units.columns]))


def _nearest_means(points: NDArray[np.float64], clusters: int, rounds: int) -> NDArray[np.int64]:
    """Return the point nearest to each cluster mean, ties to the first; no point twice."""
    if not clusters:
        return np.empty(0, dtype=np.int64)
    from scipy.cluster.vq import kmeans2

    start = points[np.arange(clusters) * len(points) // clusters]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # raised if a cluster loses all its points
        means, _ = kmeans2(points, start, iter=rounds, minit="matrix", missing="warn")
    chosen: list[int] = []
    free = np.ones(len(points), dtype=bool)
    for mean in means:
        far = np.where(free, ((points - mean) ** 2).sum(axis=1), np.inf)
        chosen.append(int((far <= far.min() * _AS_NEAR).argmax()))
        free[chosen[-1]] = False
    return np.array(chosen)
