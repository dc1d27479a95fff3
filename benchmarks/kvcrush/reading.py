"""Reads texts under rules and with full KV, and says how far apart the two are.

KL        sum over the vocabulary of p_full log(p_full / p_rule), nats, mean over tokens that are
          predicted from what an eviction has left
top-1     share of those at which the likeliest token is the same
ROUGE-L   of the continuation, against the one with full KV
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from benchmarks.common.decoders import RecordingDecoder
from benchmarks.eviction.cells import FULL
from benchmarks.kvcrush.arms import Arm
from benchmarks.kvcrush.config import FidelityConfig
from quire.api.llm import LLM
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import InvariantError
from quire.models.loader import LoadedModel

JudgeText = Callable[[str, str], float]
"""A text and a reference to a score from 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """All texts under one rule, against full KV.

    Attributes:
        rule: its text.
        kl: nats, mean of each text.
        top_1: share of each text.
        rouge_l: of each continuation.
        request_bytes: most KV of a text.
        continuations: of each text.
    """

    rule: str
    kl: tuple[float, ...]
    top_1: tuple[float, ...]
    rouge_l: tuple[float, ...]
    request_bytes: int
    continuations: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """One text under one rule.

    Attributes:
        logprobs: of the token behind each position from the cap on, natural.
        text: the continuation.
        request_bytes: most KV.
    """

    logprobs: Float[Tensor, "token vocab"]
    text: str
    request_bytes: int


class Reader:
    """Reads texts one by one under one rule.

    Args:
        model: reads.
        config: lengths.
        arm: None keeps everything.
    """

    def __init__(self, model: LoadedModel, config: FidelityConfig, arm: Arm | None) -> None:
        self._config, self._recorder = config, RecordingDecoder(model.decoder)
        length = config.tokens + config.new_tokens
        memory = 2 * model.spec.kv_bytes(length, model.decoder.dtype.itemsize) + (8 << 20)
        evict = FULL if arm is None else arm.rule.evict(arm.cap, config.every, arm.when)
        kv = KVConfig(
            memory=memory,
            page_tokens=config.page_tokens,
            evict=evict,
            prefix_cache=PrefixCacheConfig(enabled=False),
        )
        self._llm = LLM(replace(model, decoder=self._recorder), kv=kv)

    def read(self, text: list[int]) -> Read:
        """Read a text, and go on.

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
        if answer.error is not None or len(logits) < len(text):
            raise InvariantError(f"a text of a bench was not read: {answer.error}")
        rows = logits[self._config.cap : len(text)]
        return Read(
            logprobs=rows.log_softmax(dim=1),
            text=answer.text,
            request_bytes=answer.usage.kv_peak_bytes,
        )


def measure(
    model: LoadedModel,
    config: FidelityConfig,
    arms: Iterable[Arm],
    texts: Sequence[list[int]],
    rouge_l: JudgeText,
) -> tuple[tuple[str, ...], dict[Arm, Fidelity]]:
    """Every arm, text by text: no more than two texts' distributions are held at a time.

    Returns:
        Continuations with full KV, and what came of each arm.
    """
    full = Reader(model, config, None)
    readers = {arm: Reader(model, config, arm) for arm in arms}
    scores: dict[Arm, list[_Scored]] = {arm: [] for arm in readers}
    continued = []
    for text in texts:
        wanted = full.read(text)
        continued.append(wanted.text)
        for arm, reader in readers.items():
            scores[arm].append(_scored(reader.read(text), wanted, rouge_l))
    return tuple(continued), {arm: _joined(arm, rows) for arm, rows in scores.items()}


_Scored = tuple[float, float, float, int, str]


def _scored(found: Read, full: Read, rouge_l: JudgeText) -> _Scored:
    kl, top_1 = divergence(full.logprobs, found.logprobs)
    return kl, top_1, rouge_l(found.text, full.text), found.request_bytes, found.text


def divergence(
    full: Float[Tensor, "token vocab"], found: Float[Tensor, "token vocab"]
) -> tuple[float, float]:
    """Mean KL of distributions from those of full KV, in nats; and how often the best agree.

    Args:
        full: natural logarithms of probabilities.
        found: of the same tokens, under a rule.
    """
    kl = torch.nn.functional.kl_div(found, full, reduction="batchmean", log_target=True)
    return float(kl), float((full.argmax(dim=1) == found.argmax(dim=1)).double().mean())


def _joined(arm: Arm, rows: Sequence[_Scored]) -> Fidelity:
    kl, top_1, rouge_l, request_bytes, continuations = zip(*rows, strict=True)
    return Fidelity(
        rule=arm.rule.text,
        kl=kl,
        top_1=top_1,
        rouge_l=rouge_l,
        request_bytes=max(request_bytes),
        continuations=continuations,
    )
