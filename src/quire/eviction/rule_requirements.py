"""Requirements of rules on the lanes of an engine, and which rules can share an engine."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from quire.errors import ConfigError, UnsoundCombination
from quire.layout import limits
from quire.layout.eviction import parse_policy
from quire.layout.statistics import Statistic
from quire.policies.base import LANE, EvictionPolicy
from quire.policies.budgets.base import Budget
from quire.policies.eviction import EvictionRule, make_eviction
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
    """Requirements of a rule on the lanes, independent of its cap and schedule.

    Attributes:
        name: name of the policy.
        heads_apart: whether KV heads of a layer have separate retained sets.
        rerotates_keys: whether keys must be stored before RoPE; if not, they must be stored after
            it.
        statistics: statistics of the policy and its budget.
    """

    name: str
    heads_apart: bool
    rerotates_keys: bool
    statistics: frozenset[Statistic]


def possible(
    rules: Iterable[RuleRequirements], why_not: Callable[[Statistic], str | None], allow: str
) -> Iterator[RuleRequirements]:
    """Yield the rules whose statistics the model can provide.

    Raises:
        UnsoundCombination: a rule that was named explicitly, not by "all", cannot be served.
    """
    for rule in rules:
        reasons = [reason for one in rule.statistics if (reason := why_not(one)) is not None]
        if not reasons:
            yield rule
        elif allow != ALL:
            raise UnsoundCombination(f"{rule.name!r} cannot be served here: {reasons[0]}")


def served_by_rule(text: str, rule: EvictionRule) -> RuleRequirements:
    """Return the requirements of a rule that evicts.

    Args:
        text: the rule as written.
        rule: the parsed rule.
    """
    assert rule.policy is not None, "only called for rules that evict"
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


def announced(allow: str) -> Iterable[RuleRequirements]:
    """Return the rules of `evict_allow`; caps and schedules in the text are ignored.

    Args:
        allow: value of `evict_allow`; "all" means all registered rules.
    """
    if allow.strip() == ALL:
        return [_served(name, policy(), None) for name, policy in registered().items()]
    texts = [text.strip() for text in allow.split(";")]
    if any("," in text.partition(":")[0] for text in texts):
        raise ConfigError(
            "evict_allow: expected policies separated by semicolons, as in "
            f"'h2o;snapkv:window=16', got {allow!r}"
        )
    return [_read(text) for text in texts if text and text not in (NONE, FULL)]


def check_rules(evict: str, allow: str) -> None:
    """Check the texts of `evict` and `evict_allow` without a model.

    Raises:
        ConfigError: not a rule, or its packages are not installed.
    """
    make_eviction(evict)
    _ = announced(allow)


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
    """Refuse rules that need keys before RoPE together with rules that need keys after RoPE.

    Raises:
        UnsoundCombination: names one rule of each kind, and an alternative.
    """
    by_kind = {one.rerotates_keys: one.name for one in served}
    if len(by_kind) == 2:
        raise limits.refused(limits.BOTH_SIDES_OF_ROPE, before=by_kind[True], after=by_kind[False])


def of_other_pages(wanted: RuleRequirements) -> str:
    """Return why a rule cannot be served by an engine with pages of the other kind."""
    if wanted.rerotates_keys:
        return (
            f"{wanted.name!r} re-rotates positions and needs keys stored before RoPE, but this "
            "engine stores them after it; start one with --evict streaming:cap=..., or use "
            "'sinks', which retains the same tokens at their original positions"
        )
    return (
        f"{wanted.name!r} needs keys stored after RoPE, but this engine stores them before it, for "
        "'streaming'; use 'streaming', or start an engine with another --evict"
    )


def without_numbers(text: str) -> str:
    """Return a rule in the form of `evict_allow`: without cap and schedule."""
    parsed = parse_policy(text)
    kept = {k: v for k, v in parsed.options.items() if k == "budget" or k not in SCHEDULE_OPTIONS}
    options = ",".join(f"{key}={value}" for key, value in kept.items())
    return f"{parsed.name}:{options}" if options else parsed.name
