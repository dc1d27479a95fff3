"""Which eviction rules an engine was started for: its own, and those that requests may name.

The lanes of a pool are laid out when it is made. A rule whose heads choose for themselves needs
one-head pages, one that remembers things needs pages for them, so requests can only name rules that
were announced (`KVConfig.evict_allow`), or their engine's own rule with other numbers.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from quire.engine.schedule_config import ScheduleConfig
from quire.errors import ConfigError, RequestError, UnsoundCombination
from quire.policies.base import LANE, EvictionPolicy
from quire.policies.budgets.base import Budget
from quire.policies.eviction import Eviction, EvictionRule, LaneShape, make_eviction
from quire.policies.options import without_parentheses
from quire.policies.registry import (
    FULL,
    SCHEDULE_OPTIONS,
    make_budget,
    policy_of,
    registered,
)
from quire.spec.eviction import parse_policy
from quire.spec.model import ModelSpec
from quire.spec.statistics import Statistic

ALL, NONE = "all", "none"
STATISTIC_BYTES = 4


@dataclass(frozen=True, slots=True)
class Served:
    """A rule that an engine was started for: what it needs of the lanes, not how much stays.

    Attributes:
        name: of the policy.
        heads_apart: whether KV heads of a layer keep sets of their own.
        statistics: what must be remembered for it.
    """

    name: str
    heads_apart: bool
    statistics: frozenset[Statistic]


class EvictionRules:
    """Turns what a request asks for into an eviction with numbers.

    Args:
        default: of requests that say nothing, as in `KVConfig.evict`.
        allow: what requests may name besides, as in `KVConfig.evict_allow`: "none", "all", or rules
            one after another, such as "h2o; snapkv:window=16"; "" is the default's own name.
        model: whose KV it is.
        page_tokens: slots of a page.
        number_bytes: bytes of one stored number.
        why_not: says why the model cannot give what a statistic needs; None where it can.

    Raises:
        ConfigError: a text that is no rule.
        UnsoundCombination: a model without a layer that could evict.
    """

    def __init__(
        self,
        default: str,
        allow: str,
        *,
        model: ModelSpec,
        page_tokens: int,
        number_bytes: int,
        why_not: Callable[[Statistic], str | None] = lambda statistic: None,
    ) -> None:
        self.default = make_eviction(default)
        self._model, self._page_tokens = model, page_tokens
        self._number_bytes = number_bytes
        self._allow = allow.strip()
        own = [_served_by_rule(default, self.default)] if self.default.evicts else []
        self.served = tuple(_possible([*own, *_announced(allow)], why_not, self._allow))
        if self.served and all(layer.window for layer in model.layers):
            text = default if self.default.evicts else allow
            raise UnsoundCombination(
                f"every layer of the model has a sliding window, which bounds its KV already: "
                f"{text!r} would find nothing to evict; use evict=full"
            )

    @property
    def evicts(self) -> bool:
        """Whether any request may."""
        return bool(self.served)

    @property
    def heads_apart(self) -> bool:
        """Whether each KV head needs a lane of its own."""
        return any(rule.heads_apart for rule in self.served)

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """All that some request may have remembered, each once."""
        found = {one.name: one for rule in self.served for one in rule.statistics}
        return tuple(found[name] for name in sorted(found))

    def rule(self, text: str | None) -> EvictionRule:
        """The rule of a request.

        Args:
            text: as asked; None for the default.

        Raises:
            RequestError: it is no rule, or one this engine was not started for.
        """
        if text is None:
            return self.default
        try:
            rule = make_eviction(text)
        except ConfigError as error:
            raise RequestError(f"evict: {error}") from error
        if rule.evicts and text != self.default.text:
            self._require_served(text, rule)
        return rule

    def resolve(self, rule: EvictionRule, prompt_tokens: int) -> Eviction:
        """Give a rule its numbers for a prompt.

        Raises:
            RequestError: the cap leaves less than the rule protects.
        """
        try:
            return rule.for_request(prompt_tokens, self.lanes_of(rule))
        except ConfigError as error:
            raise RequestError(f"evict: {error}") from error

    def lanes_of(self, rule: EvictionRule) -> LaneShape:
        """What a rule has to do with: layers without a window, and what a token takes there."""
        model = self._model
        num_layers = sum(layer.window is None for layer in model.layers)
        remembered = sum(one.width(model) for one in rule.statistics if one.per_slot)
        lane_bytes = 2 * model.head_dim * self._number_bytes + STATISTIC_BYTES * remembered
        return LaneShape(
            num_layers=num_layers,
            heads=model.num_kv_heads,
            token_bytes=num_layers * model.num_kv_heads * lane_bytes,
            page_tokens=self._page_tokens,
        )

    def _require_served(self, text: str, rule: EvictionRule) -> None:
        wanted = _served_by_rule(text, rule)
        names = sorted({one.name for one in self.served})
        if self._allow == NONE:
            raise RequestError(
                f"evict: requests of this engine may name no rule (evict_allow=none), got {text!r}"
            )
        if wanted.name not in names:
            raise RequestError(
                f"evict: this engine serves {', '.join((FULL, *names))}, got {text!r}; start it "
                f"with --evict-allow {wanted.name!r}"
            )
        missing = sorted(one.name for one in wanted.statistics - set(self.statistics))
        if missing or (wanted.heads_apart and not self.heads_apart):
            what = f"what it remembers ({', '.join(missing)})" if missing else "one-head pages"
            raise RequestError(
                f"evict: {text!r} needs {what}, for which this engine was not started; start it "
                f"with --evict-allow {_without_numbers(text)!r}"
            )


def check_blocks(rule: EvictionRule, schedule: ScheduleConfig) -> None:
    """Refuse blocks that no step has room for.

    Raises:
        ConfigError: with both numbers.
    """
    if rule.evicts and rule.every > schedule.step_tokens:
        raise ConfigError(
            f"a step of {schedule.step_tokens} tokens has no room for a chunk of every="
            f"{rule.every} tokens, which an evicting prompt reads at once; raise "
            "--step-tokens or lower every"
        )


def _possible(
    rules: Iterable[Served], why_not: Callable[[Statistic], str | None], allow: str
) -> Iterator[Served]:
    """Rules for which the model gives what they need.

    Raises:
        UnsoundCombination: one that was named, not one of all, is none of them.
    """
    for rule in rules:
        reasons = [reason for one in rule.statistics if (reason := why_not(one)) is not None]
        if not reasons:
            yield rule
        elif allow != ALL:
            raise UnsoundCombination(f"{rule.name!r} does not work with this model: {reasons[0]}")


def _served_by_rule(text: str, rule: EvictionRule) -> Served:
    assert rule.policy is not None, "asked of rules that evict"
    return _served(parse_policy(text).name, rule.policy, rule.budget)


def _served(name: str, policy: EvictionPolicy, budget: Budget | None) -> Served:
    statistics = () if budget is None else budget.statistics
    ragged = budget is not None and budget.ragged
    return Served(
        name=name,
        heads_apart=policy.grain == LANE or ragged,
        statistics=frozenset((*policy.statistics, *statistics)),
    )


def _announced(allow: str) -> Iterable[Served]:
    """The rules of `evict_allow`; caps and schedules may be said and mean nothing there."""
    if allow.strip() == ALL:
        return [_served(name, policy(), None) for name, policy in registered().items()]
    texts = [text.strip() for text in allow.split(";")]
    return [_read(text) for text in texts if text and text not in (NONE, FULL)]


def _read(text: str) -> Served:
    parsed = parse_policy(text)
    own = {k: v for k, v in parsed.options.items() if k not in SCHEDULE_OPTIONS}
    budget = parsed.options.get("budget")
    return _served(
        parsed.name,
        policy_of(parsed.name, own),
        None if budget is None else make_budget(without_parentheses(budget)),
    )


def _without_numbers(text: str) -> str:
    """A rule as `evict_allow` wants it: without cap and schedule."""
    parsed = parse_policy(text)
    kept = {k: v for k, v in parsed.options.items() if k == "budget" or k not in SCHEDULE_OPTIONS}
    options = ",".join(f"{key}={value}" for key, value in kept.items())
    return f"{parsed.name}:{options}" if options else parsed.name
