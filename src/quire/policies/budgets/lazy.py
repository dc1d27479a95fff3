"""Lazy layers keep sinks and recent tokens, others everything (SimLayerKV, Zhang et al. 2024).

When the prompt has been read, the last queries say how much of their attention, mean over queries
and heads, goes to the first `sinks` tokens and the newest `cap - sinks`. A layer above `threshold`
is lazy and keeps `cap` tokens; any other keeps all it has and will have, so the memory is not
bounded by the cap. With the rule `sinks` a lazy layer keeps exactly what was measured.

Differs from the paper: it marks layers with the last prompt tokens or the first answer token, here
always with the last `last` prompt tokens; thresholds there differ by model, from 0.65 to 0.9. Which
tokens a lazy layer keeps is the rule's choice, and how many is the cap.
"""

from dataclasses import dataclass

from quire.errors import ConfigError
from quire.layout.statistics import QueryRing, Statistic
from quire.policies.base import ScorePolicy
from quire.policies.budgets.base import UNBOUNDED, Budget, Shape
from quire.policies.registry import register_budget
from quire.policies.view import KVView
from quire.policies.windows import column_sums


@register_budget("lazy")
@dataclass(frozen=True, slots=True)
class Lazy(Budget):
    """Layers that look at sinks and recent tokens keep the cap, the others everything.

    Attributes:
        threshold: mean mass of attention above which a layer is lazy.
        sinks: first tokens of the sequence that count.
        last: queries that are asked, the last of the prompt.
    """

    needs_prompt = True
    keeps_total = False

    threshold: float = 0.9
    sinks: int = 4
    last: int = 32

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ConfigError(f"expected 0 <= threshold <= 1, got {self.threshold}")
        if self.sinks < 0:
            raise ConfigError(f"expected sinks >= 0, got {self.sinks}")
        self._ring()

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        return (self._ring(),)

    def lane_caps(self, shape: Shape) -> tuple[int, ...] | None:
        if shape.cap - shape.leaving <= self.sinks:
            raise ConfigError(
                f"budget lazy counts {self.sinks} sinks and the newest of the "
                f"{shape.cap - shape.leaving} tokens that a lane keeps, so none; raise cap"
            )
        return (UNBOUNDED,) * shape.num_lanes

    def finalize(self, view: KVView, rule: ScorePolicy, shape: Shape) -> tuple[int, ...]:
        del rule
        newest = view.newest(shape.cap - shape.leaving - self.sinks)
        near = view.oldest_positions(self.sinks) | newest
        received = column_sums(view, self._ring())
        mass = (received * near[:, None]).sum(dim=2) / received.sum(dim=2)
        by_layer = view.by_layer(mass.mean(dim=1)).mean(dim=1).tolist()
        return shape.of_layers(
            [shape.cap if mass > self.threshold else UNBOUNDED for mass in by_layer]
        )

    def _ring(self) -> QueryRing:
        return QueryRing(window=self.last)
