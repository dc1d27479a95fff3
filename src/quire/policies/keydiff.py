"""Keys that differ (KeyDiff, Park et al. 2025, arXiv 2504.15364): score(token) = -cos(key, anchor).

The anchor is the mean of the unit keys of a KV head.

Differs from the paper: the anchor is the mean over the keys cached now, which is what the paper's
block-wise form sees; keys are as stored, after RoPE.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from quire.policies.base import SinksAndRecent
from quire.policies.registry import register
from quire.policies.view import KVView


@register("keydiff")
@dataclass(frozen=True, slots=True)
class KeyDiff(SinksAndRecent):
    """Keep the tokens whose keys point farthest away from the mean direction of all keys.

    Attributes:
        sinks: tokens at the start of the sequence that never leave.
        recent: so many of the newest cached tokens do not leave.
    """

    cost = "a read of the keys at an eviction"

    def score(self, view: KVView) -> Float[Tensor, "lane slot"]:
        unit = normalize(view.keys, dim=2)  # zeros where no slot is
        # the direction of the sum is that of the mean; no anchor (0) where keys cancel out
        anchor = normalize(unit.sum(dim=1, keepdim=True), dim=2)
        return -(unit * anchor).sum(dim=2)
