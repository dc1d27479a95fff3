"""Turns a submission into a request: checked, with the model's defaults and a policy's numbers."""

import logging
import random
from collections.abc import Callable
from dataclasses import replace

from quire.config.generation_request import GenerationRequest, token_ids_of
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.batch_invariance import refuse_pressure
from quire.engine.validation import (
    check_context,
    checked_deadline,
    checked_params,
    checked_prompt,
    checked_salt,
)
from quire.errors import ConfigError, RequestError
from quire.eviction.eviction_rules import EvictionRules, check_blocks
from quire.layout.eviction import EvictionSpec
from quire.layout.layout import statistics_used
from quire.layout.pages import CacheLayout
from quire.models.loader import LoadedModel
from quire.policies.base import LAYER
from quire.policies.eviction import Eviction, EvictionRule
from quire.scheduler.request import Request
from quire.scheduler.schedule_config import ScheduleConfig

MOST_SPECS = 4096  # distinct ones that are kept so that equal ones are one object

logger = logging.getLogger(__name__)


class InputProcessor:
    """Makes an engine's requests.

    Args:
        model: that they are for.
        rules: eviction rules that they may have.
        layout: lane groups of every sequence.
        schedule: steps and queues.
        kv: what is recorded where a request does not say.
        clock: seconds, for time stamps.
    """

    def __init__(
        self,
        model: LoadedModel,
        rules: EvictionRules,
        layout: CacheLayout,
        schedule: ScheduleConfig,
        kv: KVConfig,
        clock: Callable[[], float],
    ) -> None:
        self._model, self._rules, self._layout = model, rules, layout
        self._schedule, self._clock = schedule, clock
        self._records_evictions = kv.record_evictions
        self._specs: dict[EvictionSpec, EvictionSpec] = {}

    def make(self, requested: GenerationRequest) -> Request:
        """A request without an id.

        Args:
            requested: its prompt is a list of token ids.

        Raises:
            RequestError: see `Engine.submit`.
        """
        model = self._model
        rule, token_ids = self._rules.rule(requested.evict), token_ids_of(requested)
        # the length first: steps wait while the ids of a prompt are checked
        context = self._rules.context_tokens(rule, len(token_ids))
        check_context(len(token_ids), context)
        prompt = checked_prompt(token_ids, model.spec)
        params = checked_params(requested.sampling or SamplingParams(), len(prompt), model, context)
        seed, records = params.seed, requested.record_evictions
        now_s = self._clock()
        request = Request(
            request_id="",
            prompt_token_ids=prompt,
            params=params,
            sampling_seed=random.getrandbits(63) if seed is None else seed,
            priority=requested.priority,
            deadline_s=now_s + checked_deadline(requested.deadline_s),
            tenant=requested.tenant,
            cache_salt=checked_salt(requested.cache_salt),
            rope_variant=model.decoder.rope_variant(len(prompt) + params.max_tokens),
            records_evictions=self._records_evictions if records is None else records,
            arrival_s=now_s,
        )
        self._give_policy(request, rule)
        return request

    def context_tokens(self, prompt_tokens: int, evict: str | None = None) -> int:
        """Tokens that a sequence may come to; see `EvictionRules.context_tokens`.

        Raises:
            RequestError: a policy this engine does not serve, or that leaves too little.
        """
        return self._rules.context_tokens(self._rules.rule(evict), prompt_tokens)

    def _give_policy(self, request: Request, rule: EvictionRule) -> None:
        """Let a request have the policy it asks for.

        Raises:
            RequestError: it leaves too little.
        """
        request.statistics = statistics_used(self._layout, ())
        if not rule.evicts:
            return
        eviction = _alike_in_layers(
            self._rules.resolve(rule, len(request.prompt_token_ids)), self._model.spec.num_kv_heads
        )
        spec, final_tokens = eviction.spec, request.final_tokens
        assert spec.cap is not None, "a rule that evicts has a cap"
        try:
            check_blocks(rule, self._schedule)
            if self._schedule.batch_invariant:
                refuse_pressure(rule)
        except ConfigError as error:
            raise RequestError(f"evict: {error}", param="evict") from error
        request.evict = rule.text
        # such a request remembers nothing
        if eviction.keeps_all(len(request.prompt_token_ids), final_tokens):
            logger.info("%r: %d tokens never pass the cap", rule.text, final_tokens)
            return
        request.selection = eviction
        request.pending = rule.budget.needs_prompt  # until then each lane may get the most
        if rule.policy is not None and rule.policy.rerotates_keys:
            # no position is above what a lane holds, so frequencies are chosen by that
            most = spec.peak_tokens(final_tokens, len(request.prompt_token_ids))
            request.rope_variant = self._model.decoder.rope_variant(most)
        request.eviction = self._one_of(spec)
        request.statistics = statistics_used(self._layout, spec.statistics)

    def _one_of(self, spec: EvictionSpec) -> EvictionSpec:
        """One object for equal specs: admission counts requests of one spec together."""
        if len(self._specs) >= MOST_SPECS:
            self._specs.clear()
        return self._specs.setdefault(spec, spec)


def _alike_in_layers(eviction: Eviction, heads: int) -> Eviction:
    """Let heads that keep one set have one cap, the least of theirs, whatever pages they lie in."""
    caps, policy = eviction.spec.lane_caps, eviction.policy
    if caps is None or policy is None or policy.scope != LAYER:
        return eviction
    least = [min(caps[i : i + heads]) for i in range(0, len(caps), heads)]
    alike = tuple(cap for cap in least for _ in range(heads))
    return replace(eviction, spec=replace(eviction.spec, lane_caps=alike))
