"""Parts `fidelity` and `long`: how far a model under a cap is from itself with full KV, on text.

Texts are read on in blocks, as in part `perplexity` of the eviction bench, then continued greedily.
Part `long` does so in the paper's budget of 2,048 tokens.

KL        sum over the vocabulary of p_full log(p_full / p_rule), nats, mean over tokens that are
          predicted from what an eviction has left
top-1     share of those at which the likeliest token is the same
ROUGE-L   of the continuation, against the one with full KV
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from quire.bench.eviction.cells import FULL
from quire.bench.eviction.rules import Rule
from quire.bench.eviction.texts import RunningText, pieces
from quire.bench.intervals import bootstrap_mean
from quire.bench.kvcrush.arms import (
    OPENVINO,
    PAGES,
    Arm,
    Compared,
    around,
    crushed,
    one_set,
    with_options,
)
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
        self._config, self._heard = config, Listening(model.decoder)
        length = config.tokens + config.new_tokens
        memory = 2 * model.spec.kv_bytes(length, model.decoder.dtype.itemsize) + (8 << 20)
        evict = FULL if arm is None else arm.rule.evict(arm.cap, config.every, arm.when)
        kv = KVConfig(
            memory=memory, page_tokens=config.page_tokens, evict=evict, prefix_cache=False
        )
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

    def form(base: Rule) -> Arm | None:
        rule = around(OPENVINO, base, f"blocks={config.blocks}", PAGES)
        added = config.blocks * config.page_tokens
        return replace(arm(rule), cap=config.cap - added) if added else None

    asked = [(base, "") for base in config.bases]
    asked += [] if config.pyramid is None else [(config.pyramid, "budget=pyramid")]
    return tuple(
        Compared(
            alone=arm(with_options(base, budget)),
            one_set=arm(one_set(base, budget)),
            crushing=arm(crushed(base, config.share, budget)),
            openvino=None if budget else form(base),
        )
        for base, budget in asked
    )


def run_fidelity(
    model: LoadedModel, config: FidelityConfig, running: RunningText, rouge_l: JudgeText
) -> PartResult:
    """Either part.

    Args:
        model: reads.
        config: of the part.
        running: what texts are cut from.
        rouge_l: judges continuations.
    """
    texts = pieces(model, running, config.tokens, config.texts)
    arms = [arm for one in compared(config) for arm in _arms(one)]
    _, found = measure(model, config, arms, texts, rouge_l)
    return PartResult(
        claims=claims(config, found),
        tables=(_table(config, running.name, found),),
        raw={"rules": [asdict(one) for one in found.values()]},
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


def _arms(one: Compared) -> Iterator[Arm]:
    yield from (one.alone, one.one_set, *_crushing(one))


def _crushing(one: Compared) -> Iterator[Arm]:
    yield one.crushing
    if one.openvino is not None:
        yield one.openvino


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


def claims(config: FidelityConfig, found: dict[Arm, Fidelity]) -> Numbers:
    """Means of every rule; and of KVCrush, what it takes off the KL of the rules without it.

    fidelity_kl_gain: nats less than the rules alone; fidelity_kl_gain_one_set: than the rules with
    one set for a layer's heads. Mean over rules; intervals of 95 % by bootstrap over texts. Those
    of the part `long` begin with its name.
    """
    made: Numbers = {}
    for one in found.values():
        made |= means(f"{config.name}_{Rule(one.rule).name}", one)
    arms, name = compared(config), f"{config.name}_kl_gain"
    made |= kl_gain(name, [(found[a.alone], found[a.crushing]) for a in arms])
    return made | kl_gain(f"{name}_one_set", [(found[a.one_set], found[a.crushing]) for a in arms])


def means(name: str, one: Fidelity) -> Numbers:
    """Over texts, under names that begin so."""
    return {
        f"{name}_kl": statistics.mean(one.kl),
        f"{name}_top_1": statistics.mean(one.top_1),
        f"{name}_rouge_l": statistics.mean(one.rouge_l),
    }


def kl_gain(name: str, pairs: Sequence[tuple[Fidelity, Fidelity]]) -> Numbers:
    """How much less KL the second of each pair has, mean over pairs, with its interval."""
    by_pair = [_less(without, crushing) for without, crushing in pairs]
    by_text = [statistics.mean(differences) for differences in zip(*by_pair, strict=True)]
    low, high = bootstrap_mean([by_text], groups_too=False)
    return {f"{name}_mean": statistics.mean(by_text), f"{name}_low": low, f"{name}_high": high}


def _less(without: Fidelity, crushing: Fidelity) -> list[float]:
    return [a - b for a, b in zip(without.kl, crushing.kl, strict=True)]


COLUMNS = ("rule", "cap", "KL", "top-1", "ROUGE-L", "KL less", "than one set", "KV KiB")


def row_of(
    found: Mapping[Arm, Fidelity], arm: Arm, *others: Arm | None
) -> tuple[str | int | float | None, ...]:
    """Numbers of an arm as in COLUMNS; by how much its KL is below that of others, or None."""
    one = found[arm]
    shown = [statistics.mean(n) for n in (one.kl, one.top_1, one.rouge_l)]
    less = (o if o is None else statistics.mean(_less(found[o], one)) for o in others)
    return (one.rule, arm.cap, *shown, *less, one.request_bytes / 1024)


def _table(config: FidelityConfig, name: str, found: dict[Arm, Fidelity]) -> Table:
    rows = []
    for one in compared(config):
        rows.append(row_of(found, one.alone, None, None))
        rows.append(row_of(found, one.one_set, one.alone, None))
        rows += (row_of(found, arm, one.alone, one.one_set) for arm in _crushing(one))
    return Table(
        name=f"kvcrush-{config.name}",
        caption=(
            f"{config.texts} texts of {config.tokens:,} tokens from {name}, read on in blocks of "
            f"{config.every} under a cap of {config.cap:,} ({100 * config.cap / config.tokens:.0f} "
            f"%), then continued by {config.new_tokens} tokens, against full KV. KL in nats, of "
            "tokens behind the cap; less: KL of the rule alone less this one's, and of the rule "
            "with one set for a layer's heads; KV: most bytes of a text."
        ),
        columns=COLUMNS,
        rows=tuple(rows),
    )
