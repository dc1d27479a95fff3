"""Table of eviction components that exclude each other, with alternatives.

Combinations that a model, a store or a step schedule excludes are refused where those are set.
"""

from collections.abc import Callable
from dataclasses import dataclass

from quire.errors import UnsoundCombination
from quire.layout.statistics import QueryMoments, QueryRing
from quire.policies.base import LAYER, EvictionPolicy, ScorePolicy
from quire.policies.budgets.base import Budget


@dataclass(frozen=True, slots=True)
class RuleParts:
    """Components of an eviction."""

    policy: EvictionPolicy
    budget: Budget
    when: str

    @property
    def budget_name(self) -> str:
        """Name of the budget for messages."""
        return f"budget {type(self.budget).__name__.lower()}"

    @property
    def records_queries(self) -> bool:
        """Whether the rule or the budget stores queries or their moments."""
        statistics = (*self.policy.statistics, *self.budget.statistics)
        return any(isinstance(one, QueryRing | QueryMoments) for one in statistics)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsound:
    """Two kinds of components that exclude each other.

    Attributes:
        one, other: the kinds, for the documentation.
        meets: whether an eviction has both.
        reason: why they exclude each other; `{budget}` and `{when}` are filled in.
        instead: what to use.
    """

    one: str
    other: str
    meets: Callable[[RuleParts], bool]
    reason: str
    instead: str


UNSOUND: tuple[Unsound, ...] = (
    Unsound(
        one="a budget that reads the cache (squeeze, lazy, fastgen, ada)",
        other="a rule that returns a retained set and no scores",
        meets=lambda parts: (
            (parts.budget.needs_prompt or parts.budget.ragged)
            and not isinstance(parts.policy, ScorePolicy)
        ),
        reason="{budget} compares scores, and this rule returns none",
        instead="budget=uniform, or a rule that returns scores",
    ),
    Unsound(
        one="a budget that gives the heads of a layer unequal caps (ada, fastgen)",
        other="a rule with one set per layer (recent, sinks; random and tova with `scope=layer`; "
        "kvcrush and variants with `sets=layer`)",
        meets=lambda parts: parts.budget.by_head and parts.policy.scope == LAYER,
        reason="{budget} divides a layer over its heads, and this rule retains one set for all "
        "heads of a layer",
        instead="a rule with one set per head, such as h2o, scope=lane of tova and random, or "
        "sets=head of kvcrush",
    ),
    Unsound(
        one="a rule that re-rotates positions (streaming)",
        other="a rule or a budget that stores queries (lazy, fastgen)",
        meets=lambda parts: parts.policy.rerotates_keys and parts.records_queries,
        reason="queries are stored at their original positions, and keys are re-rotated",
        instead="sinks, which retains the same tokens at their original positions",
    ),
)


def refuse_unsound(text: str, parts: RuleParts) -> None:
    """Refuse components that exclude each other.

    Args:
        text: the rule as written, for the message.
        parts: components of that rule.

    Raises:
        UnsoundCombination: the message states the reason and an alternative.
    """
    for row in UNSOUND:
        if row.meets(parts):
            reason = row.reason.format(budget=parts.budget_name, when=parts.when)
            raise UnsoundCombination(f"{text!r}: {reason}; use {row.instead}")
