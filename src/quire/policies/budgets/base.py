"""What a budget is: a frozen dataclass that divides `cap` tokens a lane over layers and heads.

    knows before the prompt is read     lane_caps   pyramid, scissors, by hand
    looks once, when it has been read   settle      squeeze, lazy, fastgen
    looks at every eviction             divide      ada: slots move between the heads of a layer

The total is kept: the caps of all lanes add up to lanes * cap, unless the budget says otherwise.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from jaxtyping import Bool, Float, Int
from torch import Tensor

from quire.spec.statistics import Statistic

if TYPE_CHECKING:
    from quire.policies.base import ScorePolicy
    from quire.policies.view import KVView

UNBOUNDED = 1 << 40
"""The cap of a lane that keeps everything."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What is divided.

    Attributes:
        cap: tokens of a lane on average.
        every: tokens that leave at a time.
        num_layers: layers that evict (those with a sliding window do not).
        heads: KV heads of a layer.
        prompt_tokens: tokens of the prompt.
        least: tokens below which a lane's cap may not fall: what the rule protects, one more, and
            `every`.
        protected: tokens the rule protects in each lane (sinks, recent, window).
    """

    cap: int
    every: int
    num_layers: int
    heads: int
    prompt_tokens: int
    least: int
    protected: int = 0

    @property
    def num_lanes(self) -> int:
        """Lanes of a sequence."""
        return self.num_layers * self.heads


class Budget:
    """Divides a cap. Subclasses are frozen dataclasses; their fields are options."""

    needs_prompt: ClassVar[bool] = False
    """Whether it looks at the whole prompt's cache (`settle`): no eviction while that is read."""
    ragged: ClassVar[bool] = False
    """Whether it moves slots between the heads of a layer at each eviction (`divide`)."""

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """What it has remembered beside what the rule needs."""
        return ()

    def lane_caps(self, shape: Shape) -> tuple[int, ...] | None:
        """Caps of all lanes, layer-major, before anything is read; None: the same for all.

        Raises:
            ConfigError: they cannot be divided so; says why.
        """
        del shape
        return None

    def settle(self, view: "KVView", rule: "ScorePolicy", shape: Shape) -> tuple[int, ...]:
        """Caps of all lanes, once the whole prompt is in the cache; UNBOUNDED keeps everything.

        Args:
            view: all lanes, with the statistics of the rule and the budget.
            rule: whose scores are to be used.
            shape: what is divided.
        """
        raise NotImplementedError

    def divide(
        self,
        view: "KVView",
        score: Float[Tensor, "lane slot"],
        protected: Bool[Tensor, "lane slot"],
        keep: Int[Tensor, " lane"],
    ) -> Int[Tensor, " lane"]:
        """Slots to keep in each lane, of the same total for every layer."""
        del view, score, protected
        return keep


@dataclass(frozen=True, slots=True)
class Uniform(Budget):
    """The same cap for every lane."""
