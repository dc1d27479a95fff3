"""Texts scored with an eviction rule or a codec, compared with a reference: full and plain KV.

KL        sum over the vocabulary of p_reference log(p_reference / p), nats, mean over tokens
top-1     fraction of those tokens with the same most likely next token
nats      mean negative log-likelihood of the text's next token
ROUGE-L   of the continuation, with the reference's continuation as the reference
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from benchmarks.common.decoding import RecordingDecoder
from quire.api.llm import LLM
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import ConfigError, InvariantError
from quire.models.loader import LoadedModel
from quire.models.tokenizer import encode_prompt
from quire.policies.registry import FULL

PLAIN = "none"
JudgeText = Callable[[str, str], float]
"""Maps (text, reference) to a score from 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningText:
    """Source of long texts.

    Attributes:
        text: the whole text.
        start: prefix of each excerpt; "": no prefix.
        name: name for captions.
    """

    text: str
    start: str
    name: str


def cut_texts(model: LoadedModel, running: RunningText, tokens: int, n: int) -> list[list[int]]:
    """Cut the first `n` consecutive excerpts of equal length.

    Args:
        model: the model; its tokenizer encodes the text.
        running: source of the text.
        tokens: length of an excerpt, including its prefix.
        n: number of excerpts.

    Raises:
        ConfigError: the model has no tokenizer, or the text is too short.
    """
    if model.tokenizer is None:
        raise ConfigError(f"{model.name} has no tokenizer; texts cannot be encoded")
    start = encode_prompt(model.tokenizer, running.start) if running.start else []
    ids = encode_prompt(model.tokenizer, running.text)
    length = tokens - len(start)
    if length < 1 or len(ids) < n * length:
        raise ConfigError(
            f"expected at least {n * length:,} tokens for {n} texts of {tokens:,}, but "
            f"{running.name} has {len(ids):,}; name a longer text, or request less"
        )
    return [start + ids[i * length : (i + 1) * length] for i in range(n)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextsConfig:
    """Texts that are scored.

    Attributes:
        codecs: KV codecs compared with plain KV.
        tokens: tokens of each text.
        texts: number of texts.
        first: index of the first scored token.
        page_tokens: slots in a page.
        new_tokens: length of each continuation.
    """

    codecs: tuple[str, ...] = ()
    tokens: int = 1_024
    texts: int = 16
    first: int = 64
    page_tokens: int = 32
    new_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TextScores:
    """Scores of all texts with one rule or codec.

    Attributes:
        kl, top_1, nats, rouge_l: values of each text.
        request_bytes: most KV bytes of a text.
    """

    kl: tuple[float, ...]
    top_1: tuple[float, ...]
    nats: tuple[float, ...]
    rouge_l: tuple[float, ...] = ()
    request_bytes: int

    @property
    def mean_kl(self) -> float:
        """Mean KL over texts, which have equal lengths."""
        return statistics.mean(self.kl)

    @property
    def mean_top_1(self) -> float:
        """Mean top-1 agreement over texts."""
        return statistics.mean(self.top_1)

    @property
    def perplexity(self) -> float:
        """Perplexity over all scored tokens."""
        return math.exp(statistics.mean(self.nats))

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TextScore:
    """Natural log-probabilities after each scored token, the continuation, and most KV bytes."""

    logprobs: Float[Tensor, "token vocab"]
    text: str
    request_bytes: int


class TextScorer:
    """Scores texts one by one with one rule and one codec.

    Args:
        model: evaluated model.
        config: text lengths and page size.
        codec: KV codec.
        evict: eviction rule.
    """

    def __init__(
        self, model: LoadedModel, config: TextsConfig, codec: str = PLAIN, evict: str = FULL
    ) -> None:
        self._config, self._recorder = config, RecordingDecoder(model.decoder)
        length = config.tokens + config.new_tokens
        memory = 3 * model.spec.kv_bytes(length, model.decoder.dtype.itemsize) + (8 << 20)
        kv = KVConfig(
            memory=memory,
            page_tokens=config.page_tokens,
            codec=codec,
            evict=evict,
            prefix_cache=PrefixCacheConfig(enabled=False),
        )
        self._llm = LLM(replace(model, decoder=self._recorder), kv=kv)

    def score(self, text: list[int]) -> TextScore:
        """Score and continue a text.

        Raises:
            InvariantError: the request failed.
        """
        options = SamplingParams(
            max_tokens=self._config.new_tokens,
            temperature=0.0,
            ignore_eos=True,
            prompt_logprobs=0,  # logits of all tokens
        )
        [answer] = self._llm.generate([text], options)
        logits = self._recorder.take()
        # without a continuation, no token follows the last one
        length = len(text) if self._config.new_tokens else len(text) - 1
        if answer.error is not None or len(logits) < length:
            raise InvariantError(f"expected logits of a whole text, got the error {answer.error}")
        rows = logits[self._config.first : length].log_softmax(dim=1)
        return TextScore(rows, answer.text, answer.usage.kv_peak_bytes)


Name = TypeVar("Name")


def compare_texts(
    scorers: Mapping[Name, TextScorer],
    reference: TextScorer,
    texts: Sequence[list[int]],
    first: int,
    rouge_l: JudgeText | None = None,
) -> dict[Name, TextScores]:
    """Score all texts with every scorer; distributions of at most two are held at a time.

    Args:
        scorers: scorers by name; one of them may be the reference.
        reference: the scorer they are compared with.
        texts: token ids of each text.
        first: index of the first scored token.
        rouge_l: compares continuations; None: there are none.
    """
    scores: dict[Name, list[tuple[float, float, float, float, int]]] = {n: [] for n in scorers}
    for text in texts:
        wanted, following = reference.score(text), torch.tensor(text[first + 1 :])
        for name, scorer in scorers.items():
            found = wanted if scorer is reference else scorer.score(text)
            kl, top_1 = divergence(wanted.logprobs.float(), found.logprobs.float())
            nats = -float(found.logprobs[: len(following)].gather(1, following[:, None]).mean())
            likeness = 0.0 if rouge_l is None else rouge_l(found.text, wanted.text)
            scores[name].append((max(kl, 0.0), top_1, nats, likeness, found.request_bytes))
    return {name: _joined(rows) for name, rows in scores.items()}


def _joined(rows: Sequence[tuple[float, float, float, float, int]]) -> TextScores:
    kl, top_1, nats, rouge_l, num_bytes = zip(*rows, strict=True)
    return TextScores(kl=kl, top_1=top_1, nats=nats, rouge_l=rouge_l, request_bytes=max(num_bytes))


def divergence(
    reference: Float[Tensor, "token vocab"], found: Float[Tensor, "token vocab"]
) -> tuple[float, float]:
    """Mean KL from the reference in nats, and the top-1 agreement; of natural log-probabilities."""
    kl = torch.nn.functional.kl_div(found, reference, reduction="batchmean", log_target=True)
    return float(kl), float((reference.argmax(dim=1) == found.argmax(dim=1)).double().mean())


def score_codecs(
    model: LoadedModel,
    config: TextsConfig,
    codecs: Sequence[str],
    texts: Sequence[list[int]],
    evict: str = FULL,
) -> dict[str, TextScores]:
    """Score texts with plain KV and with every codec, compared with plain KV without eviction.

    Args:
        model: evaluated model.
        config: text lengths and page size.
        codecs: codecs compared with plain KV.
        texts: token ids of each text.
        evict: eviction rule for every codec and for plain KV.
    """
    names = dict.fromkeys((PLAIN, *codecs))
    scorers = {codec: TextScorer(model, config, codec, evict) for codec in names}
    whole = scorers[PLAIN] if evict == FULL else TextScorer(model, config)
    return compare_texts(scorers, whole, texts, config.first)
