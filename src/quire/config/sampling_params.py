"""Sampling options and stop rules of one request.

Every option is checked in the constructor, before the request takes any memory. `None` means unset:
`resolve` fills it from the model's generation defaults.
"""

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, Literal, Protocol, TypeVar, cast, no_type_check, runtime_checkable

from quire.config.structured_outputs import StructuredOutputs, as_structured_outputs
from quire.errors import RequestError
from quire.layout.options import Parsed, option

MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-6, 1e6
"""Range of repetition penalties: logits divided or multiplied by them are finite in float32."""

MAX_PENALTY = 2.0
"""Maximum magnitude of presence and frequency penalties (OpenAI's range)."""

MAX_LOGIT_BIAS = 100.0
"""Maximum magnitude of a logit bias (OpenAI's range)."""

MAX_CHOICES = 128
"""Maximum number of sequences for one prompt, as in OpenAI's API."""

LARGEST_COUNT = 2**31 - 1
"""Maximum count and token id: sums and products of them fit in int64."""

MIN_NORMAL = 2.0**-126
"""The smallest normal float32. A sampler in float32 may treat smaller numbers as 0."""

LARGEST_NUMBER = (2 - 2.0**-23) * 2.0**127
"""The largest float32."""

MAX_LENGTH_PENALTY = 10.0
"""Maximum magnitude of a length penalty: a length to this power is a finite float64 above 0."""


def _refuse(name: str, expected: str, value: object) -> RequestError:
    return RequestError(f"{name} must be {expected}, got {value!r}", param=name)


def _integer(low: int, high: int = LARGEST_COUNT) -> Callable[[str, object], int]:
    span = f"an integer in [{low}, {high}]"

    def check(name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise _refuse(name, span, value)
        number = int(value)
        if not low <= number <= high:
            raise _refuse(name, span, value)
        return number

    return check


def _number(
    low: float, high: float = LARGEST_NUMBER, *, above_low: bool = False
) -> Callable[[str, object], float]:
    bracket = "(" if above_low else "["
    end = "inf)" if high == LARGEST_NUMBER else f"{high:g}]"
    span = f"a finite number in {bracket}{low:g}, {end}"
    normal = f"{span}, 0 or at least {MIN_NORMAL:.3g} in magnitude (float32)"

    def check(name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise _refuse(name, span, value)
        try:
            number = float(value)
        except OverflowError:  # a large integer
            number = math.inf
        if not low <= number <= high or number == math.inf or (above_low and number == low):
            raise _refuse(name, span, value)
        if 0 < abs(number) < MIN_NORMAL:
            raise _refuse(name, normal, value)
        return number

    return check


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _refuse(name, "true or false", value)
    return value


def _early_stopping(name: str, value: object) -> bool | str:
    if value is True or value is False or value == "never":
        return value
    raise _refuse(name, 'true, false or "never"', value)


def _pooling(name: str, value: object) -> str:
    if isinstance(value, str) and value in ("last", "mean"):
        return value
    raise _refuse(name, '"last" or "mean"', value)


def _texts(name: str, value: object) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, Iterable):
        raise _refuse(name, "a string or a list of strings", value)
    listed = tuple(texts)
    if not all(isinstance(text, str) and text for text in listed):
        raise _refuse(name, "a string or a list of strings, none of them empty", value)
    return listed


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise _refuse(name, "a list of token ids", value)
    token_ids = tuple(value)
    if _are_token_ids(token_ids):
        return token_ids
    return tuple(_token_id(name, token) for token in token_ids)


def _are_token_ids(values: Collection[object]) -> bool:
    """Whether all values are token ids. Fast, since a list may be as long as the vocabulary."""
    if set(map(type, values)) != {int}:
        return False
    numbers = cast("Collection[int]", values)
    return min(numbers) >= 0 and max(numbers) <= LARGEST_COUNT


def _some_token_ids(name: str, value: object) -> tuple[int, ...]:
    token_ids = _token_ids(name, value)
    if not token_ids:
        raise _refuse(name, "a list with at least one token id", value)
    return token_ids


def _sequences(name: str, value: object) -> tuple[tuple[int, ...], ...]:
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise _refuse(name, "a list of lists of token ids", value)
    return tuple(_some_token_ids(name, sequence) for sequence in value)


def _biases(name: str, value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise _refuse(name, "a mapping from token id to bias", value)
    if _are_token_ids(value.keys()) and all(map(_is_plain_bias, value.values())):
        return {token: float(bias) for token, bias in value.items()}
    return {_token_id(name, token): _bias(name, bias) for token, bias in value.items()}


def _is_plain_bias(value: object) -> bool:
    if type(value) is not float and type(value) is not int:
        return False
    return MIN_NORMAL <= abs(value) <= MAX_LOGIT_BIAS or value == 0


_token_id = _integer(0)
_bias = _number(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
_penalty = _number(-MAX_PENALTY, MAX_PENALTY)

OPTIONAL = frozenset(
    {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "logit_bias"}
    | {"allowed_token_ids", "logprobs", "prompt_logprobs", "seed", "best_of", "beam_width"}
    | {"structured_outputs", "pooling"}
)
"""Options for which None means unset."""

FIELD_CHECKS: dict[str, Callable[[str, object], object]] = {
    "max_tokens": _integer(0),
    "min_tokens": _integer(0),
    "temperature": _number(0.0),
    "top_k": _integer(-1),
    "top_p": _number(0.0, 1.0, above_low=True),
    "min_p": _number(0.0, 1.0),
    "repetition_penalty": _number(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
    "presence_penalty": _penalty,
    "frequency_penalty": _penalty,
    "logit_bias": _biases,
    "allowed_token_ids": _some_token_ids,
    "bad_token_ids": _sequences,
    "structured_outputs": as_structured_outputs,
    "stop": _texts,
    "stop_token_ids": _token_ids,
    "include_stop_str_in_output": _flag,
    "ignore_eos": _flag,
    "logprobs": _integer(0),
    "prompt_logprobs": _integer(0),
    "pooling": _pooling,
    "seed": _integer(-(2**63), 2**64 - 1),
    "skip_special_tokens": _flag,
    "n": _integer(1, MAX_CHOICES),
    "best_of": _integer(1, MAX_CHOICES),
    "use_beam_search": _flag,
    "beam_width": _integer(1, MAX_CHOICES),
    "length_penalty": _number(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
    "early_stopping": _early_stopping,
}

_NARROWS = {"temperature": 1e-5, "top_k": 1, "min_p": 1e-300}
"""Options of random sampling, with the lowest value that has an effect."""


@runtime_checkable
class DrawOptions(Protocol):
    """Options of random sampling; None if unset."""

    @property
    def temperature(self) -> float | None: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def top_p(self) -> float | None: ...
    @property
    def min_p(self) -> float | None: ...


@runtime_checkable
class BranchOptions(DrawOptions, Protocol):
    """The options checked here; `quire.config.sampling_params.SamplingParams` implements it."""

    @property
    def n(self) -> int: ...
    @property
    def best_of(self) -> int | None: ...
    @property
    def use_beam_search(self) -> bool: ...
    @property
    def beam_width(self) -> int | None: ...
    @property
    def length_penalty(self) -> float: ...
    @property
    def early_stopping(self) -> bool | Literal["never"]: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def stop(self) -> tuple[str, ...]: ...
    @property
    def ignore_eos(self) -> bool: ...
    @property
    def structured_outputs(self) -> StructuredOutputs | None: ...


_Problem = tuple[str, str]  # the field and the error message


def _draw_problems(options: BranchOptions) -> Iterator[_Problem]:
    if options.best_of is not None and options.best_of < options.n:
        yield (
            "best_of",
            f"best_of={options.best_of} is less than n={options.n}: the n returned completions are "
            "chosen among best_of; raise best_of or lower n",
        )
    for name, neutral in (("beam_width", None), ("length_penalty", 1.0), ("early_stopping", False)):
        if getattr(options, name) != neutral:
            yield (
                name,
                f"{name}={getattr(options, name)!r} is an option of beam search: set "
                "use_beam_search=true or leave it out",
            )


def _beam_problems(options: BranchOptions) -> Iterator[_Problem]:
    for name in ("best_of", "beam_width"):
        width = getattr(options, name)
        if width is not None and width < options.n:
            yield (
                name,
                f"{name}={width} is less than n={options.n}: raise {name} or lower n",
            )
    if None not in (options.best_of, options.beam_width) and options.best_of != options.beam_width:
        yield (
            "beam_width",
            f"best_of={options.best_of} and beam_width={options.beam_width} both set the number of "
            "beams: leave one out",
        )
    if not options.max_tokens:
        yield "max_tokens", "expected max_tokens >= 1 with beam search, got 0: raise max_tokens"
    if options.stop:
        yield (
            "stop",
            "stop is not supported with beam search, because beams have no text before the search "
            "ends: leave out stop, or use stop_token_ids",
        )
    if options.structured_outputs is not None and options.ignore_eos:
        yield (
            "ignore_eos",
            "ignore_eos is not supported with structured_outputs and beam search, because a beam "
            "ends with the end-of-sequence token: leave out ignore_eos",
        )
    for name, least in _NARROWS.items():
        if (getattr(options, name) or 0) >= least:
            yield (
                name,
                f"{name}={getattr(options, name)} is an option of random sampling, which beam "
                "search does not use: leave it out",
            )
    if options.top_p not in (None, 1.0):
        yield (
            "top_p",
            f"top_p={options.top_p} is an option of random sampling, which beam search does not "
            "use: leave it out",
        )


T = TypeVar("T", int, float)

Pooling = Literal["last", "mean"]

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, because dividing by them would overflow."""


RESPONSE_TEMPERATURE, RESPONSE_TOP_P = 0.2, 0.9
"""Defaults of the chat and the server for a model that names no temperature: those of SmolLM2's
model card. A small model repeats itself with temperature 0 and loses the thread with 1."""


@runtime_checkable
class SamplingDefaults(DrawOptions, Protocol):
    """Generation defaults of a model; `None` if it has none."""

    @property
    def repetition_penalty(self) -> float | None: ...


@no_type_check  # type checks in tests must not replace the errors of `__post_init__`
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling options of one request, with the names of OpenAI and vLLM.

    Attributes:
        max_tokens: maximum tokens to generate; 0 only scores the prompt (with `prompt_logprobs`) or
            computes its embedding (with `pooling`).
        min_tokens: tokens to generate before stop rules apply.
        temperature: divides the logits; 0 (or below 1e-5) is greedy. None: the model's, else 0.
        top_k: sample from the k most likely tokens; 0 and -1: off. None: the model's, else off.
        top_p: sample from the smallest set with this probability, in (0, 1]. None: the model's,
            else 1.
        min_p: exclude tokens below this fraction of the highest probability, in [0, 1]. None: the
            model's, else 0.
        repetition_penalty: above 1 penalizes tokens of prompt and output, in [1e-6, 1e6]. None: the
            model's, else 1.
        presence_penalty: subtracted once from every token of the output, in [-2, 2].
        frequency_penalty: subtracted once per occurrence in the output, in [-2, 2].
        logit_bias: map from token id to a number in [-100, 100] that is added to its logit.
        allowed_token_ids: the only tokens that may be generated; None: all.
        bad_token_ids: banned sequences. A sequence of one id bans the token. A longer one bans its
            last id when prompt and output end with the ids before it.
        structured_outputs: the structure of the output: `StructuredOutputs`, or a dictionary of its
            options, such as {"json": schema}. The end-of-sequence token is allowed only where the
            structure is complete, and the output ends where it must. None: any text.
        stop: stop strings, which end the output; one string or a list.
        stop_token_ids: tokens that end the output, in addition to the end-of-sequence tokens.
        include_stop_str_in_output: include the stop string (or the text of the stop token).
        ignore_eos: do not end the output at end-of-sequence tokens.
        logprobs: number of most likely tokens to report for each output token; 0: only the output
            token itself. At most the size of the vocabulary; each costs memory in the output.
        prompt_logprobs: the same for the tokens of the prompt.
        pooling: compute an embedding of the prompt from the hidden states after the last layer and
            its norm: "last" that of the last token, "mean" the mean over the prompt. It needs
            `max_tokens=0`. None: no embedding.
        seed: seed of random sampling: equal logits give equal tokens. In float32 the output does
            not depend on the rest of the batch. In bfloat16 and float16 the batch can change
            logits, and so tokens, except with `--batch-invariant`. None: random.
        skip_special_tokens: leave special tokens out of the text.
        n: number of completions to return. The prompt is prefilled once. Completion i samples with
            `seed + i`, so completion 0 equals that of n=1.
        best_of: number of completions to sample, at least n. The n with the highest summed
            log-probability are returned, best first, when all have ended. None: n.
        use_beam_search: return the n best sequences of a beam search, when it has ended.
        beam_width: number of beams, at least n. None: best_of, else n.
        length_penalty: beams are ranked by their summed log-probability divided by their length to
            this power, in [-10, 10]; above 0 prefers long sequences.
        early_stopping: when a beam search ends. true: when beam_width beams have ended. false: when
            the best open beam is not better than the worst ended one. "never": when no open beam
            can become better.

    Raises:
        RequestError: an option has the wrong type or is out of range.
    """

    max_tokens: int = option(16, common=True)
    min_tokens: int = 0
    temperature: float | None = option(None, common=True)
    top_k: int | None = None
    top_p: float | None = option(None, common=True)
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    structured_outputs: Parsed[
        StructuredOutputs | Mapping[str, Any] | None, StructuredOutputs | None
    ] = option(None)
    stop: tuple[str, ...] = option((), common=True)
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    pooling: Pooling | None = None
    seed: int | None = option(None, common=True)
    skip_special_tokens: bool = True
    n: int = option(1, common=True)
    best_of: int | None = None
    use_beam_search: bool = False
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        for name, checked in FIELD_CHECKS.items():
            value = getattr(self, name)
            if value is not None or name not in OPTIONAL:
                object.__setattr__(self, name, checked(name, value))
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}: "
                "raise max_tokens or lower min_tokens",
                param="min_tokens",
            )
        if self.max_tokens == 0 and self.prompt_logprobs is None and self.pooling is None:
            raise RequestError(
                "max_tokens=0 generates no tokens: raise max_tokens, or set prompt_logprobs to "
                "score the prompt",
                param="max_tokens",
            )
        if self.pooling is not None and (self.max_tokens or self.num_sequences != 1):
            raise RequestError(
                f"pooling={self.pooling!r} computes an embedding and generates no tokens: set "
                "max_tokens=0 and n=1",
                param="pooling",
            )
        problems = _beam_problems if self.use_beam_search else _draw_problems
        for param, problem in problems(self):
            raise RequestError(problem, param=param)

    @property
    def num_sequences(self) -> int:
        """Number of sequences for one prompt: beams or sampled completions."""
        if self.use_beam_search and self.beam_width is not None:
            return self.beam_width
        return self.n if self.best_of is None else self.best_of

    @property
    def ranked(self) -> bool:
        """Whether completions are ranked, so that none is returned before all have ended."""
        return self.use_beam_search or self.num_sequences > self.n

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen; also for an unset temperature."""
        return self.temperature is None or self.temperature < GREEDY_BELOW

    @property
    def edits_logits(self) -> bool:
        """Whether a mask, a bias or a penalty may change which token is the most likely."""
        return bool(
            self.allowed_token_ids is not None
            or self.structured_outputs is not None
            or self.bad_token_ids
            or self.logit_bias
            or (self.repetition_penalty or 1.0) != 1.0
            or self.presence_penalty
            or self.frequency_penalty
        )

    @property
    def reads_output(self) -> bool:
        """Whether the next token depends on the output so far other than through the logits."""
        return bool(
            self.structured_outputs is not None
            or (self.repetition_penalty or 1.0) != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or any(len(banned) > 1 for banned in self.bad_token_ids)
        )

    def resolve(self, defaults: SamplingDefaults) -> "SamplingParams":
        """Fill unset options from the model's defaults, else with neutral values.

        With beam search, the model's defaults for random sampling are ignored.
        """
        if self.use_beam_search:
            penalty = _first(self.repetition_penalty, defaults.repetition_penalty, 1.0)
            return replace(
                self, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=penalty
            )
        neutral = SamplingParams(
            temperature=_first(self.temperature, defaults.temperature, 0.0),
            top_k=_first(self.top_k, defaults.top_k, 0),
            top_p=_first(self.top_p, defaults.top_p, 1.0),
            min_p=_first(self.min_p, defaults.min_p, 0.0),
            repetition_penalty=_first(self.repetition_penalty, defaults.repetition_penalty, 1.0),
        )
        return replace(
            self,
            temperature=neutral.temperature,
            top_k=neutral.top_k,
            top_p=neutral.top_p,
            min_p=neutral.min_p,
            repetition_penalty=neutral.repetition_penalty,
        )

    def with_response_defaults(self, defaults: SamplingDefaults) -> "SamplingParams":
        """Fill temperature and top-p if neither this request nor the model names a temperature."""
        has_temperature = self.temperature is not None or defaults.temperature is not None
        if has_temperature or self.use_beam_search:
            return self
        top_p = _first(self.top_p, defaults.top_p, RESPONSE_TOP_P)
        return replace(self, temperature=RESPONSE_TEMPERATURE, top_p=top_p)

    def response_text(self, defaults: SamplingDefaults, names: Iterable[str]) -> str:
        """The values of a response as in `response_value`.

        Neutral values are left out, except the temperature.
        """
        used = self.with_response_defaults(defaults).resolve(defaults)
        neutral = SamplingParams().resolve(SamplingParams())
        return ", ".join(
            self.response_value(defaults, name)
            for name in names
            if getattr(used, name) != getattr(neutral, name) or name == "temperature"
        )

    def response_value(self, defaults: SamplingDefaults, name: str) -> str:
        """The value that a response is sampled with, as JSON, and its source if it is not set."""
        value = getattr(self.with_response_defaults(defaults).resolve(defaults), name)
        shown = f"{value:g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
        if self.use_beam_search or value == getattr(self, name):
            return f"{name} {shown}"
        unset = getattr(defaults, name, None) is None
        source = "Quire's default" if unset else "the model's"
        return f"{name} {shown} ({source})"

    def validate_for(self, vocab_size: int) -> None:
        """Check token ids and logprobs counts against the size of the vocabulary.

        Raises:
            RequestError: an id is not in [0, vocab_size), or a logprobs count exceeds vocab_size.
        """
        id_lists: dict[str, Iterable[int]] = {
            "logit_bias": self.logit_bias or (),
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_token_ids": (token for sequence in self.bad_token_ids for token in sequence),
            "stop_token_ids": self.stop_token_ids,
        }
        for name, token_ids in id_lists.items():
            outside = [token for token in token_ids if token >= vocab_size]
            if outside:
                raise RequestError(
                    f"{name} has token ids {outside[:5]} but the vocabulary ends at "
                    f"{vocab_size - 1}: leave them out",
                    param=name,
                )
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > vocab_size:
                raise RequestError(
                    f"expected {name} from 0 to {vocab_size} (the size of the vocabulary), got "
                    f"{getattr(self, name)}",
                    param=name,
                )


def _first(value: T | None, default: T | None, neutral: T) -> T:
    if value is not None:
        return value
    return neutral if default is None else default
