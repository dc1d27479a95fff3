"""How one request chooses its tokens and when it stops: options only, no tensors.

Every option is checked when the object is made, so a wrong one is refused before the request takes
any memory. `None` means "not said": `resolve` fills it from the model's own generation defaults.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeVar, no_type_check, runtime_checkable

from quire.config.branch_options import DrawOptions, check_branches
from quire.config.option_checks import FIELD_CHECKS, OPTIONAL
from quire.errors import RequestError
from quire.layout.options import option

T = TypeVar("T", int, float)

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them would only overflow."""


@runtime_checkable
class SamplingDefaults(DrawOptions, Protocol):
    """What a model recommends; `None` where it recommends nothing."""

    @property
    def repetition_penalty(self) -> float | None: ...  # noqa: D102


@no_type_check  # run-time type checks in tests must not answer before our own refusals
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling options of one request, under OpenAI's and vLLM's names.

    Attributes:
        max_tokens: tokens to generate at most; 0 scores the prompt and needs `prompt_logprobs`.
        min_tokens: tokens to generate before any stop rule applies.
        temperature: divides the logits; 0 (or under 1e-5) is greedy. None: the model's, else 0.
        top_k: sample among the k likeliest tokens; 0 and -1 are off. None: the model's, else off.
        top_p: sample in the smallest set with this probability, in (0, 1]. None: the model's,
            else 1.
        min_p: drop tokens under this share of the likeliest one's probability, in [0, 1]. None:
            the model's, else 0.
        repetition_penalty: over 1 disfavours tokens of prompt and output, in [1e-6, 1e6]. None:
            the model's, else 1.
        presence_penalty: subtracted once from every token of the output, in [-2, 2].
        frequency_penalty: subtracted once per occurrence in the output, in [-2, 2].
        logit_bias: token id to a number in [-100, 100] that is added to its logit.
        allowed_token_ids: the only tokens that may be generated; None allows all.
        bad_token_ids: sequences that never come up. A sequence of one id bans the token; a longer
            one bans its last id wherever the ids before it were the last of prompt and output.
        stop: texts that end the answer; one string or a list of them.
        stop_token_ids: tokens that end the answer besides the model's end-of-sequence tokens.
        include_stop_str_in_output: keep the stop text (or the stop token's text) in the answer.
        ignore_eos: treat end-of-sequence tokens like any other.
        logprobs: how many of the likeliest tokens to report beside each chosen one; 0 reports the
            chosen one only. Up to the vocabulary's size: each costs memory in every answer.
        prompt_logprobs: the same for the tokens of the prompt.
        seed: of the draws: equal logits give equal tokens. In float32 an answer then repeats
            whatever else is in the batch; in bfloat16 and float16 the batch can change logits, and
            so tokens, except with `--batch-invariant`. None: drawn at random.
        skip_special_tokens: leave special tokens out of the text.
        n: answers to return. The prompt is read once for all of them. Answer i draws with the seed
            `seed + i`, so answer 0 is the one that n=1 gives.
        best_of: answers to draw, at least n; the n with the highest summed log-probability are
            returned, best first, when all of them have ended. None: n.
        use_beam_search: return the n best sequences of a beam search, when it has ended; nothing
            is drawn.
        beam_width: beams kept at every token, at least n. None: best_of, else n.
        length_penalty: beams are ranked by their summed log-probability over their number of
            tokens to this power, in [-10, 10]; over 0 favours long ones.
        early_stopping: when a beam search ends: true as soon as beam_width beams have ended,
            false when the best open beam is no longer better than the worst of them, "never" when
            no open beam can become better.

    Raises:
        RequestError: an option has the wrong type or lies outside its range.
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
    stop: tuple[str, ...] = option((), common=True)
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
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
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise RequestError(
                "max_tokens=0 generates nothing: raise it, or set prompt_logprobs to score "
                "the prompt",
                param="max_tokens",
            )
        check_branches(self)

    @property
    def num_sequences(self) -> int:
        """Sequences that are made for one prompt: beams, or answers drawn."""
        if self.use_beam_search and self.beam_width is not None:
            return self.beam_width
        return self.n if self.best_of is None else self.best_of

    @property
    def ranked(self) -> bool:
        """Whether answers are compared, so that none can be shown before all have ended."""
        return self.use_beam_search or self.num_sequences > self.n

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken (a temperature that is not said counts)."""
        return self.temperature is None or self.temperature < GREEDY_BELOW

    @property
    def edits_logits(self) -> bool:
        """Whether a mask, a bias or a penalty may change which token is the likeliest."""
        return bool(
            self.allowed_token_ids is not None
            or self.bad_token_ids
            or self.logit_bias
            or (self.repetition_penalty or 1.0) != 1.0
            or self.presence_penalty
            or self.frequency_penalty
        )

    def resolve(self, defaults: SamplingDefaults) -> "SamplingParams":
        """Fill what was not said from the model's defaults, and the rest with neutral values.

        A beam search draws nothing: what a model recommends for drawing is no matter.
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

    def validate_for(self, vocab_size: int) -> None:
        """Check every token id and count against the size of a model's vocabulary.

        Raises:
            RequestError: an id is not in [0, vocab_size), or more logprobs are asked for than
                there are tokens.
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
                    f"{name}={getattr(self, name)} is more than the vocabulary's {vocab_size} "
                    f"tokens: ask for 0 to {vocab_size}",
                    param=name,
                )


def _first(said: T | None, default: T | None, neutral: T) -> T:
    if said is not None:
        return said
    return neutral if default is None else default
