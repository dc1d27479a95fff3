"""Forms of KVCrush whose representatives get a share of the budget.

    B_rep = floor(share * B)      B: the budget left after protection

`representatives=additive`: they come on top of the cap. Where an eviction leaves K tokens of the
cap that is written, and the base rule protects F whatever the cap is, a lane holds share * (K - F)
more, and of what is left after protection representatives get share / (1 + share): as many. What is
protected in proportion (h2o's newest half) has its part of them. The base rule alone is then to be
compared at a cap so much larger.
"""

from abc import ABC
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError, UnknownName
from quire.policies.best import Floats
from quire.policies.crushed import Crushed
from quire.policies.signatures.units import Units

INSIDE, ADDITIVE = "inside", "additive"
PLACES = (INSIDE, ADDITIVE)


@dataclass(frozen=True, slots=True)
class CrushedShare(Crushed, ABC):
    """Keeps what a base rule finds important, and a share of representatives.

    Attributes:
        base: the rule; what it protects stays protected. It must look at queries or keys.
        seed: of what is drawn by lot.
        share: of the budget left after protection, for representatives; 0: none.
        representatives: inside (they take their share of the cap) or additive (on top of it).
    """

    share: float = 0.25
    representatives: str = INSIDE

    def __post_init__(self) -> None:
        Crushed.__post_init__(self)
        if not 0 <= self.share < 1:
            raise ConfigError(
                "expected 0 <= share < 1, the part of the budget that representatives get, got "
                f"{self.share}"
            )
        if self.representatives not in PLACES:
            raise UnknownName("place of representatives", self.representatives, PLACES)

    @property
    def share_of_all(self) -> float:
        """The part of what is left after protection, what comes on top included."""
        return self.share if self.representatives == INSIDE else self.share / (1 + self.share)

    @property
    def more_room(self) -> str:
        if not self.share:
            return self.base.more_room
        return "raise cap or share (0 is without representatives), or lower every"

    def least_free(self, piece_tokens: int) -> int:
        return piece_tokens * (ceil(round(1 / self.share_of_all, 9)) if self.share else 1)

    def added_tokens(self, kept: int, piece_tokens: int = 1) -> int:
        if self.representatives == INSIDE:
            return 0
        left = max(0, kept - (self.base.least_cap - 1))
        return int(round(self.share * left, 9)) // piece_tokens * piece_tokens

    def num_representatives(self, units: Units, sums: Floats) -> NDArray[np.int64]:
        del sums
        return whole(units.room * self.share_of_all)


def whole(numbers: Floats) -> NDArray[np.int64]:
    """Rounded down; 0.3 * 10 must be 3: what should be whole, is."""
    return np.floor(numbers.round(9)).astype(np.int64)
