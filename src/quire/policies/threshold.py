"""Tokens above a threshold, within the cap (DMS, Lancucki et al. 2025; KVzap, arXiv 2601.07891).

Of the tokens that the base rule would retain, those below the threshold are evicted too, so that a
lane whose scores are concentrated on few tokens holds fewer than its cap. With the n tokens of a
lane that are not protected, m the mean of their scores and sum = n * m:

    tau     retain a token if its score >= tau * m
    mass    retain the smallest set of best tokens whose scores add up to mass * sum

Worked: scores 8 4 2 1 1 0, m = 16 / 6.

    tau=0.5     scores >= 1.33: 8 4 2
    mass=0.8    8 + 4 < 12.8 <= 8 + 4 + 2: the same

Only a lane above its cap evicts; it evicts again once it reaches the cap again. The number of
retained tokens is not known in advance, so memory is reserved for the cap, and what an eviction
leaves free is used by other requests.

Differs from the papers: there, the score of a trained predictor is compared with an absolute
threshold. Scores of rules have different scales, so the threshold is relative to those of the lane.
Tokens with equal scores at the border of `mass` are all retained, and so is the best token.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from quire.errors import ConfigError
from quire.policies.base import LAYER, EvictionPolicy, Keep, WrappingPolicy
from quire.policies.choose import cut_pieces, in_whole_pieces
from quire.policies.h2o import H2O
from quire.policies.options import check_at_least
from quire.policies.registry import register
from quire.policies.view import KVView


@register("threshold")
@dataclass(frozen=True, slots=True)
class Threshold(WrappingPolicy):
    """Apply the base rule, and also evict the tokens whose scores are below a threshold.

    Attributes:
        base: the rule; tokens it protects are always retained. Its scores must be >= 0.
        tau: lowest score of a retained token, as a multiple of the mean score of its lane.
        mass: fraction of the sum of scores that the best tokens of a lane add up to; 1: all tokens.
        recent: number of newest cached tokens that are never evicted, if the base protects fewer.
    """

    name = "threshold"
    cost = "the base rule; the retained tokens are counted after each eviction"

    base: EvictionPolicy = H2O()  # noqa: RUF009 - frozen
    tau: float = 0.1
    mass: float = 1.0
    recent: int = 0

    def __post_init__(self) -> None:
        WrappingPolicy.__post_init__(self)
        check_at_least(0, tau=self.tau, recent=self.recent)
        if not 0 < self.mass <= 1:
            raise ConfigError(f"expected 0 < mass <= 1, a fraction of the scores, got {self.mass}")

    @property
    def retains_fewer(self) -> bool:
        return True

    @property
    def min_cap(self) -> int:
        cap = self.base.min_cap
        newest = self.rule.protected_ends(np.array([cap]))[1] if self.protects_ends else 0
        return cap + max(0, self.recent - int(np.max(newest)))

    def protected_ends(self, keep: Keep) -> tuple[int, int | Keep]:
        sinks, newest = self.rule.protected_ends(keep)
        more = max(newest, self.recent) if isinstance(newest, int) else newest.clip(self.recent)
        return sinks, more

    def protected(self, view: KVView, keep: Int[Tensor, " lane"]) -> Bool[Tensor, "lane slot"]:
        return self.rule.protected(view, keep) | view.newest(self.recent)

    def choose(
        self,
        view: KVView,
        score: Float[Tensor, "lane slot"],
        protected: Bool[Tensor, "lane slot"],
        keep: Int[Tensor, " lane"],
        piece_tokens: int = 1,
    ) -> Bool[Tensor, "lane slot"]:
        self.require_weights(view, score)
        retained = self.rule.choose(view, score, protected, keep, piece_tokens)
        must = in_whole_pieces(protected, view.live, piece_tokens)
        if self.scope == LAYER:
            score = view.by_layer(score).mean(dim=1).repeat_interleave(view.heads_per_layer, dim=0)
        if piece_tokens > 1:
            means = cut_pieces(torch.where(view.live, score, 0.0), piece_tokens).mean(dim=2)
            score = means.repeat_interleave(piece_tokens, dim=1)[:, : score.shape[1]]
        stays = must | (score >= self._lowest(score.double(), view.live & ~must))
        return retained & (stays | (keep >= view.num_slots[:, 0])[:, None])

    def _lowest(
        self, score: Float[Tensor, "lane slot"], free: Bool[Tensor, "lane slot"]
    ) -> Float[Tensor, "lane 1"]:
        """Return the lowest score of a retained slot of each lane."""
        ranked = torch.where(free, score, 0.0).sort(dim=1, descending=True).values
        total = ranked.sum(dim=1, keepdim=True)
        lowest = self.tau * total / free.sum(dim=1, keepdim=True).clamp_min(1)
        if self.mass < 1:
            before = (ranked.cumsum(dim=1) < self.mass * total).sum(dim=1, keepdim=True)
            lowest = lowest.maximum(ranked.gather(1, before.clamp_max(score.shape[1] - 1)))
        return lowest.minimum(ranked[:, :1])
