"""Whether tenants get equal parts while all of them want more."""

from collections import Counter
from collections.abc import Iterable, Mapping

from quire.engine.request import Request


class ServedTokens:
    """Tokens processed for each tenant in steps that find requests of every tenant waiting.

    Only such steps tell of fairness: a tenant that asks for little gets little.

    Args:
        tenants: all that will come.
    """

    def __init__(self, tenants: Iterable[str]) -> None:
        self.tokens: dict[str, int] = dict.fromkeys(tenants, 0)
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

    def served(self, requests: Iterable[Request], tokens: Iterable[int]) -> None:
        """Count a step's tokens; the caller has asked `all_backlogged` before the step."""
        for request, number in zip(requests, tokens, strict=True):
            self.tokens[request.tenant] += number


def jain_index(served: Mapping[str, int] | Mapping[str, float]) -> float | None:
    """1 where all got the same, 1 / n where one of n got everything; None where nobody got any.

    Args:
        served: tenant to what it got, divided by its weight where weights differ.

    Source: Jain, Chiu and Hawe, 1984: (sum x)^2 / (n sum x^2).
    """
    total, squares = sum(served.values()), sum(value * value for value in served.values())
    return total * total / (len(served) * squares) if squares else None
