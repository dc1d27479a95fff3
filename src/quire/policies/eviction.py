"""What `--evict` says, as a whole: a rule, a budget, a cap and a schedule; for a request, numbers.

text  --make_eviction-->  EvictionRule  --for_request-->  Eviction (with an EvictionSpec)
      once                              at admission: caps become tokens of each lane
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from jaxtyping import Bool, Int
from torch import Tensor

from quire.errors import ConfigError, PolicyError, UnknownName, UnsoundCombination
from quire.layout.eviction import (
    MOST,
    MOST_DEFAULT_EVERY,
    PREFILL_AND_DECODE,
    PREFILL_END,
    SCHEDULES,
    Cap,
    EvictionSpec,
    default_every,
    parse_policy,
)
from quire.layout.statistics import Statistic
from quire.policies.base import Decision, EvictionPolicy, ScorePolicy
from quire.policies.budgets.base import Budget, Shape, Uniform
from quire.policies.choose import in_whole_pieces
from quire.policies.lane_shape import LaneShape
from quire.policies.options import without_parentheses
from quire.policies.registry import FULL, SCHEDULE_OPTIONS, make_budget, policy_of
from quire.policies.unsound import Parts, refuse_unsound
from quire.policies.view import KVView

TOKEN, CHUNK, PAGE = "token", "chunk", "page"
GRANULARITIES = (TOKEN, CHUNK, PAGE)
DEFAULT_CHUNK_TOKENS = 20  # ChunkKV


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """A rule with numbers, for one request.

    Attributes:
        policy: None keeps everything.
        budget: how the cap is divided.
        spec: how many tokens, when.
        piece_tokens: neighbouring slots that stay or go together; 1 for single ones.
        by_page: pieces are pages, and leave by an edit of the table.
        text: as it was written; equal texts and prompts of equal length give equal evictions.
    """

    policy: EvictionPolicy | None = None
    budget: Budget = field(default_factory=Uniform)
    spec: EvictionSpec = field(default_factory=EvictionSpec)
    piece_tokens: int = 1
    by_page: bool = False
    text: str = FULL

    @property
    def keeps_order(self) -> bool:
        """Whether slots stay in the order of positions: pieces need that, single slots do not."""
        return self.piece_tokens > 1

    def keeps_all(self, prompt_tokens: int, tokens: int) -> bool:
        """Whether a sequence never loses any token.

        A budget that looks at the prompt's cache divides a cap only where it is passed: what such a
        budget reserves for each lane until then says nothing.

        Args:
            prompt_tokens: of its prompt.
            tokens: of the sequence at its end; UNLIMITED where nobody knows.
        """
        spec = replace(self.spec, lane_caps=None) if self.budget.needs_prompt else self.spec
        return spec.keeps_all(prompt_tokens, tokens)

    def select(self, view: KVView, keep: Int[Tensor, " lane"]) -> Bool[Tensor, "lane slot"]:
        """Which slots stay; see `decide`."""
        stays: Bool[Tensor, "lane slot"] = self.decide(view, keep).stays
        return stays

    def decide(self, view: KVView, keep: Int[Tensor, " lane"]) -> Decision:
        """Which slots stay, and what is written down of them.

        Args:
            view: one sequence, whole layers of it.
            keep: of each lane, before a ragged budget moves some.

        Raises:
            PolicyError: the rule broke its contract.
        """
        policy = self.policy
        if policy is None:
            raise PolicyError("full keeps everything and selects nothing")
        if not isinstance(policy, ScorePolicy) or not self.budget.ragged:
            return policy.decide(view, keep, self.piece_tokens)
        score = policy.checked_score(view)
        protected = policy.checked_protected(view, keep, self.piece_tokens)
        must = in_whole_pieces(protected, view.live, self.piece_tokens)
        keep = self.budget.divide(view, score, must, keep)
        return Decision(policy.choose(view, score, must, keep, self.piece_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionRule:
    """What was written, checked as far as that goes without a request.

    Attributes:
        text: as written.
        policy: None keeps everything.
        budget: how the cap is divided.
        cap: None where everything is kept.
        every: tokens that leave at a time; None: `default_every` of the cap in tokens.
        when: see `quire.layout.eviction`.
        granularity: one of GRANULARITIES.
        chunk_tokens: of a chunk.
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
        """Whether anything ever leaves."""
        return self.policy is not None

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """What must be remembered for it, each once."""
        own = () if self.policy is None else self.policy.statistics
        return tuple(dict.fromkeys((*own, *self.budget.statistics)))

    def for_request(self, prompt_tokens: int, lanes: LaneShape) -> Eviction:
        """Resolve the cap, and divide it.

        Raises:
            ConfigError: the cap leaves less than the rule protects; says what it came to.
        """
        if self.policy is None or self.cap is None:
            return Eviction()
        pieces = {TOKEN: 1, CHUNK: self.chunk_tokens, PAGE: lanes.page_tokens}[self.granularity]
        cap = self._tokens(self.cap, prompt_tokens, lanes)
        every, leaving = self.every_under(cap), self.leaving_under(cap)
        if self.cap.num_bytes is None:  # a cap in bytes is all there is
            cap += self.policy.added_tokens(cap - leaving, pieces)
        shape = self._shape(cap, leaving, prompt_tokens, lanes, pieces)
        lane_caps = self.budget.lane_caps(shape)
        least_cap = min(cap, *lane_caps) if lane_caps else cap
        _check_leaving(self, least_cap, leaving)
        if least_cap < shape.least:
            raise ConfigError(
                f"{self.text!r} leaves {least_cap - leaving} tokens in a lane after an "
                f"eviction (cap {least_cap}, {leaving} leave), but the rule needs "
                f"{shape.least - leaving}; {self.policy.more_room}"
            )
        return Eviction(
            policy=self.policy,
            budget=self.budget,
            spec=EvictionSpec(
                cap=cap,
                every=every,
                when=self.when,
                lane_caps=lane_caps,
                ragged=self.budget.ragged,
                statistics=self.statistics,
            ),
            piece_tokens=pieces,
            by_page=self.granularity == PAGE,
            text=self.text,
        )

    def _tokens(self, cap: Cap, prompt_tokens: int, lanes: LaneShape) -> int:
        """What a cap comes to."""
        tokens = cap.resolve(
            prompt_tokens,
            page_tokens=lanes.page_tokens,
            page_bytes=lanes.page_bytes,
            fixed_bytes=lanes.fixed_bytes,
        )
        if not tokens:
            remembered = f" and {lanes.fixed_bytes:,} B for what it remembers of any sequence"
            raise ConfigError(
                f"{self.text!r}: a sequence needs {lanes.page_bytes:,} B for one page of "
                f"{lanes.page_tokens} tokens in every lane{remembered * bool(lanes.fixed_bytes)}, "
                f"got a cap of {cap.num_bytes:,} B; raise cap, or give it in tokens"
            )
        return tokens

    def _shape(
        self, cap: int, leaving: int, prompt_tokens: int, lanes: LaneShape, pieces: int
    ) -> Shape:
        assert self.policy is not None, "asked for rules that evict"
        return Shape(
            cap=cap,
            leaving=leaving,
            num_layers=lanes.num_layers,
            heads=lanes.heads,
            prompt_tokens=prompt_tokens,
            least=self.policy.least_retained(pieces) + leaving,
            piece_tokens=pieces,
        )

    def every_under(self, cap: int) -> int:
        """Tokens that leave at a time under a cap of so many tokens."""
        return default_every(cap) if self.every is None else self.every

    def leaving_under(self, cap: int) -> int:
        """Tokens by which a lane is under such a cap after an eviction."""
        return 0 if self.when == PREFILL_END else self.every_under(cap)

    @property
    def most_every(self) -> int:
        """Most tokens that leave at a time in any request."""
        if self.every is None and self.cap is not None and self.cap.tokens is not None:
            return default_every(self.cap.tokens)
        return MOST_DEFAULT_EVERY if self.every is None else self.every

    def finalize(self, eviction: Eviction, view: KVView, lanes: LaneShape) -> Eviction:
        """Divide the cap of a request whose whole prompt is in the cache.

        Raises:
            PolicyError: the rule broke its contract.
        """
        if not self.budget.needs_prompt or eviction.spec.cap is None:
            return eviction
        assert isinstance(self.policy, ScorePolicy), "checked when the rule was made"
        spec, pieces = eviction.spec, eviction.piece_tokens
        shape = self._shape(eviction.spec.cap, spec.leaving, view.prompt_tokens, lanes, pieces)
        caps = self.budget.finalize(view, self.policy, shape)
        return replace(eviction, spec=replace(eviction.spec, lane_caps=caps))


def make_eviction(text: str) -> EvictionRule:
    """Read what `--evict` says.

    Raises:
        UnknownName: the policy, the budget, the schedule or an option is not known; offers the
            nearest names.
        ConfigError: a missing cap, a value of the wrong type, a cap below what the rule protects.
        UnsoundCombination: parts that exclude each other; says why and what to use instead.
    """
    parsed = parse_policy(text)
    if parsed.name == FULL:
        if parsed.options:
            raise ConfigError(f"'full' keeps everything and has no options, got {text!r}")
        return EvictionRule()
    options = dict(parsed.options)
    own = {k: v for k, v in options.items() if k not in SCHEDULE_OPTIONS}
    policy = policy_of(parsed.name, own)
    if "cap" not in options:
        raise ConfigError(f"policy {text!r} needs a cap, such as cap=512, cap=25% or cap=2MiB")
    when = options.get("when", PREFILL_AND_DECODE)
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
    refuse_unsound(text, Parts(policy, rule.budget, rule.when))
    if policy.needs_pieces and granularity == TOKEN:
        raise UnsoundCombination(
            f"{text!r}: {parsed.name} knows pages or chunks and no single tokens; use "
            "granularity=page"
        )
    if rule.cap is not None and rule.cap.tokens is not None:
        leaving = rule.leaving_under(rule.cap.tokens)
        added = policy.added_tokens(rule.cap.tokens - leaving)
        _check_cap(rule, rule.cap.tokens + added, leaving)
    return rule


def _check_leaving(rule: EvictionRule, cap: int, leaving: int) -> None:
    if leaving >= cap:
        raise ConfigError(
            f"{rule.text!r}: expected 1 <= every < cap, got every={leaving}, cap={cap}; `every` "
            "tokens leave a lane at a time and some must stay: raise cap or say a smaller every="
        )


def _check_cap(rule: EvictionRule, cap: int, leaving: int) -> None:
    _check_leaving(rule, cap, leaving)
    policy = rule.policy
    if policy is not None and cap - leaving < policy.least_cap:
        raise ConfigError(
            f"{rule.text!r} leaves {cap - leaving} tokens after an eviction (cap {cap}, "
            f"{leaving} leave), but the rule needs {policy.least_cap}; {policy.more_room}"
        )


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
