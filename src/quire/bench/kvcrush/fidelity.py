"""Part `fidelity`: how far a model under a cap is from itself with full KV, on real text.

Texts are read on in blocks, as in part `perplexity` of the eviction bench, then continued greedily.

KL        sum over the vocabulary of p_full log(p_full / p_rule), nats, mean over tokens that are
          predicted from what an eviction has left
top-1     share of those at which the likeliest token is the same
ROUGE-L   of the continuation, against the one with full KV
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from quire.bench.eviction.cells import FULL
from quire.bench.eviction.rules import Rule
from quire.bench.eviction.texts import RunningText, pieces
from quire.bench.intervals import bootstrap_mean
from quire.bench.kvcrush.arms import OPENVINO, PAGES, Arm, Compared, around, crushed, with_options
from quire.bench.kvcrush.config import FidelityConfig
from quire.bench.kvcrush.listening import Listening
from quire.bench.result import Numbers, PartResult, Table
from quire.engine.llm import LLM
from quire.engine.sampling_params import SamplingParams
from quire.errors import InvariantError
from quire.kv.config import KVConfig
from quire.models.loader import LoadedModel
from quire.spec.eviction import PREFILL_AND_DECODE

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
    """

    rule: str
    kl: tuple[float, ...]
    top_1: tuple[float, ...]
    rouge_l: tuple[float, ...]
    request_bytes: int


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
        self._config, self._heard = config, Listening(model.decoder)
        length = config.tokens + config.new_tokens
        memory = 2 * model.spec.kv_bytes(length, model.decoder.dtype.itemsize) + (8 << 20)
        evict = FULL if arm is None else arm.rule.evict(arm.cap, config.every, arm.when)
        page_tokens = 16 if arm is None else arm.page_tokens
        kv = KVConfig(memory=memory, page_tokens=page_tokens, evict=evict, prefix_cache=False)
        self._llm = LLM(replace(model, decoder=self._heard), kv=kv)

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
        heard = self._heard.take()
        if answer.error is not None or len(heard) < len(text):
            raise InvariantError(f"a text of a bench was not read: {answer.error}")
        rows = heard[self._config.cap : len(text)]
        return Read(
            logprobs=rows.log_softmax(dim=1),
            text=answer.text,
            request_bytes=answer.usage.kv_peak_bytes,
        )


def compared(config: FidelityConfig) -> tuple[Compared, ...]:
    """Rules alone, with one set, with KVCrush, and OpenVINO's form, all of one cap."""

    def arm(rule: Rule) -> Arm:
        return Arm(rule=rule, cap=config.cap, when=PREFILL_AND_DECODE)

    def form(base: Rule) -> Arm:
        rule = around(OPENVINO, base, f"blocks={config.blocks}")
        cap = config.cap - config.blocks * config.page_tokens
        by_page = with_options(rule, PAGES)
        return replace(arm(by_page), cap=cap, page_tokens=config.page_tokens)

    return tuple(
        Compared(
            alone=arm(base),
            one_set=arm(crushed(base, 0.0)),
            crushing=arm(crushed(base, config.share)),
            openvino=form(base),
        )
        for base in config.bases
    )


def run_fidelity(
    model: LoadedModel, config: FidelityConfig, running: RunningText, rouge_l: JudgeText
) -> PartResult:
    """The part.

    Args:
        model: reads.
        config: of the part.
        running: what texts are cut from.
        rouge_l: judges continuations.
    """
    texts = pieces(model, running, config.tokens, config.texts)
    found = measure(model, config, texts, rouge_l)
    return PartResult(
        claims=claims(config, found),
        tables=(_table(config, running.name, found),),
        raw={"rules": [asdict(one) for one in found.values()]},
    )


def measure(
    model: LoadedModel, config: FidelityConfig, texts: Sequence[list[int]], rouge_l: JudgeText
) -> dict[Arm, Fidelity]:
    """Every arm, text by text: no more than two texts' distributions are held at a time."""
    arms = [arm for one in compared(config) for arm in _arms(one)]
    full = Reader(model, config, None)
    readers = {arm: Reader(model, config, arm) for arm in arms}
    scores: dict[Arm, list[tuple[float, float, float, int]]] = {arm: [] for arm in arms}
    for text in texts:
        wanted = full.read(text)
        for arm, reader in readers.items():
            scores[arm].append(_scored(reader.read(text), wanted, rouge_l))
    return {arm: _joined(arm, rows) for arm, rows in scores.items()}


def _arms(one: Compared) -> Iterator[Arm]:
    yield from (one.alone, one.one_set, one.crushing)
    if one.openvino is not None:
        yield one.openvino


def _scored(found: Read, full: Read, rouge_l: JudgeText) -> tuple[float, float, float, int]:
    kl, top_1 = divergence(full.logprobs, found.logprobs)
    return kl, top_1, rouge_l(found.text, full.text), found.request_bytes


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


def _joined(arm: Arm, rows: Sequence[tuple[float, float, float, int]]) -> Fidelity:
    kl, top_1, rouge_l, request_bytes = zip(*rows, strict=True)
    return Fidelity(
        rule=arm.rule.text, kl=kl, top_1=top_1, rouge_l=rouge_l, request_bytes=max(request_bytes)
    )


def claims(config: FidelityConfig, found: dict[Arm, Fidelity]) -> Numbers:
    """Means of every rule; and of KVCrush, what it takes off the KL of the rules without it.

    fidelity_kl_gain: nats less than the rules alone; fidelity_kl_shared_gain: than the rules with
    one set for a layer's heads. Mean over rules; intervals of 95 % by bootstrap over texts.
    """
    made: Numbers = {}
    for one in found.values():
        name = f"fidelity_{_name(one)}"
        made[f"{name}_kl"] = statistics.mean(one.kl)
        made[f"{name}_top_1"] = statistics.mean(one.top_1)
        made[f"{name}_rouge_l"] = statistics.mean(one.rouge_l)
    arms = compared(config)
    made |= _gain("fidelity_kl_gain", [(found[a.alone], found[a.crushing]) for a in arms])
    return made | _gain(
        "fidelity_kl_shared_gain", [(found[a.one_set], found[a.crushing]) for a in arms]
    )


def _name(one: Fidelity) -> str:
    return Rule(one.rule).name


def _gain(name: str, pairs: Sequence[tuple[Fidelity, Fidelity]]) -> Numbers:
    by_pair = [_less(without, crushing) for without, crushing in pairs]
    by_text = [statistics.mean(differences) for differences in zip(*by_pair, strict=True)]
    low, high = bootstrap_mean([by_text], groups_too=False)
    return {f"{name}_mean": statistics.mean(by_text), f"{name}_low": low, f"{name}_high": high}


def _less(without: Fidelity, crushing: Fidelity) -> list[float]:
    return [a - b for a, b in zip(without.kl, crushing.kl, strict=True)]


def _table(config: FidelityConfig, name: str, found: dict[Arm, Fidelity]) -> Table:
    rows = []
    for one in compared(config):
        for arm in _arms(one):
            scores = found[arm]
            means = [statistics.mean(n) for n in (scores.kl, scores.top_1, scores.rouge_l)]
            less = statistics.mean(_less(found[one.alone], scores))
            kib = scores.request_bytes / 1024
            rows.append((scores.rule, arm.cap, *means, None if arm == one.alone else less, kib))
    return Table(
        name="kvcrush-fidelity",
        caption=(
            f"{config.texts} texts of {config.tokens:,} tokens from {name}, read on in blocks of "
            f"{config.every} under a cap of {config.cap} ({100 * config.budget:g} %), then "
            f"continued by {config.new_tokens} tokens, against full KV. KL in nats, of tokens "
            "behind the cap; less: KL of the rule alone less this one's; KV: most bytes of a text."
        ),
        columns=("rule", "cap", "KL", "top-1", "ROUGE-L", "KL less", "KV KiB"),
        rows=tuple(rows),
    )
