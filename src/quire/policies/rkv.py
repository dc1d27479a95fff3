"""R-KV (Cai et al. 2025, arXiv 2505.24133): important to the last queries, and not redundant.

importance = max pooling of the mean over the window's queries of softmax(max over the group of
logits), over the tokens before the window. redundancy = softmax over all cached tokens of the mean
cosine between a token's key and the other keys, excluding the newest similar key of each row:

    score(token) = mix_lambda * importance - (1 - mix_lambda) * redundancy

Differs from the paper: a key without similar keys excludes none (the published code then excludes
the oldest token by accident). With `block`, keys are compared only within blocks of neighbours, as
in Zipage (arXiv 2603.08743), which costs n * block instead of n * n products.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import normalize, pad

from quire.errors import ConfigError
from quire.layout.statistics import QueryRing, Statistic
from quire.policies.base import Keep, ScorePolicy
from quire.policies.options import check_at_least
from quire.policies.registry import register
from quire.policies.view import KVView
from quire.policies.windows import (
    MAXIMUM,
    check_pooling,
    pool,
    recorded,
    slices,
    softmax_over,
    visible,
    window_logits,
)


@register("rkv")
@dataclass(frozen=True, slots=True)
class RKV(ScorePolicy):
    """Retain the newest tokens and, of the rest, those with high attention and dissimilar keys.

    Attributes:
        window: number of newest tokens whose queries are used; they are retained, within the cap.
        kernel: width of the max pooling over importance, odd.
        mix_lambda: weight of importance; redundancy has weight 1 - mix_lambda.
        threshold: cosine above which two keys are similar.
        block: neighbouring tokens among which keys are compared; 0: all.
        sinks: tokens at the start of the sequence that are never evicted.
    """

    cost = "`window` rows of attention and all products of pairs of keys at an eviction"
    has_negative_scores = True

    window: int = 8
    kernel: int = 7
    mix_lambda: float = 0.1
    threshold: float = 0.5
    block: int = 0
    sinks: int = 0

    def __post_init__(self) -> None:
        check_at_least(0, threshold=self.threshold, block=self.block, sinks=self.sinks)
        check_pooling(self.kernel, MAXIMUM)
        if not 0 <= self.mix_lambda <= 1:
            raise ConfigError(f"expected 0 <= mix_lambda <= 1, got {self.mix_lambda}")
        _ = self._ring  # refuses an empty window

    @property
    def _ring(self) -> QueryRing:
        return QueryRing(self.window)

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        return (self._ring,)

    @property
    def min_cap(self) -> int:
        return self.sinks + self.window + 1

    def score(self, view: KVView) -> Float[Tensor, "lane slot"]:
        keys = view.keys
        similarity = mean_similarity(
            keys, view.live, threshold=self.threshold, block_tokens=self.block
        )
        redundancy = softmax_over(similarity[:, None], view.live[:, None])[:, 0]
        queries, query_positions = recorded(view, self._ring)
        lanes, group, window, _ = queries.shape
        scales, biases = view.lane_scales, view.biases()
        before: Bool[Tensor, "lane 1 slot"] = ~view.newest(self.window)[:, None]
        seen = visible(view, query_positions) & before
        sums = torch.zeros(keys.shape[:2], device=keys.device)
        for part in slices(lanes, group * window * keys.shape[1]):
            own = None if biases is None else biases[part]
            logits = window_logits(queries[part], keys[part], scales[part], own)
            sums[part] = softmax_over(logits.amax(dim=1), seen[part]).sum(dim=1)
        mean = sums / (query_positions >= 0).sum(dim=1, keepdim=True)
        importance = pool(mean[:, None], self.kernel, MAXIMUM)[:, 0]
        return self.mix_lambda * importance - (1 - self.mix_lambda) * redundancy

    def protected_ends(self, keep: Keep) -> tuple[int, int | Keep]:
        del keep
        return self.sinks, self.window


# Similarity of cached keys, computed for a bounded number of pairs at a time.

_ROWS = 128  # fixed, so that sums over rows do not depend on the batch


def mean_similarity(
    keys: Float[Tensor, "lane slot head_dim"],
    live: Bool[Tensor, "lane slot"],
    *,
    threshold: float,
    block_tokens: int = 0,
) -> Float[Tensor, "lane slot"]:
    """Return the mean cosine of each key with all keys of its lane or block; 0 with itself.

    Of the keys that are similar to a given key (cosine above the threshold) the newest is excluded:
    that pair counts 0, so that the newest of several similar tokens is not redundant.

    Args:
        keys: zeros for empty slots.
        live: slots that hold a token, before those that do not.
        threshold: 0 or more.
        block_tokens: neighbours among which keys are compared; 0: the whole lane.
    """
    lanes, slots, dim = keys.shape
    block = block_tokens or slots
    spare = -slots % block
    unit = pad(normalize(keys, dim=2) * live[:, :, None], (0, 0, 0, spare)).view(-1, block, dim)
    counts = pad(live, (0, spare)).view(-1, block).sum(dim=1, keepdim=True)
    sums = torch.zeros(unit.shape[:2], device=keys.device)
    for part in slices(unit.shape[0], min(_ROWS, block) * block):
        sums[part] = _column_sums(unit[part], threshold)
    return (sums / counts.clamp_min(1)).view(lanes, -1)[:, :slots]


def _column_sums(
    unit: Float[Tensor, "part token head_dim"], threshold: float
) -> Float[Tensor, "part token"]:
    tokens = torch.arange(unit.shape[1], device=unit.device)
    sums = torch.zeros(unit.shape[:2], device=unit.device)
    for start in range(0, unit.shape[1], _ROWS):
        cosines = unit[:, start : start + _ROWS] @ unit.transpose(1, 2)
        cosines.diagonal(offset=start, dim1=1, dim2=2).zero_()
        newest = torch.where(cosines > threshold, tokens, -1).amax(dim=2, keepdim=True)
        pair = newest.clamp_min(0)
        cosines.scatter_(2, pair, torch.where(newest < 0, cosines.gather(2, pair), 0.0))
        sums += cosines.sum(dim=1)
    return sums
