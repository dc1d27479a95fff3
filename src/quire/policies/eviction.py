"""An `--evict` text as a whole: a rule, a budget, a cap and a schedule, resolved per request.

text  --make_eviction-->  EvictionRule  --for_request-->  Eviction (with an EvictionSpec)
      once                              at admission: caps become tokens of each lane
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count

from jaxtyping import Bool, Int
from torch import Tensor

from quire.errors import ConfigError, PolicyError, UnknownName
from quire.layout import limits
from quire.layout.eviction import (
    MAX_DEFAULT_EVERY,
    MOST,
    PREFILL_AND_DECODE,
    PREFILL_END,
    PRESSURE,
    SCHEDULE_OPTIONS,
    SCHEDULES,
    Cap,
    EvictionSpec,
    default_every,
    parse_policy,
    scoring_of,
)
from quire.layout.statistics import QueryMoments, QueryRing, Statistic
from quire.policies.base import LAYER, EvictionPolicy, ScorePolicy
from quire.policies.budgets.base import Budget, Shape
from quire.policies.budgets.uniform import Uniform
from quire.policies.options import without_parentheses
from quire.policies.recommended import candidates
from quire.policies.registry import FULL, make_budget, policy_of
from quire.policies.view import KVView

TOKEN, CHUNK, PAGE = "token", "chunk", "page"
GRANULARITIES = (TOKEN, CHUNK, PAGE)
DEFAULT_CHUNK_TOKENS = 20  # ChunkKV


@dataclass(frozen=True, slots=True)
class LaneShape:
    """The layers of a model that evict: those without a sliding window.

    Attributes:
        num_layers: number of such layers.
        heads: KV heads of each layer.
        page_tokens: slots of a page.
        page_bytes: bytes of one page in each of these lanes, including per-slot statistics.
        fixed_bytes: bytes of statistics per sequence that do not depend on its length.
        head_dim: elements of a head; 0 if unknown.
    """

    num_layers: int
    heads: int
    page_tokens: int
    page_bytes: int
    fixed_bytes: int = 0
    head_dim: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """An eviction rule resolved for one request.

    Attributes:
        policy: None retains all tokens.
        budget: divides the cap over lanes.
        spec: number of tokens, and schedule.
        piece_tokens: neighbouring slots that are evicted together; 1 for single slots.
        by_page: whether pieces are pages; then an eviction removes pages and moves no slot.
        text: the rule as written; equal texts and equal prompt lengths give equal evictions.
    """

    policy: EvictionPolicy | None = None
    budget: Budget = field(default_factory=Uniform)
    spec: EvictionSpec = field(default_factory=EvictionSpec)
    piece_tokens: int = 1
    by_page: bool = False
    text: str = FULL

    @property
    def retains_fewer(self) -> bool:
        """Whether the number of slots that a lane retains is known only from the selection."""
        return self.piece_tokens > 1 or (self.policy is not None and self.policy.retains_fewer)

    @property
    def keeps_order(self) -> bool:
        """Whether slots stay in the order of positions: pieces require it, single slots do not."""
        return self.piece_tokens > 1

    def keeps_all(self, prompt_tokens: int, tokens: int) -> bool:
        """Return whether a sequence never loses a token.

        A budget that reads the prompt's cache divides a cap only once the cap is exceeded. The lane
        caps it reserves until then are ignored here.

        Args:
            prompt_tokens: tokens of the prompt.
            tokens: final length of the sequence; UNLIMITED if unknown.
        """
        spec = replace(self.spec, lane_capacities=None) if self.budget.needs_prompt else self.spec
        return spec.keeps_all(prompt_tokens, tokens)

    def select(self, view: KVView, keep: Int[Tensor, " lane"]) -> Bool[Tensor, "lane slot"]:
        """Select the slots to retain.

        Args:
            view: whole layers of one or several sequences.
            keep: slots to retain in each lane, before a ragged budget moves some.

        Raises:
            PolicyError: the rule broke its contract.
        """
        policy = self.policy
        if policy is None:
            raise PolicyError("full retains all tokens and has no rule to select with")
        if not isinstance(policy, ScorePolicy) or not self.budget.ragged:
            return policy.select(view, keep, self.piece_tokens)

        def divide(score: Tensor, must: Tensor) -> Tensor:
            return self.budget.divide(view, score, must, keep)

        return policy.select_divided(view, keep, self.piece_tokens, divide)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionRule:
    """A parsed rule, checked as far as possible without a request.

    Attributes:
        text: the policy text.
        policy: None retains all tokens.
        budget: divides the cap over lanes.
        cap: None if all tokens are retained.
        every: tokens evicted at a time; None: `default_every` of the cap in tokens.
        when: schedule; see `quire.layout.eviction`.
        granularity: one of GRANULARITIES.
        chunk_tokens: tokens of a chunk.
    """

    text: str = FULL
    policy: EvictionPolicy | None = None
    budget: Budget = field(default_factory=Uniform)
    cap: Cap | None = None
    every: int | None = None
    when: str = PREFILL_AND_DECODE
    granularity: str = TOKEN
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS

    @property
    def evicts(self) -> bool:
        """Whether the rule evicts at all."""
        return self.policy is not None

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """Statistics that the rule and its budget need, without duplicates."""
        own = () if self.policy is None else self.policy.statistics
        return tuple(dict.fromkeys((*own, *self.budget.statistics)))

    def for_request(self, prompt_tokens: int, lanes: LaneShape) -> Eviction:
        """Resolve the cap for a request, and divide it.

        A cap in percent that leaves fewer tokens than the rule protects is raised.

        Raises:
            ConfigError: another cap leaves fewer tokens than the rule protects; states both.
        """
        if self.policy is None or self.cap is None:
            return Eviction()
        tokens = self._tokens(self.cap, prompt_tokens, lanes)
        shape = self._shape_under(tokens, prompt_tokens, lanes)
        if self.cap.share is not None:
            while shape.cap < (needed := self._min_cap(shape)) <= MOST:
                tokens += needed - shape.cap
                shape = self._shape_under(tokens, prompt_tokens, lanes)
        cap, leaving, pieces = shape.cap, shape.leaving, shape.piece_tokens
        lane_capacities = self.budget.lane_capacities(shape)
        if self.divides_again:
            lane_capacities = None  # equal caps until the first eviction
        min_cap = min(cap, *lane_capacities) if lane_capacities else cap
        _check_leaving(self, min_cap, leaving)
        if min_cap < shape.least:
            raise ConfigError(
                f"{self.text!r} leaves {min_cap - leaving} tokens in a lane after an "
                f"eviction (cap {min_cap}, {leaving} evicted), but the rule needs "
                f"{shape.least - leaving}; {self.policy.cap_hint}"
            )
        return Eviction(
            policy=self.policy,
            budget=self.budget,
            spec=EvictionSpec(
                cap=cap,
                every=self.every_under(tokens),
                when=self.when,
                lane_capacities=lane_capacities,
                ragged=self.budget.ragged,
                divided=self.divides_again,
                from_prompt=self.budget.needs_prompt,
                statistics=self.statistics,
            ),
            piece_tokens=pieces,
            by_page=self.granularity == PAGE,
            text=self.text,
        )

    def _tokens(self, cap: Cap, prompt_tokens: int, lanes: LaneShape) -> int:
        """Convert a cap to tokens."""
        tokens = cap.resolve(
            prompt_tokens,
            page_tokens=lanes.page_tokens,
            page_bytes=lanes.page_bytes,
            fixed_bytes=lanes.fixed_bytes,
        )
        if not tokens:
            fixed = f" and {lanes.fixed_bytes:,} B for the statistics of a sequence"
            statistics_text = fixed if lanes.fixed_bytes else ""
            raise ConfigError(
                f"{self.text!r}: a sequence needs {lanes.page_bytes:,} B for one page of "
                f"{lanes.page_tokens} tokens in every lane{statistics_text}, "
                f"got a cap of {cap.num_bytes:,} B; raise cap, or set it in tokens"
            )
        return tokens

    def _min_cap(self, shape: Shape) -> int:
        return shape.least if shape.cap < shape.least else self.budget.min_cap(shape)

    def _shape_under(self, tokens: int, prompt_tokens: int, lanes: LaneShape) -> Shape:
        """Return the shape for a cap in tokens, without the tokens that the rule adds."""
        assert self.policy is not None, "called for rules that evict"
        assert self.cap is not None, "called for rules that evict"
        pieces = {TOKEN: 1, CHUNK: self.chunk_tokens, PAGE: lanes.page_tokens}[self.granularity]
        leaving, cap = self.leaving_under(tokens), tokens
        if self.cap.num_bytes is None:  # a cap in bytes is a hard limit
            cap += self.policy.added_tokens(tokens - leaving, pieces)
        return self._shape(cap, leaving, prompt_tokens, lanes, pieces)

    def _shape(
        self, cap: int, leaving: int, prompt_tokens: int, lanes: LaneShape, pieces: int
    ) -> Shape:
        assert self.policy is not None, "called for rules that evict"
        return Shape(
            cap=cap,
            leaving=leaving,
            num_layers=lanes.num_layers,
            heads=lanes.heads,
            prompt_tokens=prompt_tokens,
            least=self.policy.min_retained(pieces) + leaving,
            piece_tokens=pieces,
            bounded=self.divides_again,
            head_dim=lanes.head_dim,
        )

    def every_under(self, cap: int) -> int:
        """Return the tokens evicted at a time under a cap in tokens."""
        return default_every(cap) if self.every is None else self.every

    def leaving_under(self, cap: int) -> int:
        """Return the number of tokens by which a lane is below its cap after an eviction."""
        return 0 if self.when == PREFILL_END else self.every_under(cap)

    @property
    def divides_again(self) -> bool:
        """Whether the budget divides the cap at each eviction until the prompt is computed."""
        return self.budget.needs_prompt and self.when in (PREFILL_AND_DECODE, PRESSURE)

    @property
    def max_every(self) -> int:
        """The most tokens evicted at a time in any request."""
        if self.every is None and self.cap is not None and self.cap.tokens is not None:
            return default_every(self.cap.tokens)
        return MAX_DEFAULT_EVERY if self.every is None else self.every

    def finalize(self, eviction: Eviction, view: KVView, lanes: LaneShape) -> Eviction:
        """Divide the cap of a request by its cache, which holds its prompt as far as computed.

        Raises:
            PolicyError: the rule broke its contract.
        """
        if not self.budget.needs_prompt or eviction.spec.cap is None:
            return eviction
        assert isinstance(self.policy, ScorePolicy), "checked by make_eviction"
        assert isinstance(view.prompt_tokens, int), "a view of one sequence"
        spec, pieces = eviction.spec, eviction.piece_tokens
        shape = self._shape(eviction.spec.cap, spec.leaving, view.prompt_tokens, lanes, pieces)
        caps = self.budget.finalize(view, self.policy, shape)
        return replace(eviction, spec=replace(eviction.spec, lane_capacities=caps))


def make_eviction(text: str) -> EvictionRule:
    """Parse an `--evict` text.

    Without a model, `auto` is the recommended rule that fits all models.

    Raises:
        UnknownName: the policy, the budget, the schedule or an option is not known; lists the
            nearest names.
        ConfigError: the cap is missing, a value has the wrong type, or the cap is below what the
            rule protects.
        UnsoundCombination: components exclude each other; the message states the reason and an
            alternative.
    """
    *_, text = candidates(text)
    parsed = parse_policy(text)
    if parsed.name == FULL:
        if parsed.options:
            raise ConfigError(f"'full' retains all tokens and has no options, got {text!r}")
        return EvictionRule()
    options = dict(parsed.options)
    own = {k: v for k, v in options.items() if k not in SCHEDULE_OPTIONS}
    policy = policy_of(parsed.name, own)
    if "cap" not in options:
        raise ConfigError(f"policy {text!r} needs a cap, such as cap=512, cap=25% or cap=2MiB")
    scored = scoring_of(policy.statistics) is not None
    when = options.get("when", PREFILL_END if scored else PREFILL_AND_DECODE)
    if when not in SCHEDULES:
        raise UnknownName("eviction schedule", when, SCHEDULES)
    granularity = options.get("granularity", TOKEN)
    if granularity not in GRANULARITIES:
        raise UnknownName("eviction granularity", granularity, GRANULARITIES)
    rule = EvictionRule(
        text=text,
        policy=policy,
        budget=make_budget(without_parentheses(options.get("budget", "uniform"))),
        cap=Cap.parse(options["cap"]),
        every=_integer("every", options, 0) if "every" in options else None,
        when=when,
        granularity=granularity,
        chunk_tokens=_integer("chunk_tokens", options, DEFAULT_CHUNK_TOKENS),
    )
    _refuse_unsound(rule, policy, parsed.name, options["cap"])
    if rule.cap is not None and rule.cap.tokens is not None:
        leaving = rule.leaving_under(rule.cap.tokens)
        added = policy.added_tokens(rule.cap.tokens - leaving)
        _check_cap(rule, rule.cap.tokens + added, leaving)
    return rule


def _refuse_unsound(rule: EvictionRule, policy: EvictionPolicy, name: str, cap: str) -> None:
    """Refuse components that exclude each other."""
    budget, statistics = rule.budget, (*policy.statistics, *rule.budget.statistics)
    passes, limit = {one.scoring for one in statistics} - {None}, None
    if (budget.needs_prompt or budget.ragged) and not isinstance(policy, ScorePolicy):
        limit = limits.BUDGET_WITHOUT_SCORES
    elif budget.by_head and policy.scope == LAYER and not _divides_heads(policy, budget):
        limit = limits.BUDGET_OF_HEADS
    elif policy.rerotates_keys and any(
        isinstance(one, QueryRing | QueryMoments) for one in statistics
    ):
        limit = limits.QUERIES_REROTATED
    elif budget.in_tokens and Cap.parse(cap).share is not None:
        limit = limits.BUDGET_IN_TOKENS
    elif policy.needs_pieces and rule.granularity == TOKEN:
        limit = limits.PIECES_BY_TOKEN
    elif passes and rule.when != PREFILL_END:
        limit = limits.SCORED_LATER
    elif len(passes) > 1:
        limit = limits.SCORED_TWICE
    if limit is not None:
        budget_name = type(budget).__name__.lower()
        values = {"budget": budget_name, "cap": cap, "name": name, "when": rule.when}
        raise limits.refused(limit, text=rule.text, **values)


def _divides_heads(policy: EvictionPolicy, budget: Budget) -> bool:
    """Whether a rule with one set per layer can retain different numbers of its best slots."""
    if budget.needs_prompt or budget.ragged or not isinstance(policy, ScorePolicy):
        return False
    return policy.only_ranks and not policy.scores_heads and not policy.rerotates_keys


def _check_leaving(rule: EvictionRule, cap: int, leaving: int) -> None:
    if leaving >= cap:
        raise ConfigError(
            f"{rule.text!r}: expected 1 <= every < cap, got every={leaving}, cap={cap}; each "
            "eviction removes `every` tokens from a lane: raise cap or lower every"
        )


def _check_cap(rule: EvictionRule, cap: int, leaving: int) -> None:
    _check_leaving(rule, cap, leaving)
    policy = rule.policy
    if policy is not None and cap - leaving < policy.min_cap:
        raise ConfigError(
            f"{rule.text!r} leaves {cap - leaving} tokens after an eviction (cap {cap}, "
            f"{leaving} evicted), but the rule needs {policy.min_cap}; {policy.cap_hint}; "
            f"cap={_working_cap(rule, policy.min_cap)} works"
        )


def _working_cap(rule: EvictionRule, least: int) -> int:
    """The smallest cap in tokens that leaves `least` tokens after an eviction."""
    return next(n for n in count(least) if n - rule.leaving_under(n) >= least)


def _integer(key: str, options: Mapping[str, str], default: int) -> int:
    try:
        number = int(options.get(key, default))
    except ValueError:
        raise ConfigError(
            f"option {key} needs a whole number of tokens, got {options[key]!r}"
        ) from None
    if not 1 <= number <= MOST:
        raise ConfigError(f"option {key} needs a number from 1 to {MOST:,}, got {number}")
    return number
