"""Key difference (KeyDiff, Park et al. 2025, arXiv 2504.15364): score(token) = -cos(key, anchor).

The anchor is the mean of the unit keys of a KV head.

Differs from the paper: the anchor is the mean over the keys cached now, as in the paper's
block-wise form; keys are as stored, after RoPE.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from quire.layout.pages import KEY
from quire.policies.base import SinksAndRecent
from quire.policies.registry import register
from quire.policies.view import KVView

MIN_NORM = 1e-12  # as in `normalize`


@register("keydiff")
@dataclass(frozen=True, slots=True)
class KeyDiff(SinksAndRecent):
    """Retain the tokens whose keys differ most in direction from the mean of all keys.

    Attributes:
        sinks: tokens at the start of the sequence that are never evicted.
        recent: number of newest cached tokens that are never evicted.
    """

    cost = "a read of the keys at an eviction"
    has_negative_scores = True
    scores_in_pages = KEY

    @property
    def lanes_apart(self) -> bool:
        return True

    def score(self, view: KVView) -> Float[Tensor, "lane slot"]:
        pages = view.in_pages(KEY)
        return -(mean_cosines(view.keys) if pages is None else pages.mean_cosines())


def mean_cosines(keys: Float[Tensor, "lane slot head_dim"]) -> Float[Tensor, "lane slot"]:
    """Return the cosine of each key with the mean of the unit keys; 0 for keys of 0."""
    inverse_norms = keys.norm(dim=2).clamp_min(MIN_NORM).reciprocal()  # keys of empty slots: 0
    # the sum has the direction of the mean; the anchor is 0 if the keys cancel out
    anchor = normalize(inverse_norms[:, None] @ keys, dim=2)
    cosines: Tensor = (keys @ anchor.transpose(1, 2)).squeeze(2) * inverse_norms
    return cosines
