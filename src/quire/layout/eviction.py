"""How an eviction policy is written, and when and to what it runs.

`name:option=value,option=value`, parentheses nest. The same text works on the command line, in
TOML, in a request body and in Python:

    full                                          keep everything
    recent:cap=512,every=64,sinks=4               at most 512 tokens a lane, 64 leave at a time
    h2o:cap=25%,when=prefill_end,recent=64        a quarter of the prompt, once, when it is read
    snapkv:cap=2MiB,budget=(pyramid:beta=20)      bytes of a sequence, more for the first layers

`cap`, `every`, `when`, `budget` and `granularity` say how much stays and when the rule runs; all
else belongs to the rule. `every` defaults to `default_every(cap)`: an eighth of the cap, 64 at
most.

when                  prompt                                  answer
prefill_and_decode    first block up to the cap, then `every` tokens leave before `every` are read
                                                              `every` leave before one is too many
prefill_end           read whole, then down to the cap        grows
decode                read whole                              down to cap - every, as above
pressure              as prefill_and_decode, but only while the pool is above its watermark

Source: Batch-Max (Metel et al. 2025), Algorithm 1 for prefill_and_decode.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from quire.errors import ConfigError, UnknownName
from quire.layout.statistics import Statistic

MOST_DEFAULT_EVERY = 64
OF_CAP = -1
"""`EvictionSpec.every` where it is `default_every(cap)`."""

MOST_CHARACTERS = 1000  # requests carry these texts
_SUCH_AS = {
    "policy": "recent:cap=512,sinks=4",
    "budget": "pyramid:beta=20",
    "codec": "int4:group=32",
}


def default_every(cap: int) -> int:
    """Tokens that leave at a time under a cap of so many tokens, unless `every` is set."""
    return max(1, min(MOST_DEFAULT_EVERY, cap // 8))


@dataclass(frozen=True, slots=True)
class PolicyText:
    """A parsed policy: a name and its options, values still text."""

    name: str
    options: Mapping[str, str]


def parse_policy(text: str, what: str = "policy") -> PolicyText:
    """Split a policy text into its name and options.

    Args:
        text: as it is written.
        what: it is a text of, for messages: a policy, a codec or a budget.

    Raises:
        ConfigError: no name, an option without a value or given twice, unbalanced parentheses, or
            a text so long that it may nest without end.
    """
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(
            f"a {what} is written in {MOST_CHARACTERS} characters at most, got {len(text)}"
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
            raise ConfigError(f"option {key!r} stands twice in {what} {text!r}")
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
SCHEDULES = (PREFILL_AND_DECODE, PREFILL_END, DECODE, PRESSURE)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionSpec:
    """What an eviction means to who plans memory and steps: numbers only, for one request.

    Attributes:
        cap: most tokens of a lane on average, everything counted; None keeps all (no eviction).
        every: tokens that leave at a time, p in the paper. Default: `default_every(cap)`.
        when: one of SCHEDULES.
        lane_caps: the cap of each lane (layer-major, then KV head) where a budget splits the total
            unequally and knows how before anything is read; None: `cap` for each.
        ragged: whether a budget may move slots between the heads of a layer while it runs.
        statistics: what the policy has remembered.
    """

    cap: int | None = None
    every: int = OF_CAP
    when: str = PREFILL_AND_DECODE
    lane_caps: tuple[int, ...] | None = None
    ragged: bool = False
    statistics: tuple[Statistic, ...] = ()

    def __post_init__(self) -> None:
        if self.when not in SCHEDULES:
            raise UnknownName("eviction schedule", self.when, SCHEDULES)
        if self.every == OF_CAP:
            every = MOST_DEFAULT_EVERY if self.cap is None else default_every(self.cap)
            object.__setattr__(self, "every", every)
        if self.cap is None:
            return
        if self.when != PREFILL_END and not 1 <= self.every < self.least_cap:
            raise ConfigError(
                f"expected 1 <= every < cap, got every={self.every}, cap={self.least_cap}; "
                "`every` tokens leave a lane at a time and some must stay"
            )

    @property
    def least_cap(self) -> int:
        """Cap of the smallest lane; 0 where there is none."""
        return min(self.lane_caps, default=0) if self.lane_caps else self.cap or 0

    @property
    def leaving(self) -> int:
        """Tokens by which a lane is under its cap after an eviction."""
        return 0 if self.when == PREFILL_END else self.every

    @property
    def prefills_in_blocks(self) -> bool:
        """Whether a prompt over the cap is read block by block, each behind an eviction."""
        return self.cap is not None and self.when == PREFILL_AND_DECODE

    def exact_tokens(self, prompt_tokens: int) -> int:
        """Tokens a sequence can hold before any of them leaves.

        Under pressure nobody knows: what has left is asked of the sequence itself.

        Args:
            prompt_tokens: of its prompt.
        """
        if self.cap is None or self.when == PRESSURE:
            return UNLIMITED
        if self.when == PREFILL_AND_DECODE:
            return self.least_cap
        if self.when == DECODE:
            return max(prompt_tokens, self.least_cap)
        return UNLIMITED if prompt_tokens <= self.least_cap else prompt_tokens

    def keeps_all(self, prompt_tokens: int, tokens: int) -> bool:
        """Whether a sequence that grows to `tokens` never loses any.

        Args:
            prompt_tokens: of its prompt.
            tokens: of the sequence at its end.
        """
        if self.when == PRESSURE:
            return self.cap is None or tokens <= self.least_cap
        return tokens <= self.exact_tokens(prompt_tokens)

    def peak_tokens(self, tokens: int, prompt_tokens: int | None = None) -> int:
        """Most tokens a lane of the common cap holds while a sequence grows to `tokens`.

        Args:
            tokens: of the sequence at its end.
            prompt_tokens: of which so many are its prompt; None: all.
        """
        return self.lane_peak_tokens(self.cap, tokens, prompt_tokens)

    def lane_peak_tokens(self, cap: int | None, tokens: int, prompt_tokens: int | None) -> int:
        """The same for a lane with a cap of its own."""
        if cap is None:
            return tokens
        prompt = tokens if prompt_tokens is None else min(prompt_tokens, tokens)
        if self.when in (PREFILL_AND_DECODE, PRESSURE):
            return min(tokens, cap)
        if self.when == DECODE:
            return max(prompt, min(tokens, cap))
        return max(prompt, min(prompt, cap) + tokens - prompt)


KEEP_ALL = EvictionSpec()
"""No eviction."""


# ---- cap -----------------------------------------------------------------------------------------

# A cap as a user writes it: tokens, a share of the prompt, or bytes; resolved at admission.

_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "B": 1}

MOST = 1 << 40
"""More tokens or bytes than any cap needs; a number below it fits wherever numbers are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cap:
    """One of three.

    Attributes:
        tokens: of a lane.
        share: of the prompt's tokens, above 0.
        num_bytes: of a whole sequence in the layers that evict, in whole pages, positions and
            what a rule remembers included.
    """

    tokens: int | None = None
    share: float | None = None
    num_bytes: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Cap":
        """Read `512`, `25%`, `0.25` or `2MiB`.

        Raises:
            ConfigError: neither.
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
        number = _positive(number, text)
        return cls(num_bytes=number) if unit else cls(tokens=number)

    @classmethod
    def _of_share(cls, share: float, text: str) -> "Cap":
        if not 0 < share <= 1:
            raise ConfigError(
                f"a cap of {text} is no part of the prompt: expected more than 0 and up to 100%, "
                "or whole tokens such as 512"
            )
        return cls(share=share)

    def resolve(
        self, prompt_tokens: int, *, page_tokens: int, page_bytes: int, fixed_bytes: int
    ) -> int:
        """Tokens of a lane; 0 where bytes hold not one page of every lane.

        Args:
            prompt_tokens: of the request.
            page_tokens: slots of a page.
            page_bytes: of one page in each lane that evicts, with those of what is remembered of
                its slots.
            fixed_bytes: of what is remembered of a sequence however long it is.
        """
        if self.tokens is not None:
            return self.tokens
        if self.share is not None:
            return max(1, int(self.share * prompt_tokens))
        assert self.num_bytes is not None, "a cap is one of three"
        return max(0, self.num_bytes - fixed_bytes) // page_bytes * page_tokens


def _number(text: str, unit: str) -> int | float:
    """Tokens or bytes, whole; a share as a float."""
    if unit == "%":
        return float(text) / 100
    if unit:
        return int(float(text) * _UNITS[unit])
    return float(text) if "." in text else int(text)


def _positive(number: int, text: str) -> int:
    if not 1 <= number <= MOST:
        raise ConfigError(f"expected a cap from 1 to {MOST:,}, got {text}")
    return number
