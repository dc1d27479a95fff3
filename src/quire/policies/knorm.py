"""Key norms (Devoto et al. 2024, arXiv 2406.11430): score(token) = -|key|.

Differs from the paper: nothing. The paper may exempt the first layers from eviction; use a budget
for that.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from quire.layout.pages import KEY
from quire.policies.base import SinksAndRecent
from quire.policies.registry import register
from quire.policies.view import KVView


@register("knorm")
@dataclass(frozen=True, slots=True)
class KNorm(SinksAndRecent):
    """Retain the tokens with the shortest keys.

    Attributes:
        sinks: tokens at the start of the sequence that are never evicted.
        recent: number of newest cached tokens that are never evicted.
    """

    cost = "a read of the keys at an eviction"
    has_negative_scores = True
    scores_in_pages = KEY
    not_on_latents = (
        "latents are normalized before they are stored, so their norms do not rank tokens"
    )

    @property
    def lanes_apart(self) -> bool:
        return True

    def score(self, view: KVView) -> Float[Tensor, "lane slot"]:
        pages = view.in_pages(KEY)
        return -(view.keys.norm(dim=2) if pages is None else pages.norms())
