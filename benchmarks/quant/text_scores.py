"""Score texts with quantized and with plain KV, and measure the difference.

KL          sum over the vocabulary of p_plain log(p_plain / p_codec), nats, mean over tokens
top-1       fraction of tokens with the same most likely next token
nats        mean negative log-likelihood of the text's next token
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from benchmarks.eviction.cells import FULL
from benchmarks.kvcrush.text_scores import divergence
from benchmarks.quant.config import PLAIN, TextsConfig
from quire.api.llm import LLM
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import InvariantError
from quire.evals.fidelity import RecordingDecoder
from quire.models.loader import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecTexts:
    """Scores of all texts with one codec, compared with plain KV.

    Attributes:
        codec: name of the codec.
        kl, top_1, nats: values of each text.
        request_bytes: most KV bytes of a text.
    """

    codec: str
    kl: tuple[float, ...]
    top_1: tuple[float, ...]
    nats: tuple[float, ...]
    request_bytes: int

    @property
    def mean_kl(self) -> float:
        """Mean KL over texts, which have equal lengths."""
        return statistics.mean(self.kl)

    @property
    def perplexity(self) -> float:
        """Perplexity over all scored tokens."""
        return math.exp(statistics.mean(self.nats))

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return asdict(self)


class TextScorer:
    """Scores texts one by one with one codec.

    Args:
        model: evaluated model.
        config: text lengths and page size.
        codec: KV codec.
        evict: eviction rule.
    """

    def __init__(
        self, model: LoadedModel, config: TextsConfig, codec: str, evict: str = FULL
    ) -> None:
        self._config, self._recorder = config, RecordingDecoder(model.decoder)
        memory = 3 * model.spec.kv_bytes(config.tokens, model.decoder.dtype.itemsize) + (8 << 20)
        kv = KVConfig(
            memory=memory,
            page_tokens=config.page_tokens,
            codec=codec,
            evict=evict,
            prefix_cache=PrefixCacheConfig(enabled=False),
        )
        self._llm = LLM(replace(model, decoder=self._recorder), kv=kv)

    def score(self, text: list[int]) -> tuple[Float[Tensor, "token vocab"], int]:
        """Return the log-probabilities after each scored token, and the KV bytes.

        Raises:
            InvariantError: the request failed.
        """
        options = SamplingParams(max_tokens=0, prompt_logprobs=0)  # logits of all tokens
        [answer] = self._llm.generate([text], options)
        logits = self._recorder.take()
        if answer.error is not None or len(logits) < len(text) - 1:
            raise InvariantError(f"expected logits of a whole text, got the error {answer.error}")
        rows = logits[self._config.first : len(text) - 1]
        return rows.log_softmax(dim=1), answer.usage.kv_peak_bytes


def score_texts(
    model: LoadedModel,
    config: TextsConfig,
    codecs: Sequence[str],
    texts: Sequence[list[int]],
    evict: str = FULL,
) -> dict[str, CodecTexts]:
    """Score all texts with every codec, plain KV first; two distributions are held at a time.

    Args:
        model: evaluated model.
        config: text lengths and page size.
        codecs: codecs compared with plain KV.
        texts: token ids of each text.
        evict: eviction rule for every codec and for plain KV; all are compared with plain KV
            without eviction.
    """
    names = tuple(dict.fromkeys((PLAIN, *codecs)))
    scorers = {codec: TextScorer(model, config, codec, evict) for codec in names}
    whole = scorers[PLAIN] if evict == FULL else TextScorer(model, config, PLAIN)
    scores: dict[str, list[tuple[float, float, float, int]]] = {codec: [] for codec in names}
    for text in texts:
        wanted, _ = whole.score(text)
        following = torch.tensor(text[config.first + 1 :])
        for codec, scorer in scorers.items():
            found, num_bytes = scorer.score(text)
            kl, top_1 = divergence(wanted, found)
            nats = -float(found.gather(1, following[:, None]).mean())
            scores[codec].append((max(kl, 0.0), top_1, nats, num_bytes))
    return {codec: joined(codec, rows) for codec, rows in scores.items()}


def joined(codec: str, rows: Sequence[tuple[float, float, float, int]]) -> CodecTexts:
    """Join the KL, top-1 agreement, nats and KV bytes of texts."""
    kl, top_1, nats, num_bytes = zip(*rows, strict=True)
    return CodecTexts(codec=codec, kl=kl, top_1=top_1, nats=nats, request_bytes=max(num_bytes))
