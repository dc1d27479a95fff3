"""Whether tenants get equal parts while all of them want more."""

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from quire.engine.request import Request


class ServedTokens:
    """Tokens processed for each tenant in steps that find requests of every tenant waiting.

    Only such steps tell of fairness: a tenant that asks for little gets little.

    Args:
        tenants: all that will come.
        weights: of those whose weight is not 1.
    """

    def __init__(
        self, tenants: Iterable[str], weights: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        self.tokens: dict[str, int] = dict.fromkeys(tenants, 0)
        self._weights = weights
        self._waiting: Counter[str] = Counter()

    def arrived(self, tenant: str) -> None:
        """A request waits."""
        self._waiting[tenant] += 1

    def entered(self, tenant: str) -> None:
        """A request waits no more."""
        self._waiting[tenant] -= 1

    @property
    def all_backlogged(self) -> bool:
        """Whether requests of every tenant wait."""
        return all(self._waiting[tenant] > 0 for tenant in self.tokens)

    @property
    def by_weight(self) -> dict[str, float]:
        """Tokens of each tenant over its weight: equal where all got their share."""
        return {
            tenant: tokens / self._weights.get(tenant, 1.0)
            for tenant, tokens in self.tokens.items()
        }

    def served(self, requests: Iterable[Request], tokens: Iterable[int]) -> None:
        """Count a step's tokens; the caller has asked `all_backlogged` before the step."""
        for request, number in zip(requests, tokens, strict=True):
            self.tokens[request.tenant] += number


def jain_index(served: Mapping[str, float]) -> float | None:
    """1 where all got the same, 1 / n where one of n got everything; None where nobody got any.

    Args:
        served: tenant to what it got for its weight.

    Source: Jain, Chiu and Hawe, 1984: (sum x)^2 / (n sum x^2).
    """
    total, squares = sum(served.values()), sum(value * value for value in served.values())
    return total * total / (len(served) * squares) if squares else None
