"""Variants of KVCrush whose representatives get a share of the budget.

    B_rep = floor(share * B)      B: the budget left after protection

With `representatives=additive` the representatives are added to the cap. Let K be the tokens of the
written cap that an eviction leaves, and F the number of tokens that the base rule protects at any
cap. A lane then holds share * (K - F) more tokens, and representatives get share / (1 + share) of
the budget left after protection, which is the same number. Tokens that are protected in proportion
to the cap (h2o's newest half) get their share of the added tokens. Compare such a rule with its
base rule at the larger cap.
"""

from abc import ABC
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError, UnknownName
from quire.policies.choose import Floats
from quire.policies.crushed import Crushed
from quire.policies.signatures.units import Units

INSIDE, ADDITIVE = "inside", "additive"
PLACES = (INSIDE, ADDITIVE)


@dataclass(frozen=True, slots=True)
class CrushedShare(Crushed, ABC):
    """Retains the tokens with a base rule's highest scores, and a share of representatives.

    Attributes:
        base: the rule; tokens it protects are always retained. It must read queries or keys.
        seed: seed of random choices.
        sets: layer (one retained set for all heads of a layer) or head (one for each KV head).
        share: fraction of the budget left after protection that representatives get; 0: none.
        representatives: inside (part of the cap) or additive (in addition to the cap).
    """

    share: float = 0.25
    representatives: str = INSIDE

    def __post_init__(self) -> None:
        Crushed.__post_init__(self)
        if not 0 <= self.share < 1:
            raise ConfigError(
                "expected 0 <= share < 1, the fraction of the budget that representatives get, "
                f"got {self.share}"
            )
        if self.representatives not in PLACES:
            raise UnknownName("place of representatives", self.representatives, PLACES)

    @property
    def share_of_all(self) -> float:
        """The representatives' fraction of the unprotected budget, including added tokens."""
        return self.share if self.representatives == INSIDE else self.share / (1 + self.share)

    @property
    def cap_hint(self) -> str:
        if not self.share:
            return self.base.cap_hint
        return "raise cap or share (0: no representatives), or lower every"

    def min_free(self, piece_tokens: int) -> int:
        return piece_tokens * (ceil(round(1 / self.share_of_all, 9)) if self.share else 1)

    def added_tokens(self, kept: int, piece_tokens: int = 1) -> int:
        if self.representatives == INSIDE:
            return 0
        left = max(0, kept - (self.base.least_cap - 1))
        return int(round(self.share * left, 9)) // piece_tokens * piece_tokens

    def num_representatives(self, units: Units, sums: Floats) -> NDArray[np.int64]:
        del sums
        return whole(units.num_retained * self.share_of_all)


def whole(numbers: Floats) -> NDArray[np.int64]:
    """Round down, tolerating floating-point error: 0.3 * 10 gives 3."""
    return np.floor(numbers.round(9)).astype(np.int64)
