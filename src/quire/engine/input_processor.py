"""Validates a generation request and resolves its sampling and eviction options for the model."""

import logging
import math
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from quire.config.generation_request import GenerationRequest, token_ids_of
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.batch_invariance import refuse_pressure
from quire.engine.pool import KVPool
from quire.errors import ConfigError, RequestError
from quire.eviction.eviction_rules import check_chunk_size
from quire.layout.eviction import EvictionSpec
from quire.layout.layout import statistics_used
from quire.layout.model import ModelSpec
from quire.layout.sparse import SparseSpec, parse_sparse, refuse_sparse
from quire.models.base import HiddenStates
from quire.models.loader import LoadedModel
from quire.policies.base import LAYER
from quire.policies.eviction import Eviction, EvictionRule
from quire.sampling.grammar import GrammarCompiler
from quire.scheduler.request import CONTEXT, Request, RequestEviction, RequestMemory, RequestSpec
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.speculation import SpeculativeSpec, parse_speculative


def check_pooling(model: LoadedModel, params: SamplingParams) -> None:
    """Prepare the model for embeddings, at the first request with `pooling`."""
    if params.pooling is None:
        return
    why_not: str | None = "its decoder returns logits only"
    if isinstance(model.decoder, HiddenStates):
        why_not = model.decoder.prepare_hidden_states()
    if why_not is not None:
        raise RequestError(f"{model.name} has no embeddings: {why_not}", param="pooling")


MAX_SPECS = 4096  # maximum number of cached specs

logger = logging.getLogger(__name__)


class InputProcessor:
    """Converts generation requests to scheduler requests."""

    def __init__(
        self,
        model: LoadedModel,
        pool: KVPool,
        schedule: ScheduleConfig,
        kv: KVConfig,
        clock: Callable[[], float],
        held_tokens: Callable[[], int],
    ) -> None:
        self._model, self._pool, self._rules = model, pool, pool.rules
        self._schedule, self._clock, self._held_tokens = schedule, clock, held_tokens
        self._records_evictions = kv.record_evictions
        self._sparse = parse_sparse(kv.sparse)
        self._speculative = parse_speculative(schedule.speculative)
        self._specs: dict[EvictionSpec, EvictionSpec] = {}
        self.grammars = GrammarCompiler(
            model.tokenizer, model.spec.vocab_size, model.generation.eos_token_ids
        )

    def make(self, requested: GenerationRequest, request_id: str, arrival: int) -> Request:
        model = self._model
        rule, token_ids = self._rules.rule(requested.evict), token_ids_of(requested)
        # the length first: checking the ids of a long prompt delays the next step
        context = self._rules.context_tokens(rule, len(token_ids))
        held_tokens = None if rule.evicts else self._held_tokens
        check_context(len(token_ids), context, held_tokens)
        prompt = checked_prompt(token_ids, model.spec)
        resolved = (requested.sampling or SamplingParams()).resolve(model.generation)
        strict = requested.limit_max_tokens is False
        params = checked_params(resolved, len(prompt), model, context, held_tokens, strict=strict)
        check_pooling(model, params)
        seed, records = params.seed, requested.record_evictions
        now_s, final_tokens = self._clock(), len(prompt) + params.max_tokens
        policy = self._policy(rule, prompt, len(prompt) + max(0, params.max_tokens - 1))
        longest = len(prompt) + max(map(len, policy.scoring_token_ids), default=0)
        spec = RequestSpec(
            request_id=request_id,
            prompt_token_ids=prompt,
            params=params,
            sampling_seed=random.getrandbits(63) if seed is None else seed,
            priority=requested.priority,
            deadline_s=now_s + checked_deadline(requested.deadline_s),
            arrival=arrival,
            arrival_s=now_s,
            rope_variant=model.decoder.rope_variant(
                policy.context_tokens or max(final_tokens, longest)
            ),
            pre_rope=policy.context_tokens is not None and self._rules.mixes,
            tenant=requested.tenant,
            cache_salt=checked_salt(requested.cache_salt),
            evict=policy.text,
            sparse=self._sparse_of(requested.sparse),
            speculative=self._speculative_of(requested, params),
            records_evictions=self._records_evictions if records is None else records,
            max_tokens_limit=CONTEXT if params.max_tokens < resolved.max_tokens else "",
            scoring_token_ids=policy.scoring_token_ids,
        )
        wanted = params.structured_outputs
        matcher = None if wanted is None else self.grammars.compile(wanted).matcher()
        return Request(spec, memory=policy.memory, eviction=policy.eviction, matcher=matcher)

    def context_tokens(self, prompt_tokens: int, evict: str | None = None) -> int:
        return self._rules.context_tokens(self._rules.rule(evict), prompt_tokens)

    def _sparse_of(self, text: str | None) -> SparseSpec | None:
        if text is None:
            return self._sparse
        try:
            spec = parse_sparse(text)
            if spec is not None:
                refuse_sparse(self._model.spec, self._pool.stored_as.codec, spec)
        except ConfigError as error:
            raise RequestError(f"sparse: {error}", param="sparse") from error
        if spec is not None and self._sparse is None:
            raise RequestError(
                f"sparse: {text!r} needs the bounds of keys, which this engine does not store; "
                "start it with --sparse and a rule, or leave out sparse",
                param="sparse",
            )
        return spec

    def _speculative_of(
        self, requested: GenerationRequest, params: SamplingParams
    ) -> SpeculativeSpec | None:
        wanted = requested.speculative
        if wanted is False or self._speculative is None or params.use_beam_search:
            if wanted:
                why = "beams are exchanged after each token" if self._speculative else "it is off"
                raise RequestError(
                    f"speculative: {why}; start the engine with --speculative and leave out beam "
                    "search, or leave out speculative",
                    param="speculative",
                )
            return None
        return self._speculative

    def _policy(self, rule: EvictionRule, prompt: list[int], final_tokens: int) -> "_Policy":
        """Resolve the eviction rule of a request."""
        prompt_tokens = len(prompt)
        none = statistics_used(self._pool.kv.memory.layout, ())
        if not rule.evicts:
            return _Policy(memory=RequestMemory(statistics=none))
        eviction = _equal_caps_per_layer(
            self._rules.resolve(rule, prompt_tokens), self._rules.kv_heads
        )
        spec = eviction.spec
        assert spec.cap is not None, "a rule that evicts has a cap"
        try:
            check_chunk_size(rule, self._schedule)
            if self._schedule.batch_invariant:
                refuse_pressure(rule)
        except ConfigError as error:
            raise RequestError(f"evict: {error}", param="evict") from error
        # a request that never evicts records no statistics
        if eviction.keeps_all(prompt_tokens, final_tokens):
            logger.info("%r: %d tokens never exceed the cap", rule.text, final_tokens)
            return _Policy(rule.text, memory=RequestMemory(statistics=none))
        scoring_token_ids = self._scoring_token_ids(prompt, spec)
        self._pool.add_statistics(spec.statistics)
        layout = self._pool.kv.memory.layout
        # re-rotated positions never exceed the lane's capacity, which selects the RoPE variant
        rerotates = rule.policy is not None and rule.policy.rerotates_keys and not spec.divided
        return _Policy(
            rule.text,
            spec.peak_tokens(final_tokens, prompt_tokens) if rerotates else None,
            RequestMemory(statistics=statistics_used(layout, spec.statistics)),
            RequestEviction(
                spec=self._one_of(spec),
                selection=eviction,
                pending=rule.budget.needs_prompt,  # until then every lane may get the largest cap
            ),
            scoring_token_ids,
        )

    def _scoring_token_ids(self, prompt: list[int], spec: EvictionSpec) -> tuple[list[int], ...]:
        """Return the chunks of the scoring pass after a prompt; without a tokenizer, no texts."""
        scoring, tokenizer = spec.scoring, self._model.tokenizer
        if scoring is None or not spec.scoring_slots(len(prompt)):
            return ()

        def encode(text: str) -> list[int]:
            if tokenizer is None:
                return []
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
            return ids

        try:
            return scoring.token_ids(prompt, encode)
        except ConfigError as error:
            raise RequestError(f"evict: {error}", param="evict") from error

    def _one_of(self, spec: EvictionSpec) -> EvictionSpec:
        """Return the cached object of equal specs: admission groups requests by spec identity."""
        if len(self._specs) >= MAX_SPECS:
            self._specs.clear()
        return self._specs.setdefault(spec, spec)


@dataclass(frozen=True, slots=True)
class _Policy:
    """The resolved eviction rule of one request."""

    text: str = "full"  # as written in the request
    # largest position that keys are rotated to; None: length of the sequence
    context_tokens: int | None = None
    memory: RequestMemory = field(default_factory=RequestMemory)
    eviction: RequestEviction = field(default_factory=RequestEviction)
    scoring_token_ids: tuple[list[int], ...] = ()


def _equal_caps_per_layer(eviction: Eviction, heads: int) -> Eviction:
    """Set the caps of all heads of a layer to the smallest one, if they share a retained set."""
    caps, policy = eviction.spec.lane_capacities, eviction.policy
    if caps is None or policy is None or policy.scope != LAYER or eviction.budget.by_head:
        return eviction
    least = [min(caps[i : i + heads]) for i in range(0, len(caps), heads)]
    equal = tuple(cap for cap in least for _ in range(heads))
    return replace(eviction, spec=replace(eviction.spec, lane_capacities=equal))


# Validation of a request before it is queued.

MAX_SALT_CHARACTERS = 128


def checked_prompt(prompt_token_ids: Sequence[int], spec: ModelSpec) -> list[int]:
    """Check token ids and return them as a list; `check_context` checks the length."""
    try:
        prompt = [operator.index(i) for i in prompt_token_ids]
    except TypeError as error:
        raise RequestError(
            f"expected a prompt as a list of integer token ids: {error}", param="prompt"
        ) from None
    if not prompt:
        raise RequestError("the prompt is empty: give at least one token", param="prompt")
    wrong = [i for i in prompt if not 0 <= i < spec.vocab_size]
    if wrong:
        raise RequestError(
            f"token ids must be integers from 0 to {spec.vocab_size - 1}, got {wrong[:5]}",
            param="prompt",
        )
    return prompt


def check_context(
    prompt_tokens: int, context_tokens: int, held_tokens: Callable[[], int] | None = None
) -> None:
    """Refuse a prompt that is longer than the context.

    Args:
        prompt_tokens: its length.
        context_tokens: the model's context.
        held_tokens: returns the tokens of one sequence that the KV memory holds, for the message.
    """
    if prompt_tokens > context_tokens:
        held = context_tokens if held_tokens is None else held_tokens()
        memory = f", and the KV memory holds {held}" if held < context_tokens else ""
        raise RequestError(
            f"the prompt has {prompt_tokens} tokens, the model's context {context_tokens}{memory}; "
            "shorten the prompt",
            param="prompt",
        )


def checked_salt(salt: str) -> str:
    """Check the salt of a request's cached prefixes."""
    if len(salt) > MAX_SALT_CHARACTERS:
        raise RequestError(
            f"expected a cache_salt of at most {MAX_SALT_CHARACTERS} characters, got {len(salt)}",
            param="cache_salt",
        )
    if not salt.isprintable():
        raise RequestError(
            "expected a cache_salt of printable characters, without control characters or line "
            f"breaks, got {salt!r}",
            param="cache_salt",
        )
    return salt


def checked_deadline(deadline_s: float | None) -> float:
    """Check the deadline of a request in seconds from now; infinity if unset."""
    if deadline_s is None:
        return math.inf
    if not 0 < deadline_s < math.inf:
        raise RequestError(
            f"expected deadline_s above 0, in seconds from now, got {deadline_s}; leave it out "
            "for no deadline",
            param="deadline_s",
        )
    return deadline_s


def checked_params(
    resolved: SamplingParams,
    prompt_tokens: int,
    model: LoadedModel,
    context_tokens: int,
    held_tokens: Callable[[], int] | None = None,
    *,
    strict: bool = False,
) -> SamplingParams:
    """Check sampling parameters and limit `max_tokens` to the context, or refuse it if `strict`.

    At the end of the context the output ends with "length".
    """
    resolved.validate_for(model.spec.vocab_size)
    available = context_tokens - prompt_tokens
    if resolved.max_tokens and not available:
        raise RequestError(
            f"the prompt's {prompt_tokens} tokens fill the model's whole context: no new token "
            "fits; shorten the prompt",
            param="prompt",
        )
    if resolved.max_tokens <= available:
        return resolved
    if strict:
        # the KV of the last token is never computed
        fitting = available if held_tokens is None else held_tokens() + 1 - prompt_tokens
        limit, smallest = "remain of the context", available
        if fitting < available:
            limit, smallest = "fit into the KV memory", max(0, fitting)
        raise RequestError(
            f"max_tokens={resolved.max_tokens} exceeds the {smallest} tokens that {limit} after a "
            f"prompt of {prompt_tokens}; lower it, or omit limit_max_tokens",
            param="max_tokens",
        )
    return with_max_tokens(resolved, available)


def with_max_tokens(params: SamplingParams, max_tokens: int) -> SamplingParams:
    """Lower `max_tokens`, and `min_tokens` if it is larger."""
    return replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))
