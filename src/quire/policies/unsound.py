"""Parts of an eviction that cannot be right together: one declared table, with what to use instead.

What a model, a store or a schedule of steps excludes is refused where those are chosen.
"""

from collections.abc import Callable
from dataclasses import dataclass

from quire.errors import UnsoundCombination
from quire.layout.eviction import PREFILL_AND_DECODE, PRESSURE
from quire.layout.statistics import QueryMoments, QueryRing
from quire.policies.base import LAYER, EvictionPolicy, ScorePolicy
from quire.policies.budgets.base import Budget


@dataclass(frozen=True, slots=True)
class Parts:
    """What an eviction is put together from."""

    policy: EvictionPolicy
    budget: Budget
    when: str

    @property
    def budget_name(self) -> str:
        """For messages."""
        return f"budget {type(self.budget).__name__.lower()}"

    @property
    def records_queries(self) -> bool:
        """Whether queries, or moments of them, are kept."""
        statistics = (*self.policy.statistics, *self.budget.statistics)
        return any(isinstance(one, QueryRing | QueryMoments) for one in statistics)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsound:
    """Two kinds of parts that exclude each other.

    Attributes:
        one, other: the kinds, for the documents.
        meets: whether an eviction has both.
        reason: why they exclude each other; `{budget}` and `{when}` are filled in.
        instead: what to use.
    """

    one: str
    other: str
    meets: Callable[[Parts], bool]
    reason: str
    instead: str


UNSOUND: tuple[Unsound, ...] = (
    Unsound(
        one="a budget that looks once at the prompt's cache (squeeze, lazy, fastgen)",
        other="`when=prefill_and_decode`, `when=pressure`",
        meets=lambda parts: (
            parts.budget.needs_prompt and parts.when in (PREFILL_AND_DECODE, PRESSURE)
        ),
        reason="{budget} looks at the whole prompt's cache, which when={when} never holds",
        instead="when=prefill_end or when=decode, or a budget that needs no look, such as pyramid",
    ),
    Unsound(
        one="a budget that looks at the cache (squeeze, lazy, fastgen, ada)",
        other="a rule that gives a kept set and no scores",
        meets=lambda parts: (
            (parts.budget.needs_prompt or parts.budget.ragged)
            and not isinstance(parts.policy, ScorePolicy)
        ),
        reason="{budget} compares scores, and this rule gives none",
        instead="budget=uniform, or a rule that scores",
    ),
    Unsound(
        one="a budget that gives the heads of a layer unequal caps (ada, fastgen)",
        other="a rule with one set a layer (recent, sinks, random, tova, kvcrush and its forms)",
        meets=lambda parts: parts.budget.by_head and parts.policy.scope == LAYER,
        reason="{budget} divides a layer over its heads, and this rule keeps one set for all heads "
        "of a layer",
        instead="a rule whose heads choose for themselves, such as h2o",
    ),
    Unsound(
        one="a rule that numbers anew what stays (streaming)",
        other="a rule or a budget that remembers queries (lazy, fastgen)",
        meets=lambda parts: parts.policy.rerotates_keys and parts.records_queries,
        reason="queries are remembered at the positions they had, and keys are numbered anew",
        instead="sinks, which keeps the same tokens at the positions they had",
    ),
)


def refuse_unsound(text: str, parts: Parts) -> None:
    """Refuse parts that exclude each other.

    Args:
        text: as written, for the message.
        parts: what it says.

    Raises:
        UnsoundCombination: says why and what to use instead.
    """
    for row in UNSOUND:
        if row.meets(parts):
            reason = row.reason.format(budget=parts.budget_name, when=parts.when)
            raise UnsoundCombination(f"{text!r}: {reason}; use {row.instead}")
