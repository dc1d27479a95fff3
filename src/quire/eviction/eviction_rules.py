"""Which eviction rules an engine was started for: its own, and those that requests may name.

The lanes of a pool are laid out when it is made. A rule whose heads choose for themselves needs
one-head pages, one that remembers things needs pages for them, so requests can only name rules that
were announced (`KVConfig.evict_allow`), or their engine's own rule with other numbers.
"""

from collections.abc import Callable
from dataclasses import replace

from quire.errors import ConfigError, RequestError, UnsoundCombination
from quire.eviction.rule_requirements import (
    NONE,
    announced,
    of_other_pages,
    possible,
    refuse_mixture,
    served_by_rule,
    without_numbers,
)
from quire.layout.codec_refusals import Storing, refuse_excluded
from quire.layout.eviction import PREFILL_AND_DECODE, PREFILL_END, PRESSURE, UNLIMITED
from quire.layout.kv_format import read_format
from quire.layout.layout import layout_for, page_and_fixed_bytes
from quire.layout.model import ModelSpec
from quire.layout.statistics import Statistic
from quire.policies.base import ScorePolicy
from quire.policies.eviction import PAGE, Eviction, EvictionRule, make_eviction
from quire.policies.lane_shape import LaneShape
from quire.policies.registry import FULL
from quire.scheduler.schedule_config import ScheduleConfig


class EvictionRules:
    """Turns what a request asks for into an eviction with numbers.

    Args:
        default: of requests that say nothing, as in `KVConfig.evict`.
        allow: what requests may name besides, as in `KVConfig.evict_allow`: "none", "all", or rules
            one after another, such as "h2o; snapkv:window=16"; "" is the default's own name.
        model: whose KV it is.
        page_tokens: slots of a page.
        codec: how keys and values are stored.
        reserved: lanes are as long as the default's from the start: nobody may ask for another.
        why_not: says why the model cannot give what a statistic needs; None where it can.

    Raises:
        ConfigError: a text that is no rule.
        UnsoundCombination: a model without a layer that could evict, or rules that cannot share
            pages, or that the codec excludes.
    """

    def __init__(
        self,
        default: str,
        allow: str,
        *,
        model: ModelSpec,
        page_tokens: int,
        codec: str,
        reserved: bool = False,
        why_not: Callable[[Statistic], str | None] = lambda statistic: None,
    ) -> None:
        self.default = make_eviction(default)
        self._model, self._page_tokens, self._codec = model, page_tokens, codec
        self._lanes: dict[tuple[Statistic, ...], LaneShape] = {}
        self._allow, self._reserved = allow.strip(), reserved
        own = [served_by_rule(default, self.default)] if self.default.evicts else []
        others = announced(allow, rerotates_keys=any(one.rerotates_keys for one in own))
        self.served = tuple(possible([*own, *others], why_not, self._allow))
        refuse_mixture(self.served)
        self._storing = Storing(form=read_format(codec), evicts=self.evicts, in_runs=reserved)
        refuse_excluded(codec, self._storing_of(self.default))
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
    def rerotates_keys(self) -> bool:
        """Whether keys are stored before RoPE."""
        return any(rule.rerotates_keys for rule in self.served)

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
            raise RequestError(f"evict: {error}", param="evict") from error
        if text != self.default.text:
            self._require_lanes(text)
            self._require_storing(rule)
            if rule.evicts:
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
            raise RequestError(f"evict: {error}", param="evict") from error

    @property
    def query_group(self) -> int:
        """Query heads that share a KV head."""
        return self._model.num_heads // self._model.num_kv_heads

    def lanes_of(self, rule: EvictionRule) -> LaneShape:
        """What a rule has to do with: layers without a window, and what their pages take."""
        if rule.statistics not in self._lanes:
            self._lanes[rule.statistics] = self._lane_shape(rule.statistics)
        return self._lanes[rule.statistics]

    def _lane_shape(self, statistics: tuple[Statistic, ...]) -> LaneShape:
        layout = layout_for(
            self._model,
            codec=self._codec,
            page_tokens=self._page_tokens,
            evicting=True,
            heads_apart=self.heads_apart,
            statistics=statistics,
        )
        page_bytes, fixed_bytes = page_and_fixed_bytes(layout)
        return LaneShape(
            num_layers=sum(layer.window is None for layer in self._model.layers),
            heads=self._model.num_kv_heads,
            page_tokens=self._page_tokens,
            page_bytes=page_bytes,
            fixed_bytes=fixed_bytes,
        )

    def context_tokens(self, rule: EvictionRule, prompt_tokens: int) -> int:
        """Tokens that a sequence may come to: the model's context.

        Where what stays is numbered anew and no lane can outgrow the context, a sequence has no
        end: UNLIMITED.

        Args:
            rule: of the request.
            prompt_tokens: of its prompt.

        Raises:
            RequestError: the cap leaves less than the rule protects.
        """
        context, policy = self._model.max_positions, rule.policy
        if policy is None or not policy.rerotates_keys:
            return context
        spec = self.resolve(rule, prompt_tokens).spec
        if spec.when == PRESSURE or spec.ragged:  # lanes may come to more than their cap
            return context
        peaks = (
            spec.lane_peak_tokens(cap, UNLIMITED, prompt_tokens)
            for cap in spec.lane_caps or (spec.cap,)
        )
        return UNLIMITED if max(peaks) <= context else context

    def _storing_of(self, rule: EvictionRule) -> Storing:
        """What a rule asks of pages."""
        if not rule.evicts:
            return replace(self._storing, by_page=True)
        return replace(
            self._storing,
            by_page=rule.granularity == PAGE,
            scores=isinstance(rule.policy, ScorePolicy),
            every=0 if rule.when == PREFILL_END else rule.most_every,
        )

    def _require_storing(self, rule: EvictionRule) -> None:
        """Tokens that share scales leave together, whoever asks; and so on."""
        try:
            refuse_excluded(self._codec, self._storing_of(rule))
        except UnsoundCombination as error:
            raise RequestError(f"evict: {error}", param="evict") from error

    def _require_lanes(self, text: str) -> None:
        if self._reserved:
            raise RequestError(
                f"evict: lanes of this store are reserved as long as {self.default.text!r} lets "
                f"them get, and {text!r} may need longer ones; start it with --kv-store paged",
                param="evict",
            )

    def _require_served(self, text: str, rule: EvictionRule) -> None:
        wanted = served_by_rule(text, rule)
        if wanted.rerotates_keys != self.rerotates_keys:
            raise RequestError(f"evict: {of_other_pages(wanted)}", param="evict")
        names = sorted({one.name for one in self.served})
        if self._allow == NONE:
            raise RequestError(
                f"evict: requests of this engine may name no rule (evict_allow=none), got {text!r}",
                param="evict",
            )
        if wanted.name not in names:
            raise RequestError(
                f"evict: this engine serves {', '.join((FULL, *names))}, got {text!r}; start it "
                f"with --evict-allow {wanted.name!r}",
                param="evict",
            )
        missing = sorted(one.name for one in wanted.statistics - set(self.statistics))
        if missing or (wanted.heads_apart and not self.heads_apart):
            what = f"what it remembers ({', '.join(missing)})" if missing else "one-head pages"
            raise RequestError(
                f"evict: {text!r} needs {what}, for which this engine was not started; start it "
                f"with --evict-allow {without_numbers(text)!r}",
                param="evict",
            )


def check_blocks(rule: EvictionRule, schedule: ScheduleConfig) -> None:
    """Refuse blocks that no step has room for.

    Raises:
        ConfigError: with both numbers.
    """
    if (
        rule.evicts
        and rule.when == PREFILL_AND_DECODE
        and rule.most_every > schedule.max_num_batched_tokens
    ):
        raise ConfigError(
            f"a step of {schedule.max_num_batched_tokens} tokens has no room for a chunk of every="
            f"{rule.most_every} tokens, which an evicting prompt reads at once; raise "
            "--max-num-batched-tokens or lower every"
        )
