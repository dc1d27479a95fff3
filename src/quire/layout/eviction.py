"""The syntax of eviction policies, and the schedules on which they evict.

A policy is `name:option=value,option=value`; parentheses nest. The same text works on the command
line, in TOML, in a request body and in Python:

    full                                          no eviction
    recent:cap=512,every=64,sinks=4               at most 512 tokens per lane, evict 64 at a time
    h2o:cap=25%,when=prefill_end,recent=64        25% of the prompt, evict once after prefill
    snapkv:cap=2MiB,budget=(pyramid:beta=20)      bytes per sequence, more for the first layers

`cap`, `every`, `when`, `budget` and `granularity` set how many tokens are retained and when the
rule runs. All other options belong to the rule. Default of `every`: `default_every(cap)`, an eighth
of the cap, at most 64.

when                  prefill                                 decode
prefill_and_decode    a first chunk up to the cap; then       evict `every` tokens before a lane
                      chunks of `every` tokens, each after    would exceed the cap
                      an eviction of `every` tokens
prefill_end           whole prompt, layer by layer, each      no eviction
                      layer then evicts to the cap
decode                whole prompt                            evict to cap - every, as above
pressure              as prefill_and_decode, but only while pool use is above its watermark

Source: Batch-Max (Metel et al. 2025), Algorithm 1 for prefill_and_decode.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from quire.errors import ConfigError, UnknownName
from quire.layout.statistics import AttentionMax, ScoringPass, Statistic

MAX_DEFAULT_EVERY = 64
OF_CAP = -1
"""Value of `EvictionSpec.every` that selects `default_every(cap)`."""

MAX_CHARACTERS = 1000  # bounds untrusted texts in requests
_SUCH_AS = {
    "policy": "recent:cap=512,sinks=4",
    "budget": "pyramid:beta=20",
    "codec": "int4:group=32",
    "press": "SnapKVPress:window_size=16",
    "sparse attention": "quest:budget=10%",
    "speculative decoding": "ngram:tokens=8",
}


def default_every(cap: int) -> int:
    """Return the default of `every` (tokens evicted at a time) for a cap."""
    return max(1, min(MAX_DEFAULT_EVERY, cap // 8))


@dataclass(frozen=True, slots=True)
class PolicyText:
    """A parsed policy: name, and options with unparsed values."""

    name: str
    options: Mapping[str, str]


def parse_policy(text: str, what: str = "policy") -> PolicyText:
    """Split a policy text into its name and options.

    Args:
        text: the policy text.
        what: what the text describes, for messages; one of `_SUCH_AS`.

    Raises:
        ConfigError: the name is missing, an option has no value or is repeated, parentheses do
            not match, or the text is longer than `MAX_CHARACTERS` (it could nest too deeply).
    """
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(
            f"expected a {what} of at most {MAX_CHARACTERS} characters, got {len(text)}"
        )
    name, _, rest = text.strip().partition(":")
    if not name.isidentifier():
        raise ConfigError(f"expected a {what} such as {_SUCH_AS[what]!r}, got {text!r}")
    options: dict[str, str] = {}
    for part in _split_outside_parentheses(rest) if rest else ():
        key, equals, value = part.partition("=")
        key, value = key.strip(), value.strip()
        if not equals or not key or not value:
            raise ConfigError(f"expected option=value in {what} {text!r}, got {part!r}")
        if key in options:
            raise ConfigError(f"option {key!r} is repeated in {what} {text!r}")
        options[key] = value
    return PolicyText(name, options)


def _split_outside_parentheses(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth < 0:
            break
        if character == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    if depth:
        raise ConfigError(f"parentheses do not match in policy options {text!r}")
    return [*parts, text[start:]]


PREFILL_AND_DECODE, PREFILL_END, DECODE, PRESSURE = (
    "prefill_and_decode",
    "prefill_end",
    "decode",
    "pressure",
)
UNLIMITED = 1 << 62
AUTO = "auto"
"""The rule that Quire recommends, with the cap and the schedule of the text."""
SCHEDULE_OPTIONS = ("cap", "every", "when", "budget", "granularity", "chunk_tokens")
"""Options of every rule."""
SCHEDULES = (PREFILL_AND_DECODE, PREFILL_END, DECODE, PRESSURE)


def scoring_of(statistics: Iterable[Statistic]) -> ScoringPass | None:
    """Return the scoring pass that statistics need; None without one."""
    return next((one.scoring for one in statistics if one.scoring is not None), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionSpec:
    """The parameters of one request's eviction that memory planning and scheduling need.

    Attributes:
        cap: maximum tokens of a lane, averaged over lanes; None for no eviction.
        every: number of tokens evicted at a time (p in Batch-Max); default: `default_every(cap)`.
        when: one of SCHEDULES.
        lane_capacities: cap of each lane (layer-major, then KV head) if a budget splits the total
            unequally and the split is known before prefill; None: `cap` for every lane.
        ragged: whether a budget may move slots between the heads of a layer during generation.
        divided: whether a budget divides the cap over the lanes again at evictions, as the prompt
            is computed; `lane_capacities` is then the last division, whose mean is at most `cap`.
        from_prompt: whether a budget divides the cap over lanes by the cache of the whole prompt.
        statistics: attention statistics that the policy uses.
    """

    cap: int | None = None
    every: int = OF_CAP
    when: str = PREFILL_AND_DECODE
    lane_capacities: tuple[int, ...] | None = None
    ragged: bool = False
    divided: bool = False
    from_prompt: bool = False
    statistics: tuple[Statistic, ...] = ()

    def __post_init__(self) -> None:
        if self.when not in SCHEDULES:
            raise UnknownName("eviction schedule", self.when, SCHEDULES)
        if self.every == OF_CAP:
            every = MAX_DEFAULT_EVERY if self.cap is None else default_every(self.cap)
            object.__setattr__(self, "every", every)
        if self.cap is None:
            return
        if self.when != PREFILL_END and not 1 <= self.every < self.min_cap:
            raise ConfigError(
                f"expected 1 <= every < cap, got every={self.every}, cap={self.min_cap}; "
                "`every` tokens are evicted from a lane at a time and some must remain"
            )

    @property
    def min_cap(self) -> int:
        """Cap of the smallest lane; 0 without eviction."""
        return min(self.lane_capacities, default=0) if self.lane_capacities else self.cap or 0

    @property
    def leaving(self) -> int:
        """Number of tokens by which a lane is below its cap after an eviction."""
        return 0 if self.when == PREFILL_END else self.every

    @property
    def evicts_during_prefill(self) -> bool:
        """Whether a prompt over the cap is prefilled in chunks with an eviction before each."""
        return self.cap is not None and self.when == PREFILL_AND_DECODE

    @property
    def cuts_by_layer(self) -> bool:
        """Whether the one eviction, after the prompt, can cut a layer before the next is computed.

        Not if the caps of all lanes are set by the cache of the whole prompt.
        """
        divides = self.ragged or self.divided or self.from_prompt
        return self.cap is not None and self.when == PREFILL_END and not divides

    @property
    def scoring(self) -> ScoringPass | None:
        """The pass after the prompt that its statistics need; None without one."""
        return scoring_of(self.statistics)

    def scoring_slots(self, prompt_tokens: int) -> int:
        """Further slots of each lane while the scoring pass of a prompt runs; 0 without one."""
        scoring = self.scoring
        if scoring is None or self.cap is None or prompt_tokens <= min(self.cap, self.min_cap):
            return 0
        return scoring.slots(prompt_tokens)

    def scoring_tokens(self, prompt_tokens: int) -> int:
        """Most tokens that the scoring pass of a prompt computes; 0 without one."""
        scoring = self.scoring if self.scoring_slots(prompt_tokens) else None
        return 0 if scoring is None else scoring.tokens(prompt_tokens)

    def with_chunk(self, scoring: ScoringPass) -> "EvictionSpec":
        """Return the specification with the chunks of another scoring pass of the same name."""
        own = (
            replace(s, of=scoring) if isinstance(s, AttentionMax) else s for s in self.statistics
        )
        return replace(self, statistics=tuple(own))

    def within_context(self, prompt_tokens: int, context_tokens: int) -> "EvictionSpec":
        """Return the specification with a scoring pass that the context has room for.

        Raises:
            ConfigError: it would have too many chunks; see `ScoringPass.within`.
        """
        scoring = self.scoring if self.scoring_slots(prompt_tokens) else None
        if scoring is None:
            return self
        return self.with_chunk(scoring.within(prompt_tokens, context_tokens))

    def exact_tokens(self, prompt_tokens: int) -> int:
        """Return the number of tokens a sequence can hold before the first eviction.

        With `when=pressure` this cannot be predicted; the result is UNLIMITED, and the sequence's
        own state shows whether it has evicted tokens.

        Args:
            prompt_tokens: tokens of the prompt.
        """
        if self.cap is None or self.when == PRESSURE:
            return UNLIMITED
        if self.when == PREFILL_AND_DECODE:
            return self.min_cap
        if self.when == DECODE:
            return max(prompt_tokens, self.min_cap)
        return UNLIMITED if prompt_tokens <= self.min_cap else prompt_tokens

    def keeps_all(self, prompt_tokens: int, tokens: int) -> bool:
        """Return whether a sequence that grows to `tokens` tokens never evicts a token.

        Args:
            prompt_tokens: tokens of the prompt.
            tokens: final length of the sequence.
        """
        if self.when == PRESSURE:
            return self.cap is None or tokens <= self.min_cap
        return tokens <= self.exact_tokens(prompt_tokens)

    def peak_tokens(self, tokens: int, prompt_tokens: int | None = None) -> int:
        """Return the peak tokens of a lane with cap `cap` while a sequence grows to `tokens`.

        Args:
            tokens: final length of the sequence.
            prompt_tokens: tokens of the prompt; None if all tokens are prompt tokens.
        """
        return self.lane_peak_tokens(self.cap, tokens, prompt_tokens)

    def lane_peak_tokens(self, cap: int | None, tokens: int, prompt_tokens: int | None) -> int:
        """Return the peak tokens of a lane with this cap; see `peak_tokens`."""
        if cap is None:
            return tokens
        prompt = tokens if prompt_tokens is None else min(prompt_tokens, tokens)
        if self.when in (PREFILL_AND_DECODE, PRESSURE):
            return min(tokens, cap)
        if self.when == DECODE:
            return max(prompt, min(tokens, cap))
        return max(prompt + self.scoring_slots(prompt), min(prompt, cap) + tokens - prompt)


KEEP_ALL = EvictionSpec()
"""No eviction."""


# A cap in tokens, as a fraction of the prompt, or in bytes; resolved to tokens at admission.

_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "B": 1}

MOST = 1 << 40
"""Largest cap in tokens or bytes; smaller numbers cannot overflow the integers that hold them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cap:
    """The cap of a policy; exactly one attribute is set.

    Attributes:
        tokens: tokens of a lane.
        share: fraction of the prompt's tokens (above 0, at most 1).
        num_bytes: bytes of a sequence in the layers with eviction, in whole pages, with positions
            and the rule's statistics.
    """

    tokens: int | None = None
    share: float | None = None
    num_bytes: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Cap":
        """Parse `512`, `25%`, `0.25` or `2MiB`.

        Raises:
            ConfigError: the text has another form, or the number is out of range.
        """
        text = text.strip()
        unit = next((unit for unit in ("%", *_UNITS) if text.endswith(unit)), "")
        try:
            number = _number(text.removesuffix(unit), unit)
        except (ValueError, OverflowError):
            raise ConfigError(
                f"expected a cap such as 512 (tokens), 25% or 0.25 (of the prompt) or 2MiB, got "
                f"{text!r}"
            ) from None
        if isinstance(number, float):
            return cls._of_share(number, text)
        if not 1 <= number <= MOST:
            raise ConfigError(f"expected a cap from 1 to {MOST:,}, got {text}")
        return cls(num_bytes=number) if unit else cls(tokens=number)

    @classmethod
    def _of_share(cls, share: float, text: str) -> "Cap":
        if not 0 < share <= 1:
            raise ConfigError(
                f"expected a cap above 0 and up to 100% of the prompt, or whole tokens such as "
                f"512, got {text}"
            )
        return cls(share=share)

    def resolve(
        self, prompt_tokens: int, *, page_tokens: int, page_bytes: int, fixed_bytes: int
    ) -> int:
        """Return the cap in tokens of a lane; 0 if the bytes cannot hold one page of every lane.

        Args:
            prompt_tokens: tokens of the prompt.
            page_tokens: slots of a page.
            page_bytes: bytes of one page in every lane with eviction, with its per-slot statistics.
            fixed_bytes: bytes of statistics that do not depend on the length of the sequence.
        """
        if self.tokens is not None:
            return self.tokens
        if self.share is not None:
            return max(1, int(self.share * prompt_tokens))
        assert self.num_bytes is not None, "exactly one attribute is set"
        return max(0, self.num_bytes - fixed_bytes) // page_bytes * page_tokens


def _number(text: str, unit: str) -> int | float:
    """Parse tokens or bytes as an int, a fraction as a float."""
    if unit == "%":
        return float(text) / 100
    if unit:
        return int(float(text) * _UNITS[unit])
    return float(text) if "." in text else int(text)
