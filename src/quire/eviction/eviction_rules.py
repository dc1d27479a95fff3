"""Eviction rules of an engine: its default rule, and the rules that requests may name.

The page layout of a pool is fixed when the pool is built. A rule with one retained set per head
needs one-head pages, and a rule with statistics needs pages for them. So requests can only name
rules of `KVConfig.evict_allow`, or the default rule with other option values.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, cast

import numpy as np

from quire.errors import ConfigError, RequestError, UnsoundCombination
from quire.layout import limits
from quire.layout.evicting import without_relocated_tokens
from quire.layout.eviction import (
    PREFILL_AND_DECODE,
    PREFILL_END,
    PRESSURE,
    SCHEDULE_OPTIONS,
    UNLIMITED,
    parse_policy,
)
from quire.layout.kv_format import Storing, read_format, refuse_excluded
from quire.layout.layout import layout_for, page_and_fixed_bytes
from quire.layout.model import ModelSpec
from quire.layout.pages import CacheLayout, LaneGroup
from quire.layout.statistics import ResidualSimilarity, Statistic
from quire.policies.base import LANE, LAYER, EvictionPolicy
from quire.policies.budgets.base import Budget
from quire.policies.budgets.duo import read_scores
from quire.policies.eviction import PAGE, TOKEN, Eviction, EvictionRule, LaneShape, make_eviction
from quire.policies.options import without_parentheses
from quire.policies.recommended import candidates
from quire.policies.registry import (
    FULL,
    make_budget,
    policy_of,
    registered,
)
from quire.policies.view import OutputProjection
from quire.scheduler.schedule_config import ScheduleConfig

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
        not_on_latents: why the policy, or the base of it, cannot score latents; "" if it can.
        reads_projection: whether the policy, or the base of it, reads output projections.
        file: file that its budget reads; "" for none.
    """

    name: str
    heads_apart: bool
    rerotates_keys: bool
    statistics: frozenset[Statistic]
    not_on_latents: str = ""
    reads_projection: bool = False
    file: str = ""


def possible(
    rules: Iterable[RuleRequirements],
    why_not: "Callable[[RuleRequirements], str | None]",
    allow: str,
    *,
    latents: bool = False,
) -> Iterator[RuleRequirements]:
    """Yield the rules whose statistics the model can provide, and that score what it stores.

    Raises:
        UnsoundCombination: a rule that was named explicitly, not by "all", cannot be served.
    """
    for rule in rules:
        if latents and rule.not_on_latents:
            if allow != ALL:
                raise limits.refused(
                    limits.RULE_ON_LATENTS, text=rule.name, why=rule.not_on_latents
                )
        elif (reason := why_not(rule)) is None:
            yield rule
        elif allow != ALL:
            raise UnsoundCombination(f"{rule.name!r} cannot be served here: {reason}")


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
    by_head = budget is not None and budget.by_head
    nested = list(_nested(policy))
    return RuleRequirements(
        name=name,
        heads_apart=policy.scope == LANE or by_head,
        rerotates_keys=policy.rerotates_keys,
        statistics=frozenset((*policy.statistics, *statistics)),
        not_on_latents=next(filter(None, (one.not_on_latents for one in nested)), ""),
        reads_projection=any(one.reads_projection for one in nested),
        file="" if budget is None else budget.file,
    )


def _nested(policy: EvictionPolicy) -> Iterator[EvictionPolicy]:
    """Yield a policy and those that it wraps."""
    yield policy
    for value in (getattr(policy, field.name) for field in fields(cast(Any, policy))):
        if isinstance(value, EvictionPolicy):
            yield from _nested(value)


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


@dataclass(frozen=True, slots=True)
class Provided:
    """What a model provides to rules.

    Attributes:
        why_not: returns why the model cannot provide a statistic; None if it can.
        why_no_pre_rope: why requests cannot store keys before RoPE beside others; None if they can.
        projection: returns output projections, or why the model has none; None without a model.
    """

    why_not: Callable[[Statistic], str | None] = lambda statistic: None
    why_no_pre_rope: str | None = None
    projection: Callable[[], OutputProjection | str | None] = lambda: None

    def why_not_served(self, rule: RuleRequirements) -> str | None:
        """Return why the model cannot provide what a rule reads; None if it can."""
        reasons = [why for one in rule.statistics if (why := self.why_not(one)) is not None]
        projection = self.projection() if rule.reads_projection else None
        if isinstance(projection, str):
            reasons.append(f"{projection}; {limits.NO_PROJECTION.instead}")
        return reasons[0] if reasons else None


def unless_scored(
    why_not: Callable[[Statistic], str | None], limit: limits.Limit | None
) -> Callable[[Statistic], str | None]:
    """Extend `why_not`: with a limit, also refuse statistics of scoring passes."""

    def reason(statistic: Statistic) -> str | None:
        if limit is not None and statistic.scoring is not None:
            return f"{limit.reason}; {limit.instead}"
        return why_not(statistic)

    return reason


def first_served(evict: str, rules_of: "Callable[[str], EvictionRules]") -> "EvictionRules":
    """Return the rules of an engine whose default rule is the first that `evict` may mean.

    Args:
        evict: as in `KVConfig.evict`.
        rules_of: returns the rules of an engine with a default rule.

    Raises:
        ConfigError, UnsoundCombination: see `EvictionRules`; for `auto`, of its last rule.
    """
    *better, last = candidates(evict)
    for text in better:
        with suppress(ConfigError):
            rules = rules_of(text)
            rules.resolve_default(rules.model.max_positions)  # scores of KV heads fit the model
            return rules
    return rules_of(last)


class EvictionRules:
    """Resolves the rule of a request to an eviction with numbers.

    Args:
        default: rule of requests that name none, as in `KVConfig.evict`.
        allow: further rules that requests may name, as in `KVConfig.evict_allow`: "none", "all", or
            a list of rules such as "h2o; snapkv:window=16"; "" is the default's own name.
        model: the model.
        page_tokens: slots of a page.
        codec: how keys and values are stored.
        provided: what the model provides to rules.
        ranks: number of ranks that share the model; `model` is the part of one of them.
        bounds: whether pages have bounds of their keys.

    Attributes:
        default: rule of requests that name none.
        model: see above.
        served: requirements of all rules that requests may use, as far as they are known.
        projection: output projections of attention; None if no served rule reads them.

    Raises:
        ConfigError: a text is not a rule.
        UnsoundCombination: the model has no layer that could evict, or rules that cannot share
            pages, or that the codec excludes.
    """

    def __init__(  # noqa: PLR0913 - what rules depend on
        self,
        default: str,
        allow: str,
        *,
        model: ModelSpec,
        page_tokens: int,
        codec: str,
        provided: Provided = Provided(),
        ranks: int = 1,
        bounds: bool = False,
    ) -> None:
        self.default, self._bounds = make_eviction(default), bounds
        self.model, self._page_tokens, self._codec = model, page_tokens, codec
        self._ranks = ranks
        self._provided, self.why_no_pre_rope = provided, provided.why_no_pre_rope
        self._lanes: dict[tuple[Statistic, ...], LaneShape] = {}
        self._allow = allow.strip()
        own = [served_by_rule(default, self.default)] if self.default.evicts else []
        found = partial(possible, why_not=provided.why_not_served, latents=model.joins_keys)
        self.served = (*found(own, allow=NONE), *found(announced(allow), allow=self._allow))
        reads = any(one.reads_projection for one in self.served)
        projection = provided.projection() if reads else None
        assert not isinstance(projection, str), "rules that read it are served"
        self.projection = projection
        self._files = {rule.file for rule in self.served}
        for file in self._files - {""}:
            read_scores(file)
        if not self.mixes:
            refuse_mixture(self.served)
        self._storing = Storing(
            form=read_format(codec), evicts=self.evicts, rerotates=self.rerotates_keys
        )
        refuse_excluded(codec, self._storing_of(self.default))
        self._require_several_heads(default, self.default)
        self._require_equal_records(default, self.default)
        self._require_equal_lanes(default, self.default)
        evicting = [layer for layer, spec in enumerate(model.layers) if spec.stores_all]
        text = default if self.default.evicts else allow
        if self.served and not evicting:
            raise limits.refused(limits.ONLY_WINDOWS, text=text)
        if self.served and len({model.heads[layer].kv_heads for layer in evicting}) > 1:
            raise limits.refused(limits.UNEQUAL_HEADS, text=text)

    @property
    def evicts(self) -> bool:
        """Whether any request may evict."""
        return bool(self.served)

    @property
    def heads_apart(self) -> bool:
        """Whether each KV head needs a lane of its own."""
        return any(rule.heads_apart for rule in self.served)

    @property
    def mixes(self) -> bool:
        """Whether requests with keys before RoPE run beside requests with keys after it."""
        return self._allow == ALL

    @property
    def rerotates_keys(self) -> bool:
        """Whether all keys are stored before RoPE."""
        return not self.mixes and any(rule.rerotates_keys for rule in self.served)

    @property
    def moves_slots(self) -> bool:
        """Whether an eviction may move single slots instead of dropping whole pages."""
        by_page = self.default.evicts and self.default.granularity == PAGE
        return not by_page or self._allow not in ("", NONE)

    def fitted(self, layout: CacheLayout) -> CacheLayout:
        """Return a layout without records that no rule of this engine uses."""
        return layout if self.moves_slots else without_relocated_tokens(layout)

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """Statistics of all rules that requests may use, without duplicates."""
        found = {one.name: one for rule in self.served for one in rule.statistics}
        return tuple(found[name] for name in sorted(found))

    def rule(self, text: str | None) -> EvictionRule:
        """Return the rule of a request.

        Args:
            text: rule named in the request; None for the default.

        Raises:
            RequestError: the text is not a rule, or the engine was not started for it.
        """
        if text is None:
            return self.default
        try:
            *better, text = candidates(text)
            for candidate in better:
                with suppress(ConfigError, RequestError):
                    found = self.rule(candidate)
                    self.resolve_default(self.model.max_positions, found)  # scores fit the model
                    return found
            rule = make_eviction(text)
        except ConfigError as error:
            self._require_named(text.partition(":")[0])  # other options would not help
            raise RequestError(f"evict: {error}", param="evict") from error
        if text != self.default.text:
            if rule.budget.file not in {"", *self._files}:
                raise RequestError(
                    f"evict: requests may not name the file {rule.budget.file}; start the engine "
                    "with it in --evict or --evict-allow, or give the numbers",
                    param="evict",
                )
            try:
                self._require_several_heads(text, rule)
                self._require_equal_records(text, rule)
                self._require_equal_lanes(text, rule)
                self._require_scores(text, rule)
            except UnsoundCombination as error:
                raise RequestError(f"evict: {error}", param="evict") from error
            self._require_storing(rule)
            self._require_moves(text, rule)
            if rule.evicts:
                self._require_served(text, rule)
        return rule

    def resolve(self, rule: EvictionRule, prompt_tokens: int) -> Eviction:
        """Resolve a rule to numbers for a prompt.

        Raises:
            RequestError: the cap leaves less than the rule protects, or the context too little for
                a scoring pass.
        """
        try:
            found = self.resolve_default(prompt_tokens, rule)
            spec = found.spec.within_context(prompt_tokens, self.model.max_positions)
            return replace(found, spec=spec)
        except ConfigError as error:
            raise RequestError(f"evict: {error}", param="evict") from error

    def resolve_default(self, prompt_tokens: int, rule: EvictionRule | None = None) -> Eviction:
        """Resolve a rule to numbers for a prompt, by default the default rule.

        Raises:
            ConfigError: the cap leaves less than the rule protects.
        """
        rule = self.default if rule is None else rule
        return self.of_rank(rule.for_request(prompt_tokens, self.lanes_of(rule)))

    def of_rank(self, eviction: Eviction) -> Eviction:
        """Replace the caps of the lanes of all ranks by those of one rank, equal on all ranks."""
        caps = eviction.spec.lane_capacities
        if self._ranks == 1 or caps is None:
            return eviction
        by_rank = np.array(caps).reshape(-1, self._ranks, self.kv_heads)
        own = tuple(by_rank.min(axis=1).ravel().tolist())
        return replace(eviction, spec=replace(eviction.spec, lane_capacities=own))

    @property
    def kv_heads(self) -> int:
        """KV heads of each layer that evicts, on one rank."""
        of_layers = zip(self.model.heads, self.model.layers, strict=True)
        return next((heads.kv_heads for heads, layer in of_layers if layer.stores_all), 1)

    def query_group(self, group: LaneGroup) -> int:
        """Query heads of a KV head of a lane group, those of all layers that read it."""
        return self.model.heads[group.layers[0]].group * group.readers

    def lanes_of(self, rule: EvictionRule) -> LaneShape:
        """Return the lanes of all ranks a rule applies to, those that store all tokens."""
        if rule.statistics not in self._lanes:
            self._lanes[rule.statistics] = self._lane_shape(rule.statistics)
        return self._lanes[rule.statistics]

    def _lane_shape(self, statistics: tuple[Statistic, ...]) -> LaneShape:
        layout = layout_for(
            self.model,
            codec=self._codec,
            page_tokens=self._page_tokens,
            evicting=True,
            heads_apart=self.heads_apart,
            statistics=statistics,
            bounds=self._bounds,
        )
        page_bytes, fixed_bytes = page_and_fixed_bytes(self.fitted(layout))
        return LaneShape(
            num_layers=sum(layer.stores_all for layer in self.model.layers),
            heads=self.kv_heads * self._ranks,
            page_tokens=self._page_tokens,
            page_bytes=page_bytes * self._ranks,
            fixed_bytes=fixed_bytes * self._ranks,
            head_dim=self.model.heads[0].key_dim,
        )

    def context_tokens(self, rule: EvictionRule, prompt_tokens: int) -> int:
        """Return the maximum length of a sequence: the model's context.

        UNLIMITED if positions are re-rotated and no lane can exceed the context.

        Args:
            rule: rule of the request.
            prompt_tokens: tokens of its prompt.

        Raises:
            RequestError: the cap leaves less than the rule protects.
        """
        context, policy = self.model.max_positions, rule.policy
        if policy is None or not policy.rerotates_keys:
            return context
        spec = self.resolve(rule, prompt_tokens).spec
        if spec.when == PRESSURE or spec.ragged or spec.divided:  # lanes may exceed their cap
            return context
        peaks = (
            spec.lane_peak_tokens(cap, UNLIMITED, prompt_tokens)
            for cap in spec.lane_capacities or (spec.cap,)
        )
        return UNLIMITED if max(peaks) <= context else context

    def _storing_of(self, rule: EvictionRule) -> Storing:
        """Return what a rule requires of the storage format."""
        if not rule.evicts:
            return self._storing
        own = rule.policy is not None and rule.policy.rerotates_keys
        return replace(
            self._storing,
            rerotates=own or self._storing.rerotates,
            every=0 if rule.when == PREFILL_END else rule.max_every,
        )

    def _require_storing(self, rule: EvictionRule) -> None:
        """Refuse a rule that the codec excludes: one that separates tokens with shared scales."""
        try:
            refuse_excluded(self._codec, self._storing_of(rule))
        except UnsoundCombination as error:
            raise RequestError(f"evict: {error}", param="evict") from error

    def _require_several_heads(self, text: str, rule: EvictionRule) -> None:
        """Refuse a budget that moves slots between KV heads if layers have one KV head."""
        if rule.evicts and rule.budget.ragged and self.kv_heads * self._ranks == 1:
            raise limits.refused(limits.ONE_KV_HEAD, text=text)

    def _require_scores(self, text: str, rule: EvictionRule) -> None:
        """Refuse a rule whose scores have no meaning for latents."""
        why = served_by_rule(text, rule).not_on_latents if rule.evicts else ""
        if why and self.model.joins_keys:
            raise limits.refused(limits.RULE_ON_LATENTS, text=text, why=why)

    def _require_equal_records(self, text: str, rule: EvictionRule) -> None:
        """Refuse a budget that reads records or vectors of all layers if their sizes differ."""
        policy, budget, model = rule.policy, rule.budget, self.model
        if policy is None or not budget.needs_prompt:
            return
        readers = Counter(layer.source for layer in model.layers)
        shapes = {
            replace(heads, query_heads=heads.query_heads * (1 + readers[number]))
            for number, heads in enumerate(model.heads)
            if model.layers[number].stores_all
        }
        read = (*budget.statistics, *(policy.statistics if budget.by_head else ()))
        records = {tuple((one.width(h), one.heads_each(h)) for one in read) for h in shapes}
        reads_vectors = budget.by_head and policy.reads_vectors
        vectors = {(h.query_dim, h.value_dim) for h in shapes if reads_vectors}
        if len(records) > 1 or len(vectors) > 1:
            raise limits.refused(
                limits.UNEQUAL_RECORDS, text=text, budget=type(budget).__name__.lower()
            )

    def _require_equal_lanes(self, text: str, rule: EvictionRule) -> None:
        """Refuse rules whose lanes have different lengths on the ranks of a model.

        All ranks have one schedule, so the same lanes must hold the same number of tokens.
        """
        if self._ranks == 1 or rule.policy is None:
            return
        limit = None
        if rule.budget.by_head:
            limit = limits.BUDGET_ON_RANKS
        elif rule.granularity != TOKEN and rule.policy.scope != LAYER:
            limit = limits.PIECES_ON_RANKS
        elif rule.policy.retains_fewer and rule.policy.scope != LAYER:
            limit = limits.THRESHOLD_ON_RANKS
        elif self._storing.form.promoted is not None:
            limit = limits.PROMOTED_ON_RANKS
        elif self.model.latent is not None and any(
            not isinstance(one, ResidualSimilarity) for one in rule.statistics
        ):
            limit = limits.LATENTS_ON_RANKS
        if limit is not None:
            raise limits.refused(limit, text=text, ranks=self._ranks, granularity=rule.granularity)

    def _require_moves(self, text: str, rule: EvictionRule) -> None:
        if (
            self._storing.form.per_page
            and rule.evicts
            and rule.granularity != PAGE
            and not self.moves_slots
        ):
            raise RequestError(
                f"evict: {text!r} moves single tokens of pages that {self._codec!r} encodes as a "
                "whole, and this engine has no records for that; use granularity=page, or start "
                f"the engine with --evict-allow {without_numbers(text)!r}",
                param="evict",
            )

    def _require_possible(self, text: str, wanted: RuleRequirements) -> None:
        reasons = [self._provided.why_not_served(wanted)]
        if wanted.rerotates_keys and self.why_no_pre_rope is not None:
            reasons.append(f"{self.why_no_pre_rope}; {limits.NO_PRE_ROPE.instead}")
        for reason in filter(None, reasons):
            raise RequestError(f"evict: {text!r} cannot be served here: {reason}", param="evict")

    def _require_named(self, text: str) -> None:
        """Refuse a rule whose name requests may not use, whatever its options."""
        name = text.partition(":")[0].strip()
        if name == FULL or name not in registered() or self._allow == ALL:
            return
        if self._allow == NONE:
            raise RequestError(
                f"evict: requests may not name a rule here (evict_allow=none), got {text!r}",
                param="evict",
            )
        names = sorted({one.name for one in self.served})
        if name not in names:
            raise RequestError(
                f"evict: this engine serves {', '.join((FULL, *names))}, got {text!r}; start it "
                f"with --evict-allow {name!r}",
                param="evict",
            )

    def _require_served(self, text: str, rule: EvictionRule) -> None:
        wanted = served_by_rule(text, rule)
        if not self.mixes and wanted.rerotates_keys != self.rerotates_keys:
            raise RequestError(f"evict: {of_other_pages(wanted)}", param="evict")
        self._require_named(text)
        had = {one.name for one in self.statistics}
        missing = sorted({one.name for one in wanted.statistics} - had)
        if self._allow == ALL:  # lane groups of other statistics are added for the request
            self._require_possible(text, wanted)
            missing = []
        projects = any(one.reads_projection for one in self.served)
        if missing or (wanted.heads_apart and not self.heads_apart):
            what = f"the statistics {', '.join(missing)}" if missing else "one-head pages"
        elif wanted.reads_projection and not projects:
            what = "output projections"
        else:
            what = ""
        if what:
            raise RequestError(
                f"evict: {text!r} needs {what}, which this engine does not have; start it with "
                f"--evict-allow {without_numbers(text)!r}",
                param="evict",
            )


def check_chunk_size(rule: EvictionRule, schedule: ScheduleConfig) -> None:
    """Refuse a rule whose prefill chunks of `every` tokens are larger than a step.

    Raises:
        ConfigError: the message states both numbers.
    """
    if (
        rule.evicts
        and rule.when == PREFILL_AND_DECODE
        and rule.max_every > schedule.max_num_batched_tokens
    ):
        raise ConfigError(
            f"a step of {schedule.max_num_batched_tokens} tokens is smaller than a prefill chunk "
            f"of every={rule.max_every} tokens, which eviction needs in one step; raise "
            "--max-num-batched-tokens or lower every"
        )


def check_pre_rope(rules: EvictionRules, why_not: Callable[[], str | None]) -> None:
    """Refuse pre-RoPE keys for models whose RoPE cannot be applied separately.

    Args:
        rules: the rules of a KV memory.
        why_not: see `Decoder.prepare_pre_rope`; called only if a rule needs such keys.

    Raises:
        UnsoundCombination: states the reason and an alternative.
    """
    why = why_not() if rules.rerotates_keys else None
    policy = rules.default.policy
    if rules.mixes and policy is not None and policy.rerotates_keys:
        why = rules.why_no_pre_rope
    if why is not None:
        raise limits.refused(limits.NO_PRE_ROPE, why=why)
