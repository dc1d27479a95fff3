"""Fairness among tenants while all of them are backlogged."""

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from quire.scheduler.request import Request

LEAST_ENTRIES = 10


class ServedTokens:
    """Tokens processed for each tenant in steps that find requests of every tenant waiting.

    Only such steps measure fairness: a tenant with few requests gets few tokens. The interval of
    such steps must also be long: in a short interval a tenant can wait for a request of another
    tenant to finish, and gets no tokens. An interval therefore counts as settled if at least
    `LEAST_ENTRIES` requests of every tenant were admitted during it.

    Args:
        tenants: all tenants of the trace.
        weights: weights of the tenants; default: 1.

    Attributes:
        tokens: tokens of each tenant in all such steps.
        settled: tokens of each tenant in settled intervals.
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
        """Count a request that starts to wait."""
        self._waiting[tenant] += 1

    def admitted(self, tenant: str) -> None:
        """Count a request that was admitted or stopped waiting."""
        if self.all_backlogged:
            self._entries[tenant] += 1
        self._waiting[tenant] -= 1

    @property
    def all_backlogged(self) -> bool:
        """Whether requests of every tenant wait."""
        return all(self._waiting[tenant] > 0 for tenant in self.tokens)

    @property
    def by_weight(self) -> dict[str, float]:
        """Settled tokens of each tenant over its weight: equal values mean fair shares."""
        return {
            tenant: tokens / self._weights.get(tenant, 1.0)
            for tenant, tokens in self.settled.items()
        }

    def served(self, requests: Iterable[Request], tokens: Iterable[int]) -> None:
        """Count a step's tokens; the caller checks `all_backlogged` before the step."""
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
    """Jain's index: 1 for equal service, 1 / n if one of n tenants got all; None if all got 0.

    Args:
        served: tenant -> service divided by weight.

    Source: Jain, Chiu and Hawe, 1984: (sum x)^2 / (n sum x^2).
    """
    total, squares = sum(served.values()), sum(value * value for value in served.values())
    return total * total / (len(served) * squares) if squares else None
