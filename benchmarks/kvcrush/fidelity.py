"""Parts `fidelity` and `long`: difference of a model with a cap from itself with full KV, on texts.

Texts are processed in blocks, as in part `perplexity` of the eviction benchmark, then continued
greedily; `benchmarks.kvcrush.text_scores` defines the measures. Part `long` uses the paper's budget
of 2,048.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace

from benchmarks.common.intervals import bootstrap_mean
from benchmarks.common.result import Numbers, PartResult, Table
from benchmarks.eviction.rules import Rule
from benchmarks.eviction.texts import RunningText, cut_texts
from benchmarks.kvcrush.arms import (
    OPENVINO,
    PAGES,
    Arm,
    Compared,
    around,
    crushed,
    one_set,
    with_options,
)
from benchmarks.kvcrush.config import FidelityConfig
from benchmarks.kvcrush.text_scores import Fidelity, JudgeText, measure
from quire.layout.eviction import PREFILL_AND_DECODE
from quire.models.loader import LoadedModel


def compared(config: FidelityConfig) -> tuple[Compared, ...]:
    """Base rules, the same with one set, with KVCrush, and OpenVINO's form, all with one cap."""

    def arm(rule: Rule) -> Arm:
        return Arm(rule=rule, cap=config.cap, when=PREFILL_AND_DECODE)

    def form(base: Rule) -> Arm | None:
        rule = around(OPENVINO, base, f"blocks={config.blocks}", PAGES)
        added = config.blocks * config.page_tokens
        return replace(arm(rule), cap=config.cap - added) if added else None

    bases = [(base, "") for base in config.bases]
    bases += [] if config.pyramid is None else [(config.pyramid, "budget=pyramid")]
    return tuple(
        Compared(
            alone=arm(with_options(base, budget)),
            one_set=arm(one_set(base, budget)),
            crushing=arm(crushed(base, config.share, budget)),
            openvino=None if budget else form(base),
        )
        for base, budget in bases
    )


def run_fidelity(
    model: LoadedModel, config: FidelityConfig, running: RunningText, rouge_l: JudgeText
) -> PartResult:
    """Run either part.

    Args:
        model: evaluated model.
        config: configuration of the part.
        running: text that is cut into samples.
        rouge_l: scores a continuation against a reference.
    """
    texts = cut_texts(model, running, config.tokens, config.texts)
    arms = [arm for one in compared(config) for arm in _arms(one)]
    _, found = measure(model, config, arms, texts, rouge_l)
    return PartResult(
        claims=claims(config, found),
        tables=(_table(config, running.name, found),),
        raw={"rules": [asdict(one) for one in found.values()]},
    )


def _arms(one: Compared) -> Iterator[Arm]:
    yield from (one.alone, one.one_set, *_crushing(one))


def _crushing(one: Compared) -> Iterator[Arm]:
    yield one.crushing
    if one.openvino is not None:
        yield one.openvino


def claims(config: FidelityConfig, found: dict[Arm, Fidelity]) -> Numbers:
    """Means of every rule, and the decrease of KL by KVCrush.

    fidelity_kl_gain: decrease in nats from the base rules. fidelity_kl_gain_one_set: decrease from
    the rules with one set for the heads of a layer. Means over rules, with 95 % bootstrap intervals
    over texts. Claims of the part `long` begin with its name.

    """
    made: Numbers = {}
    for one in found.values():
        made |= means(f"{config.name}_{Rule(one.rule).name}", one)
    arms, name = compared(config), f"{config.name}_kl_gain"
    made |= kl_gain(name, [(found[a.alone], found[a.crushing]) for a in arms])
    return made | kl_gain(f"{name}_one_set", [(found[a.one_set], found[a.crushing]) for a in arms])


def means(name: str, one: Fidelity) -> Numbers:
    """Means over texts, as claims whose names start with `name`."""
    return {
        f"{name}_kl": statistics.mean(one.kl),
        f"{name}_top_1": statistics.mean(one.top_1),
        f"{name}_rouge_l": statistics.mean(one.rouge_l),
    }


def kl_gain(name: str, pairs: Sequence[tuple[Fidelity, Fidelity]]) -> Numbers:
    """Decrease of KL from the first to the second of each pair: mean over pairs, and interval."""
    by_pair = [_decrease(without, crushing) for without, crushing in pairs]
    by_text = [statistics.mean(differences) for differences in zip(*by_pair, strict=True)]
    low, high = bootstrap_mean([by_text], groups_too=False)
    return {f"{name}_mean": statistics.mean(by_text), f"{name}_low": low, f"{name}_high": high}


def _decrease(without: Fidelity, crushing: Fidelity) -> list[float]:
    return [a - b for a, b in zip(without.kl, crushing.kl, strict=True)]


COLUMNS = ("rule", "cap", "KL", "top-1", "ROUGE-L", "KL less", "than one set", "KV KiB")


def row_of(
    found: Mapping[Arm, Fidelity], arm: Arm, *others: Arm | None
) -> tuple[str | int | float | None, ...]:
    """Values of an arm as in COLUMNS; the decrease of KL from each other arm, or None."""
    one = found[arm]
    shown = [statistics.mean(n) for n in (one.kl, one.top_1, one.rouge_l)]
    decreases = (o if o is None else statistics.mean(_decrease(found[o], one)) for o in others)
    return (one.rule, arm.cap, *shown, *decreases, one.request_bytes / 1024)


def _table(config: FidelityConfig, name: str, found: dict[Arm, Fidelity]) -> Table:
    rows = []
    for one in compared(config):
        rows.append(row_of(found, one.alone, None, None))
        rows.append(row_of(found, one.one_set, one.alone, None))
        rows += (row_of(found, arm, one.alone, one.one_set) for arm in _crushing(one))
    return Table(
        name=f"kvcrush-{config.name}",
        caption=(
            f"{config.texts} texts of {config.tokens:,} tokens from {name}, processed in blocks of "
            f"{config.every} with a cap of {config.cap:,} ({100 * config.cap / config.tokens:.0f} "
            f"%), then continued by {config.new_tokens} tokens, compared with full KV. KL in nats, "
            "for tokens after the cap; KL less: KL of the base rule minus this KL, and that of "
            "the rule with one set for a layer's heads; KV: most bytes of a text."
        ),
        columns=COLUMNS,
        rows=tuple(rows),
    )
