"""Lazy layers retain sinks and recent tokens, others all tokens (SimLayerKV, Zhang et al. 2024).

After prefill, the attention of the last queries to the first `sinks` tokens and the newest `cap -
sinks` is averaged over queries and heads. A layer above `threshold` is lazy and retains `cap`
tokens; other layers never evict, so memory is not bounded by the cap. With the rule `sinks` a lazy
layer retains exactly the measured tokens.

Differs from the paper: it classifies layers with the last prompt tokens or the first generated
token; here always with the last `last` prompt tokens. Its thresholds differ by model, from 0.65 to
0.9. The rule selects the tokens that a lazy layer retains, and the cap sets their number.
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
    """Layers that attend to sinks and recent tokens retain the cap, the others all tokens.

    Attributes:
        threshold: mean attention mass above which a layer is lazy.
        sinks: number of first tokens that count.
        last: number of queries to average over, the last of the prompt.
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

    def lane_capacities(self, shape: Shape) -> tuple[int, ...] | None:
        if shape.cap - shape.leaving <= self.sinks:
            raise ConfigError(
                f"budget lazy needs more than its {self.sinks} sinks in a lane after an eviction, "
                f"got {shape.cap - shape.leaving} tokens; raise cap or lower sinks"
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
