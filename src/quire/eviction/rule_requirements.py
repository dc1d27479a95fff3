"""What rules need of the lanes of an engine, and which of them it can serve together."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from quire.errors import UnsoundCombination
from quire.layout.eviction import parse_policy
from quire.layout.statistics import Statistic
from quire.policies.base import LANE, EvictionPolicy
from quire.policies.budgets.base import Budget
from quire.policies.eviction import EvictionRule
from quire.policies.options import without_parentheses
from quire.policies.registry import (
    FULL,
    SCHEDULE_OPTIONS,
    make_budget,
    policy_of,
    registered,
)

ALL, NONE = "all", "none"


@dataclass(frozen=True, slots=True)
class RuleRequirements:
    """A rule that an engine was started for: what it needs of the lanes, not how much stays.

    Attributes:
        name: of the policy.
        heads_apart: whether KV heads of a layer keep sets of their own.
        rerotates_keys: whether keys must be stored before RoPE; after it they are of no use to it.
        statistics: what must be remembered for it.
    """

    name: str
    heads_apart: bool
    rerotates_keys: bool
    statistics: frozenset[Statistic]


def possible(
    rules: Iterable[RuleRequirements], why_not: Callable[[Statistic], str | None], allow: str
) -> Iterator[RuleRequirements]:
    """Rules for which the model gives what they need.

    Raises:
        UnsoundCombination: one that was named, not one of all, is none of them.
    """
    for rule in rules:
        reasons = [reason for one in rule.statistics if (reason := why_not(one)) is not None]
        if not reasons:
            yield rule
        elif allow != ALL:
            raise UnsoundCombination(f"{rule.name!r} cannot be served here: {reasons[0]}")


def served_by_rule(text: str, rule: EvictionRule) -> RuleRequirements:
    """What a rule that evicts needs of the lanes.

    Args:
        text: the rule as written.
        rule: the same, read.
    """
    assert rule.policy is not None, "asked of rules that evict"
    return _served(parse_policy(text).name, rule.policy, rule.budget)


def _served(name: str, policy: EvictionPolicy, budget: Budget | None) -> RuleRequirements:
    statistics = () if budget is None else budget.statistics
    ragged = budget is not None and budget.ragged
    return RuleRequirements(
        name=name,
        heads_apart=policy.scope == LANE or ragged,
        rerotates_keys=policy.rerotates_keys,
        statistics=frozenset((*policy.statistics, *statistics)),
    )


def announced(allow: str, *, rerotates_keys: bool) -> Iterable[RuleRequirements]:
    """The rules of `evict_allow`; caps and schedules may be said and mean nothing there.

    Args:
        allow: as written; "all" are those that share pages with the default.
        rerotates_keys: whether the default does.
    """
    if allow.strip() == ALL:
        found = (_served(name, policy(), None) for name, policy in registered().items())
        return [one for one in found if one.rerotates_keys == rerotates_keys]
    texts = [text.strip() for text in allow.split(";")]
    return [_read(text) for text in texts if text and text not in (NONE, FULL)]


def _read(text: str) -> RuleRequirements:
    parsed = parse_policy(text)
    own = {k: v for k, v in parsed.options.items() if k not in SCHEDULE_OPTIONS}
    budget = parsed.options.get("budget")
    return _served(
        parsed.name,
        policy_of(parsed.name, own),
        None if budget is None else make_budget(without_parentheses(budget)),
    )


def refuse_mixture(served: Iterable[RuleRequirements]) -> None:
    """Refuse rules that want keys before RoPE beside rules that want them after it.

    Raises:
        UnsoundCombination: with one of each, and what to use instead.
    """
    by_kind = {one.rerotates_keys: one.name for one in served}
    if len(by_kind) == 2:
        raise UnsoundCombination(
            f"{by_kind[True]!r} needs keys stored before RoPE and {by_kind[False]!r} after it, and "
            "an engine has pages of one kind; start one engine for each, or use 'sinks', which "
            "keeps the same tokens as 'streaming' at the positions they had"
        )


def of_other_pages(wanted: RuleRequirements) -> str:
    """Why a rule cannot be served by an engine with pages of the other kind."""
    if wanted.rerotates_keys:
        return (
            f"{wanted.name!r} numbers anew what stays, for which keys are stored before RoPE; this "
            "engine stores them after it: start one with --evict streaming:cap=..., or use "
            "'sinks', which keeps the same tokens at the positions they had"
        )
    return (
        f"{wanted.name!r} needs keys stored after RoPE, and this engine stores them before it, for "
        "'streaming': use that, or an engine started with another --evict"
    )


def without_numbers(text: str) -> str:
    """A rule as `evict_allow` wants it: without cap and schedule."""
    parsed = parse_policy(text)
    kept = {k: v for k, v in parsed.options.items() if k == "budget" or k not in SCHEDULE_OPTIONS}
    options = ",".join(f"{key}={value}" for key, value in kept.items())
    return f"{parsed.name}:{options}" if options else parsed.name
