"""Lazy layers retain sinks and recent tokens, others all tokens (SimLayerKV, Zhang et al. 2024).

After prefill, the attention of the last queries to the first `sinks` tokens and the newest `cap -
sinks` is averaged over queries and heads. A layer above `threshold` is lazy and retains `cap`
tokens; other layers never evict, so memory is not bounded by the cap. With the rule `sinks` a lazy
layer retains exactly the measured tokens.

With `when=prefill_and_decode` and `when=pressure` the cap bounds the sum over all layers. A lazy
layer then retains as many tokens as the first `sinks` and the fewest newest ones whose attention is
above `threshold`. The other layers divide equally what the lazy layers leave. If every layer is
lazy, each retains the cap.

Differs from the paper: it classifies layers with the last prompt tokens or the first generated
token; here always with the last `last` prompt tokens. Its thresholds differ by model, from 0.65 to
0.9. The rule selects the tokens that a lazy layer retains, and the cap sets their number.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

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

    def min_cap(self, shape: Shape) -> int:
        return max(shape.least, shape.leaving + self.sinks + 1)

    def lane_capacities(self, shape: Shape) -> tuple[int, ...] | None:
        if shape.cap - shape.leaving <= self.sinks:
            raise ConfigError(
                f"budget lazy needs more than its {self.sinks} sinks in a lane after an eviction, "
                f"got {shape.cap - shape.leaving} tokens; raise cap or lower sinks"
            )
        return (UNBOUNDED,) * shape.num_lanes

    def finalize(self, view: KVView, rule: ScorePolicy, shape: Shape) -> tuple[int, ...]:
        del rule
        mass = self._mass_of_newest(view)
        most = shape.cap - shape.leaving - self.sinks
        if not shape.bounded:
            near = mass[:, min(most, mass.shape[1]) - 1].tolist()
            return shape.of_layers(
                [shape.cap if mass > self.threshold else UNBOUNDED for mass in near]
            )
        caps = []
        for above in (mass[:, :most] > self.threshold).int():
            newest = int(above.argmax()) + 1  # the first of equal numbers
            wanted = max(shape.least, self.sinks + newest + shape.leaving)
            caps.append(wanted if bool(above.any()) else UNBOUNDED)
        if UNBOUNDED not in caps:
            return (shape.cap,) * shape.num_lanes
        return shape.of_layers(shape.within_total(caps))

    def _mass_of_newest(self, view: KVView) -> Float[Tensor, "layer newest"]:
        """Return the attention mass of the sinks and the newest 1, 2, ... tokens of each layer."""
        received = column_sums(view, self._ring())
        mass = (received / received.sum(dim=2, keepdim=True)).mean(dim=1)
        sinks = view.oldest_positions(self.sinks)
        slots = torch.arange(mass.shape[1], device=mass.device)
        backwards = view.num_slots - 1 - slots
        others = torch.where(sinks, 0.0, mass).gather(1, backwards.clamp_min(0))
        newest = torch.where(backwards >= 0, others, 0.0).cumsum(dim=1)
        of_lane = newest + torch.where(sinks, mass, 0.0).sum(dim=1, keepdim=True)
        return view.by_layer(of_lane).mean(dim=1)

    def _ring(self) -> QueryRing:
        return QueryRing(window=self.last)
