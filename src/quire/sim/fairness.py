"""Whether tenants get equal parts while all of them want more."""

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from quire.scheduler.request import Request

LEAST_ENTRIES = 10


class ServedTokens:
    """Tokens processed for each tenant in steps that find requests of every tenant waiting.

    Only such steps tell of fairness: a tenant that asks for little gets little. And only many of
    them on end do: who waits for a moment, until the next one of the others is done, waits while
    all tokens are theirs. So a stretch of such steps counts as settled where `LEAST_ENTRIES`
    requests of every tenant were let in during it.

    Args:
        tenants: all that will come.
        weights: of those whose weight is not 1.

    Attributes:
        tokens: in all such steps.
        settled: in stretches that are long enough to compare by.
    """

    def __init__(
        self, tenants: Iterable[str], weights: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        self.tokens: dict[str, int] = dict.fromkeys(tenants, 0)
        self.settled = dict(self.tokens)
        self._weights = weights
        self._waiting: Counter[str] = Counter()
        self._stretch: Counter[str] = Counter()
        self._entries: Counter[str] = Counter()

    def arrived(self, tenant: str) -> None:
        """A request waits."""
        self._waiting[tenant] += 1

    def entered(self, tenant: str) -> None:
        """A request waits no more."""
        if self.all_backlogged:
            self._entries[tenant] += 1
        self._waiting[tenant] -= 1

    @property
    def all_backlogged(self) -> bool:
        """Whether requests of every tenant wait."""
        return all(self._waiting[tenant] > 0 for tenant in self.tokens)

    @property
    def by_weight(self) -> dict[str, float]:
        """Settled tokens of each tenant over its weight: equal where all got their share."""
        return {
            tenant: tokens / self._weights.get(tenant, 1.0)
            for tenant, tokens in self.settled.items()
        }

    def served(self, requests: Iterable[Request], tokens: Iterable[int]) -> None:
        """Count a step's tokens; the caller has asked `all_backlogged` before the step."""
        for request, number in zip(requests, tokens, strict=True):
            self.tokens[request.tenant] += number
            self._stretch[request.tenant] += number
        if not self.all_backlogged:
            self._end_stretch()

    def _end_stretch(self) -> None:
        if all(self._entries[tenant] >= LEAST_ENTRIES for tenant in self.tokens):
            for tenant, number in self._stretch.items():
                self.settled[tenant] += number
        self._stretch.clear()
        self._entries.clear()


def jain_index(served: Mapping[str, float]) -> float | None:
    """1 where all got the same, 1 / n where one of n got everything; None where nobody got any.

    Args:
        served: tenant to what it got for its weight.

    Source: Jain, Chiu and Hawe, 1984: (sum x)^2 / (n sum x^2).
    """
    total, squares = sum(served.values()), sum(value * value for value in served.values())
    return total * total / (len(served) * squares) if squares else None
