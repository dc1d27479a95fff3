"""Speculative decoding: proposed tokens that one step verifies together with the next token.

    tokens      a b c d e | x y z       x y z: proposed; e is the newest token of the output
    one step    computes e x y z        the logits after e, x, y and z
    sampled     x y w                   each as without proposals: x and y were right, z was not
    next step   begins with w           the KV of z is dropped

A token is sampled from each row's logits as it would be without proposals, with the same random
number, and as long as it equals the proposed one, the next row's logits are those after the output.
So outputs are the same as without, for any sampling options. For a proposal that is one token, that
is the rejection sampling of Leviathan et al. 2023 (arXiv 2211.17192): it is accepted with the
probability that the model gives it, and what is sampled otherwise has the distribution of the rest.

Proposals are copies of what followed the last tokens earlier in the prompt and the output (prompt
lookup, Saxena 2023). How many are verified follows from the request's acceptance so far and from
the measured time of a step by its number of tokens: see `DraftLengths`.

    ngram:tokens=8,min=2,max=4     at most 8 tokens after the same 2 to 4 last tokens
    off                            no proposals
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quire.errors import ConfigError, UnknownName
from quire.layout.eviction import parse_policy

OFF, NGRAM = "off", "ngram"
RULES = (NGRAM, OFF)
MAX_DRAFT_TOKENS = 64
_VLLM_NAMES = {
    "num_speculative_tokens": "tokens",
    "prompt_lookup_min": "min",
    "prompt_lookup_max": "max",
}
_MEMORY = 0.9  # weight of what was learned before a step
_PROBE = 16  # one in this number of proposals is verified although it does not pay


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeSpec:
    """A rule of proposals.

    Attributes:
        text: as written.
        tokens: most proposed tokens of a step.
        min_match, max_match: numbers of last tokens that must have occurred before; the longest
            such occurrence, and of these the newest, is continued.
    """

    text: str
    tokens: int = 8
    min_match: int = 2
    max_match: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.tokens <= MAX_DRAFT_TOKENS:
            raise ConfigError(
                f"{self.text!r}: expected tokens from 1 to {MAX_DRAFT_TOKENS}, got {self.tokens}"
            )
        if not 1 <= self.min_match <= self.max_match:
            raise ConfigError(
                f"{self.text!r}: expected 1 <= min <= max, got min={self.min_match} and "
                f"max={self.max_match}"
            )


def parse_speculative(text: str) -> SpeculativeSpec | None:
    """Parse a rule of proposals, or vLLM's JSON of one; None for `off`.

    Raises:
        UnknownName: an unknown rule or option.
        ConfigError: a value is invalid.
    """
    if text.lstrip().startswith("{"):
        return _of_json(text)
    parsed = parse_policy(text, "speculative decoding")
    if parsed.name not in RULES:
        raise UnknownName("speculative decoding", parsed.name, RULES)
    if parsed.name == OFF:
        if parsed.options:
            raise ConfigError(f"expected off without options, got {text!r}")
        return None
    return _spec(text, parsed.options)


def _of_json(text: str) -> SpeculativeSpec:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"expected JSON of speculative decoding, got {text!r}: {error}") from None
    method = found.pop("method", None)
    if method != NGRAM:
        raise ConfigError(f'{text!r}: expected "method": "ngram", got {method!r}')
    unknown = [name for name in found if name not in _VLLM_NAMES]
    if unknown:
        raise UnknownName("option of speculative decoding", unknown[0], tuple(_VLLM_NAMES))
    return _spec(text, {_VLLM_NAMES[name]: value for name, value in found.items()})


def _spec(text: str, options: Mapping[str, object]) -> SpeculativeSpec:
    names = {"tokens": "tokens", "min": "min_match", "max": "max_match"}
    for name in options:
        if name not in names:
            raise UnknownName("option of ngram", name, tuple(names))
    try:
        numbers = {names[name]: int(str(value)) for name, value in options.items()}
    except ValueError:
        raise ConfigError(f"expected whole numbers of {', '.join(names)}, got {text!r}") from None
    if "max_match" not in numbers:
        numbers["max_match"] = max(4, numbers.get("min_match", 0))
    elif "min_match" not in numbers:
        numbers["min_match"] = min(2, numbers["max_match"])
    return SpeculativeSpec(text=text, **numbers)


class Lookup:
    """The earlier occurrences of the last tokens of a text.

    Args:
        min_match, max_match: numbers of last tokens; see `SpeculativeSpec`.
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        self._sizes = range(max_match, min_match - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}  # of the newest occurrence before the last
        self._tokens: list[int] = []

    def propose(self, new_tokens: Sequence[int], count: int) -> list[int]:
        """Add tokens to the text; return the tokens that followed its last ones before.

        Args:
            new_tokens: the text after the tokens that were added before.
            count: most tokens to return.
        """
        tokens, ends = self._tokens, self._ends
        for token in new_tokens:
            end = len(tokens)
            for size in self._sizes:
                if size <= end:
                    ends[tuple(tokens[end - size :])] = end
            tokens.append(token)
        for size in self._sizes:
            found = ends.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if found is not None:
                # a text that repeats itself is continued beyond its end
                ahead = tokens[found:]
                while len(ahead) < count:
                    ahead = ahead + ahead
                return ahead[:count]
        return []

    @property
    def num_tokens(self) -> int:
        """Tokens of the text so far."""
        return len(self._tokens)


@dataclass(slots=True, kw_only=True)
class Drafts:
    """The proposals of one request.

    Attributes:
        spec: its rule.
        lookup: its text so far.
        token_ids: proposed tokens that the step being planned or computed verifies.
        num_accepted: those of them that were sampled.
        proposed, accepted: all of earlier steps.
    """

    spec: SpeculativeSpec
    lookup: Lookup
    token_ids: list[int] = field(default_factory=list)
    num_accepted: int = 0
    proposed: int = 0
    accepted: int = 0
    # successes and trials of single tokens, the older ones with less weight
    _right: float = 1.0
    _tried: float = 1.5
    _unused: int = 0

    @classmethod
    def of(cls, spec: SpeculativeSpec) -> "Drafts":
        return cls(spec=spec, lookup=Lookup(spec.min_match, spec.max_match))

    @property
    def rate(self) -> float:
        """Estimated probability that a proposed token is right if those before it are."""
        return self._right / self._tried

    @property
    def num_proposed(self) -> int:
        """Tokens proposed so far, in the current step too."""
        return self.proposed + len(self.token_ids)

    def settle(self) -> tuple[int, int]:
        """Learn from a verified step; return its proposed and its accepted tokens."""
        count, right = len(self.token_ids), self.num_accepted
        self._right = _MEMORY * self._right + right
        self._tried = _MEMORY * self._tried + right + (right < count)
        self.proposed, self.accepted = self.proposed + count, self.accepted + right
        self.token_ids, self.num_accepted = [], 0
        return count, right

    def is_probe(self) -> bool:
        """Whether a proposal is verified although none pays by the estimate."""
        self._unused += 1
        return self._unused % _PROBE == 0


@dataclass(slots=True)
class DraftCounts:
    """Counters of speculative decoding since the engine's start.

    Attributes:
        count: proposals that a step has verified.
        tokens: their tokens.
        accepted: those of them that were sampled.
    """

    count: int = 0
    tokens: int = 0
    accepted: int = 0

    def add(self, tokens: int, accepted: int) -> None:
        """Count a proposal."""
        self.count, self.tokens = self.count + 1, self.tokens + tokens
        self.accepted += accepted


class DraftLengths:
    """Chooses how many proposed tokens of each row a step verifies.

    A step takes base + token * tokens seconds, by least squares over steps without prompts. With
    an acceptance rate r, the n-th proposed token adds r^n tokens to the output. It is verified if
    that is more than its time is worth at the rate of the step:

        r^n / token >= output tokens of the step / its seconds
    """

    def __init__(self) -> None:
        # weighted sums of 1, tokens, seconds, tokens * tokens, tokens * seconds
        self._sums = [0.0] * 5

    def learn(self, tokens: int, seconds: float) -> None:
        """Add the time of a step without prompts."""
        new = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        self._sums = [0.98 * old + value for old, value in zip(self._sums, new, strict=True)]

    def seconds(self) -> tuple[float, float]:
        """Base and time of a token; a token takes no time while all steps had equally many."""
        count, x, y, xx, xy = self._sums
        spread = count * xx - x * x
        if count < 2 or spread <= 1e-6 * xx * count:
            return (y / count if count else 1.0), 0.0
        token_s = max(0.0, (count * xy - x * y) / spread)
        return max(1e-9, (y - token_s * x) / count), token_s

    def choose(self, rows: int, proposed: Sequence[tuple[Drafts, int]]) -> list[int]:
        """Return the number of tokens to verify of each proposal.

        Args:
            rows: decoding rows of the step.
            proposed: requests with a proposal, and its tokens.
        """
        base_s, token_s = self.seconds()
        step_s, output = base_s + token_s * rows, float(rows)
        each = ((i, one.rate, n) for i, (one, most) in enumerate(proposed) for n in range(most))
        ahead = sorted(((rate ** (n + 1), i) for i, rate, n in each), reverse=True)
        lengths = [0] * len(proposed)
        for gain, i in ahead:
            if gain * step_s < output * token_s:
                break
            lengths[i] += 1
            step_s, output = step_s + token_s, output + gain
        return [
            length or int(one.is_probe())
            for length, (one, _) in zip(lengths, proposed, strict=True)
        ]
