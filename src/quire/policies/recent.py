"""Sinks and the newest tokens (StreamingLLM, Xiao et al. 2023, section 3.2).

Differs from the paper: keys keep their original RoPE positions, so distances between retained
tokens do not change.
"""

from dataclasses import dataclass

from quire.policies.base import LAYER, Keep, StoredScore, StoredScorePolicy
from quire.policies.options import check_at_least
from quire.policies.registry import register


@register("recent")
@dataclass(frozen=True, slots=True)
class Recent(StoredScorePolicy):
    """Retain the first `sinks` tokens and the newest of the rest.

    Attributes:
        sinks: tokens at the start of the sequence that are never evicted.
    """

    cost = "none: positions only"
    reads_vectors = False

    sinks: int = 0

    def __post_init__(self) -> None:
        check_at_least(0, sinks=self.sinks)

    @property
    def scores_heads(self) -> bool:
        return False

    @property
    def scope(self) -> str:
        return LAYER

    @property
    def min_cap(self) -> int:
        return self.sinks + 1

    @property
    def stored_score(self) -> StoredScore:
        return StoredScore()

    def protected_ends(self, keep: Keep) -> tuple[int, int | Keep]:
        del keep
        return self.sinks, 0
