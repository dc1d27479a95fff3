"""TOVA (Oren et al. 2024, arXiv 2401.06104): the attention of the last query only.

score(token) = mean over the query heads of a layer of the last query's weights

Differs from the paper: with `scope=lane` each KV head retains its own tokens, by the mean over its
own query heads. The newest token may be evicted, as in the paper, unless `recent` protects it. The
row is computed at an eviction over the cached tokens, which are the tokens the query saw.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from quire.errors import UnknownName
from quire.kernels.backend import WindowFinish
from quire.layout.pages import KEY
from quire.layout.statistics import QueryRing, Statistic
from quire.policies.base import LANE, LAYER, SinksAndRecent
from quire.policies.registry import register
from quire.policies.view import KVView
from quire.policies.windows import window_scores

_LAST = QueryRing(window=1)


@register("tova")
@dataclass(frozen=True, slots=True)
class TOVA(SinksAndRecent):
    """Retain the tokens the last query attends to most, the same for every head of a layer.

    Attributes:
        sinks: tokens at the start of the sequence that are never evicted.
        recent: number of newest cached tokens that are never evicted.
        scope: layer, or lane for a separate retained set per KV head.
    """

    cost = "one row of attention at an eviction"
    scores_in_pages = KEY

    scope: str = LAYER

    def __post_init__(self) -> None:
        SinksAndRecent.__post_init__(self)
        if self.scope not in (LANE, LAYER):
            raise UnknownName("scope of a retained set", self.scope, (LANE, LAYER))

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        return (_LAST,)

    def score(self, view: KVView) -> Float[Tensor, "lane slot"]:
        return window_scores(view, _LAST, WindowFinish())
