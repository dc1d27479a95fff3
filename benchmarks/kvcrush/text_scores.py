"""Score texts with eviction rules and with full KV, and measure the difference.

KL        sum over the vocabulary of p_full log(p_full / p_rule), nats, mean over tokens that are
          predicted after an eviction
top-1     fraction of those tokens with the same most likely token
ROUGE-L   of the continuation, with full KV's continuation as the reference
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from benchmarks.eviction.cells import FULL
from benchmarks.kvcrush.arms import Arm
from benchmarks.kvcrush.config import FidelityConfig
from quire.api.llm import LLM
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import InvariantError
from quire.evals.fidelity import RecordingDecoder
from quire.models.loader import LoadedModel

JudgeText = Callable[[str, str], float]
"""Maps (text, reference) to a score from 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """Scores of all texts with one rule, compared with full KV.

    Attributes:
        rule: text of the rule.
        kl: mean nats of each text.
        top_1: top-1 agreement of each text.
        rouge_l: ROUGE-L of each continuation.
        request_bytes: most KV bytes of a text.
        continuations: continuation of each text.
    """

    rule: str
    kl: tuple[float, ...]
    top_1: tuple[float, ...]
    rouge_l: tuple[float, ...]
    request_bytes: int
    continuations: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextScore:
    """Score of one text with one rule.

    Attributes:
        logprobs: natural log-probabilities after each position from the cap on.
        text: the continuation.
        request_bytes: most KV bytes.
    """

    logprobs: Float[Tensor, "token vocab"]
    text: str
    request_bytes: int


class TextScorer:
    """Scores texts one by one with one rule.

    Args:
        model: evaluated model.
        config: text lengths and page size.
        arm: rule with its cap; None: no eviction.
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
        if answer.error is not None or len(logits) < len(text):
            raise InvariantError(f"expected logits of a whole text, got the error {answer.error}")
        rows = logits[self._config.cap : len(text)]
        return TextScore(
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
    """Score all texts with every arm; distributions of at most two texts are held at a time.

    Returns:
        Continuations with full KV, and the scores of each arm.
    """
    full = TextScorer(model, config, None)
    scorers = {arm: TextScorer(model, config, arm) for arm in arms}
    scores: dict[Arm, list[_Scored]] = {arm: [] for arm in scorers}
    continued = []
    for text in texts:
        wanted = full.score(text)
        continued.append(wanted.text)
        for arm, scorer in scorers.items():
            scores[arm].append(_scored(scorer.score(text), wanted, rouge_l))
    return tuple(continued), {arm: _joined(arm, rows) for arm, rows in scores.items()}


_Scored = tuple[float, float, float, int, str]


def _scored(found: TextScore, full: TextScore, rouge_l: JudgeText) -> _Scored:
    kl, top_1 = divergence(full.logprobs, found.logprobs)
    return kl, top_1, rouge_l(found.text, full.text), found.request_bytes, found.text


def divergence(
    full: Float[Tensor, "token vocab"], found: Float[Tensor, "token vocab"]
) -> tuple[float, float]:
    """Mean KL from the distributions with full KV, in nats, and the top-1 agreement.

    Args:
        full: natural log-probabilities with full KV.
        found: natural log-probabilities of the same tokens with a rule.
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
