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

Proposals are copies of what followed the last tokens earlier in the prompt and the output (`ngram`,
prompt lookup, Saxena 2023), what followed most often there and in earlier outputs (`suffix`,
SuffixDecoding, Oliaro et al. 2024, arXiv 2411.04975), or the greedy tokens of a smaller model
(`draft`). How many are verified follows from the request's acceptance so far and from the measured
time of a step by its number of tokens: see `DraftLengths`.

    ngram:tokens=8,min=2,max=4     at most 8 tokens after the same 2 to 4 last tokens
    suffix:tokens=16,depth=24      at most 16 tokens that followed the last 24 tokens or fewer
    draft:model=NAME,tokens=5      5 tokens of another model with the same vocabulary
    off                            no proposals
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol, runtime_checkable

from quire.errors import ConfigError, UnknownName
from quire.layout.eviction import parse_policy

OFF, NGRAM, SUFFIX, DRAFT = "off", "ngram", "suffix", "draft"
RULES = (NGRAM, SUFFIX, DRAFT, OFF)
MAX_DRAFT_TOKENS = 64
# attributes of `SpeculativeSpec` by the options of a rule
_OPTIONS: Mapping[str, Mapping[str, str]] = {
    NGRAM: {"tokens": "tokens", "min": "min_match", "max": "max_match"},
    SUFFIX: {
        "tokens": "tokens",
        "depth": "max_match",
        "factor": "factor",
        "min_probability": "min_probability",
        "outputs": "outputs",
    },
    DRAFT: {"model": "model", "tokens": "tokens"},
}
_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    NGRAM: {},
    SUFFIX: {"tokens": 16, "max_match": 24},
    DRAFT: {"tokens": 5},
}
_VLLM_METHODS = {"ngram": NGRAM, "suffix": SUFFIX, "draft_model": DRAFT}
_VLLM_NAMES: Mapping[str, Mapping[str, str]] = {
    NGRAM: {"prompt_lookup_min": "min", "prompt_lookup_max": "max"},
    SUFFIX: {
        "suffix_decoding_max_tree_depth": "depth",
        "suffix_decoding_max_spec_factor": "factor",
        "suffix_decoding_min_token_prob": "min_probability",
        "suffix_decoding_max_cached_requests": "outputs",
    },
    DRAFT: {"model": "model"},
}
_MEMORY = 0.9  # weight of what was learned before a step
_PROBE = 16  # at most one in this number of proposals is verified although it does not pay
_LAST_PROBE = 64  # proposals: a slow step must not end the probes
_PROBE_COST = 0.005  # of the time of steps without proposals: most that steps with them add
_INDEXED = 65_536  # newest tokens of a text, and tokens of outputs, whose places are known
_PLACES = 32  # most places of a text that are compared with its end
_LENGTHS = 4  # lengths of equal tokens that are tried, the longest first


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeSpec:
    """A rule of proposals.

    Attributes:
        text: as written.
        rule: `ngram`, `suffix` or `draft`.
        tokens: most proposed tokens of a step.
        min_match, max_match: numbers of last tokens that must have occurred before. With `ngram`
            the longest such occurrence, and of these the newest, is continued.
        factor: most proposed tokens for each of the last tokens that occurred before (`suffix`).
        min_probability: proposals end before a token whose estimated probability is less, from 0 to
            1 (`suffix`).
        outputs: finished outputs that are kept; a request is proposed those of its own tenant and
            `cache_salt` (`suffix`).
        model: name or folder of the draft model (`draft`).
    """

    text: str
    rule: str = NGRAM
    tokens: int = 8
    min_match: int = 2
    max_match: int = 4
    factor: float = 1.0
    min_probability: float = 0.1
    outputs: int = 200
    model: str = ""

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
        if self.rule == SUFFIX and self.max_match < 2:
            raise ConfigError(f"{self.text!r}: expected depth of 2 or more, got {self.max_match}")
        if not 0 < self.factor <= MAX_DRAFT_TOKENS:
            raise ConfigError(
                f"{self.text!r}: expected factor above 0 and up to {MAX_DRAFT_TOKENS}, got "
                f"{self.factor}"
            )
        if not 0 <= self.min_probability <= 1:
            raise ConfigError(
                f"{self.text!r}: expected min_probability from 0 to 1, got {self.min_probability}"
            )
        if self.outputs < 0:
            raise ConfigError(f"{self.text!r}: expected outputs of 0 or more, got {self.outputs}")
        if self.rule == DRAFT and not self.model:
            raise ConfigError(f"{self.text!r}: expected model=NAME, the draft model")


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
    return _spec(text, parsed.name, parsed.options)


def _of_json(text: str) -> SpeculativeSpec:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"expected JSON of speculative decoding, got {text!r}: {error}") from None
    method = found.pop("method", None)
    if method not in _VLLM_METHODS:
        known = ", ".join(f'"{name}"' for name in _VLLM_METHODS)
        raise ConfigError(f'{text!r}: expected "method" as one of {known}, got {method!r}')
    rule = _VLLM_METHODS[method]
    names = {"num_speculative_tokens": "tokens", **_VLLM_NAMES[rule]}
    unknown = [name for name in found if name not in names]
    if unknown:
        raise UnknownName("option of speculative decoding", unknown[0], tuple(names))
    return _spec(text, rule, {names[name]: value for name, value in found.items()})


def _spec(text: str, rule: str, options: Mapping[str, object]) -> SpeculativeSpec:
    names, plain = _OPTIONS[rule], SpeculativeSpec(text=text)
    values: dict[str, object] = dict(_DEFAULTS[rule])
    for name, value in options.items():
        if name not in names:
            raise UnknownName(f"option of {rule}", name, tuple(names))
        kind = type(getattr(plain, names[name]))
        try:
            values[names[name]] = kind(str(value))
        except ValueError:
            wanted = "a number" if kind is float else "a whole number"
            raise ConfigError(f"expected {name} as {wanted}, got {text!r}") from None
    if rule == NGRAM and "max_match" not in values:
        values["max_match"] = max(plain.max_match, int(str(values.get("min_match", 0))))
    elif "min_match" not in values:
        values["min_match"] = min(plain.min_match, int(str(values.get("max_match", 2))))
    return replace(plain, rule=rule, **values)  # type: ignore[arg-type]


# ---- proposals -----------------------------------------------------------------------------------


@runtime_checkable  # for the shape checks in tests
class Proposer(Protocol):
    """Proposes the next tokens of one request's text."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the text so far."""

    def propose(self, new_tokens: Sequence[int], count: int) -> list[int]:
        """Add tokens to the text; return tokens that may follow it.

        Args:
            new_tokens: the text after the tokens that were added before.
            count: most tokens to return.
        """


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
        """Return the tokens that followed the last ones before; see `Proposer`."""
        tokens, ends = self._tokens, self._ends
        first = len(tokens) + len(new_tokens) - _INDEXED
        for token in new_tokens:
            end = len(tokens)
            for size in self._sizes if end >= first else ():
                if size <= end:
                    ends[tuple(tokens[end - size :])] = end
            tokens.append(token)
        for size in self._sizes:
            found = ends.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if found is not None:
                # a text that repeats itself is continued beyond its end
                ahead = tokens[found : found + count]
                while len(ahead) < count:
                    ahead = ahead + ahead
                return ahead[:count]
        return []

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)


Place = tuple[Sequence[int], int]  # a text, and the number of its tokens before the place
Pair = tuple[int, int]


class EarlierOutputs:
    """Places in the outputs of finished requests, by the two tokens before them.

    Args:
        max_outputs: outputs that are kept, of all owners; of these at least the newer half.
    """

    def __init__(self, max_outputs: int) -> None:
        self._half = -(-max_outputs // 2)
        self._newer: dict[object, dict[Pair, list[Place]]] = {}
        self._older: dict[object, dict[Pair, list[Place]]] = {}
        self._outputs = self._tokens = 0  # of the newer ones

    def add(self, owner: object, tokens: Sequence[int]) -> None:
        """Keep an output for later requests of the same owner."""
        if not self._half or len(tokens) <= 2:  # nothing follows a pair
            return
        if self._outputs == self._half or self._tokens >= _INDEXED:
            self._older, self._newer, self._outputs, self._tokens = self._newer, {}, 0, 0
        text, places = list(tokens[-_INDEXED:]), self._newer.setdefault(owner, {})
        self._outputs, self._tokens = self._outputs + 1, self._tokens + len(text)
        for end, pair in enumerate(pairwise(text[:-1]), 2):
            of_pair = places.setdefault(pair, [])
            of_pair.append((text, end))
            del of_pair[:-_PLACES]

    def places(self, owner: object, pair: Pair) -> Iterator[Place]:
        """Yield the places after two tokens, the newest first."""
        for of_owner in (self._newer.get(owner, {}), self._older.get(owner, {})):
            yield from reversed(of_owner.get(pair, ()))


class SuffixLookup:
    """What followed the last tokens of a text most often, in it and in earlier outputs.

    For each number of last tokens that occurred before, the tokens that followed are continued by
    the most frequent one; its frequency is its probability. The number whose proposal has the
    highest sum of the probabilities of its tokens, which is the expected number of right ones, is
    chosen (SuffixDecoding, section 4).

    Differs from the paper: occurrences are compared in place of a suffix tree, of which the newest
    32 and the longest 4 numbers of equal tokens are read; proposals are one sequence, not a tree.

    Args:
        spec: the rule.
        earlier: outputs of earlier requests.
        owner: whose outputs may be proposed.
    """

    def __init__(self, spec: SpeculativeSpec, earlier: EarlierOutputs, owner: object) -> None:
        self._spec, self._earlier, self._owner = spec, earlier, owner
        self._tokens: list[int] = []
        self._ends: dict[Pair, list[int]] = {}

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def propose(self, new_tokens: Sequence[int], count: int) -> list[int]:
        tokens = self._tokens
        first = max(2, len(tokens) + len(new_tokens) - _INDEXED)
        for token in new_tokens:
            if len(tokens) >= first:
                ends = self._ends.setdefault((tokens[-2], tokens[-1]), [])
                ends.append(len(tokens))
                del ends[:-_PLACES]
            tokens.append(token)
        by_length: dict[int, list[Place]] = {}
        for place in self._places():
            by_length.setdefault(self._equal(place), []).append(place)
        best, best_score, places = list[int](), 0.0, list[Place]()
        for length in sorted(by_length, reverse=True)[:_LENGTHS]:
            places += by_length[length]
            ahead, score = self._most_frequent(
                places, min(count, max(1, int(self._spec.factor * length)))
            )
            if score > best_score:
                best, best_score = ahead, score
        return best

    def _places(self) -> list[Place]:
        if len(self._tokens) < 2:
            return []
        pair = self._tokens[-2], self._tokens[-1]
        own = [(self._tokens, end) for end in reversed(self._ends.get(pair, ()))]
        return (own + list(self._earlier.places(self._owner, pair)))[:_PLACES]

    def _equal(self, place: Place) -> int:
        """Number of tokens before a place that equal the last tokens of the text."""
        (text, end), tokens = place, self._tokens
        most = min(self._spec.max_match, end, len(tokens))
        equal = 2
        while equal < most and text[end - equal - 1] == tokens[-equal - 1]:
            equal += 1
        return equal

    def _most_frequent(self, places: Iterable[Place], count: int) -> tuple[list[int], float]:
        """Return the most frequent continuation, and the sum of its tokens' probabilities."""
        left, ahead, probability, score = list(places), list[int](), 1.0, 0.0
        while len(ahead) < count:
            following = [
                (text[end + len(ahead)], (text, end))
                for text, end in left
                if end + len(ahead) < len(text)
            ]
            if not following:
                break
            token, times = Counter(token for token, _ in following).most_common(1)[0]
            probability *= times / len(left)
            if probability < self._spec.min_probability:
                break
            score += probability
            ahead.append(token)
            left = [place for found, place in following if found == token]
        return ahead, score


class DraftModelTokens:
    """Places for the tokens of a draft model, which the runner computes before it verifies them."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def propose(self, new_tokens: Sequence[int], count: int) -> list[int]:
        self.num_tokens += len(new_tokens)
        return [0] * count


@dataclass(slots=True, kw_only=True)
class Drafts:
    """The proposals of one request.

    Attributes:
        spec: its rule.
        proposer: proposes tokens of its text.
        token_ids: proposed tokens that the step being planned or computed verifies.
        num_accepted: those of them that were sampled.
        proposed, accepted: all of earlier steps.
    """

    spec: SpeculativeSpec
    proposer: Proposer
    token_ids: list[int] = field(default_factory=list)
    num_accepted: int = 0
    proposed: int = 0
    accepted: int = 0
    # successes and trials of single tokens, the older ones with less weight
    _right: float = 1.0
    _tried: float = 1.5
    _unused: int = 0

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
        self.withdraw()
        return count, right

    def withdraw(self) -> None:
        """Forget the proposals of a step that is not computed, or has failed."""
        self.token_ids, self.num_accepted = [], 0

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


class Proposals:
    """Makes the proposers of requests, which may share earlier outputs.

    Args:
        spec: the rule of the engine.
    """

    def __init__(self, spec: SpeculativeSpec) -> None:
        self._spec = spec
        self._earlier = EarlierOutputs(spec.outputs if spec.rule == SUFFIX else 0)

    def begin(self, spec: SpeculativeSpec, owner: object) -> Drafts:
        """Return the proposals of a new request."""
        proposer: Proposer
        if spec.rule == SUFFIX:
            proposer = SuffixLookup(spec, self._earlier, owner)
        elif spec.rule == DRAFT:
            proposer = DraftModelTokens()
        else:
            proposer = Lookup(spec.min_match, spec.max_match)
        return Drafts(spec=spec, proposer=proposer)

    def end(self, owner: object, output_token_ids: Sequence[int]) -> None:
        """Keep the output of a finished request for later proposals."""
        self._earlier.add(owner, output_token_ids)


class _Line:
    """Seconds of steps by a number of tokens: base + token * tokens, by least squares."""

    def __init__(self) -> None:
        # weighted sums of 1, tokens, seconds, tokens * tokens, tokens * seconds
        self._sums = [0.0] * 5

    @property
    def is_known(self) -> bool:
        return self._sums[0] >= 2

    def add(self, tokens: int, seconds: float) -> None:
        new = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        self._sums = [0.98 * old + value for old, value in zip(self._sums, new, strict=True)]

    @property
    def token_s(self) -> float | None:
        """Time of a token; None while all steps had equally many."""
        count, x, y, xx, xy = self._sums
        spread = count * xx - x * x
        if count < 2 or spread <= 1e-6 * xx * count:
            return None
        return max(0.0, (count * xy - x * y) / spread)

    def at(self, tokens: int, token_s: float) -> float:
        """Seconds of a step; `token_s` is the time of a token if it is not known."""
        count, x, y, *_ = self._sums
        known = self.token_s
        if not count:
            return 1.0
        return max(1e-9, y / count + (token_s if known is None else known) * (tokens - x / count))


class DraftLengths:
    """Chooses how many proposed tokens of each row a step verifies.

    A step takes base + token * tokens seconds, by least squares over steps without prompts. With
    an acceptance rate r, the n-th proposed token adds r^n tokens to the output. It is verified if
    that is more than its time is worth at the rate of the step:

        r^n / token >= output tokens of the step / its seconds

    A step with proposed tokens also takes longer because its rows are unequal. So none are verified
    if the step has less output in its time, by the steps with proposals, than one without. Then one
    step in 16 verifies one token of each request, or down to one in 64 if they would add more than
    0.5 % of the time, so that the estimates can recover.
    """

    def __init__(self) -> None:
        self._plain, self._drafted = _Line(), _Line()
        self._without = 0

    def learn(self, rows: int, tokens: int, seconds: float) -> None:
        """Add the time of a step without prompts, which computes `tokens` tokens of `rows` rows."""
        (self._plain if tokens == rows else self._drafted).add(tokens, seconds)

    def seconds(self) -> tuple[float, float]:
        """Base and time of a token, by steps with proposals if there were any."""
        line = self._drafted if self._drafted.is_known else self._plain
        token_s = line.token_s or 0.0
        return line.at(0, token_s), token_s

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
        if any(lengths) and self._pays(rows, sum(lengths), output):
            return [
                length or int(one.is_probe())
                for length, (one, _) in zip(lengths, proposed, strict=True)
            ]
        self._without += 1
        every = float(_PROBE)
        if self._plain.is_known and self._drafted.is_known:
            plain_s, drafted_s = self._step_seconds(rows, len(proposed))
            every = min(max(every, (drafted_s / plain_s - 1) / _PROBE_COST), _LAST_PROBE)
        is_due = self._without >= every
        self._without *= not is_due
        return [int(is_due)] * len(proposed)  # all requests are tried in one step

    def _pays(self, rows: int, tokens: int, output: float) -> bool:
        if not (self._plain.is_known and self._drafted.is_known):
            return True
        plain_s, drafted_s = self._step_seconds(rows, tokens)
        return output * plain_s >= rows * drafted_s

    def _step_seconds(self, rows: int, tokens: int) -> tuple[float, float]:
        """Seconds of a step without proposed tokens, and of one with them."""
        _, token_s = self.seconds()
        return self._plain.at(rows, token_s), self._drafted.at(rows + tokens, token_s)
