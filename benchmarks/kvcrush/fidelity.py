"""Parts `fidelity` and `long`: how far a model under a cap is from itself with full KV, on text.

Texts are read on in blocks, as in part `perplexity` of the eviction bench, then continued greedily;
`benchmarks.kvcrush.reading` says what is measured. Part `long` has the paper's budget of 2,048.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace

from benchmarks.common.intervals import bootstrap_mean
from benchmarks.common.result import Numbers, PartResult, Table
from benchmarks.eviction.rules import Rule
from benchmarks.eviction.texts import RunningText, pieces
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
from benchmarks.kvcrush.reading import Fidelity, JudgeText, measure
from quire.layout.eviction import PREFILL_AND_DECODE
from quire.models.loader import LoadedModel


def compared(config: FidelityConfig) -> tuple[Compared, ...]:
    """Rules alone, with one set, with KVCrush, and OpenVINO's form, all of one cap."""

    def arm(rule: Rule) -> Arm:
        return Arm(rule=rule, cap=config.cap, when=PREFILL_AND_DECODE)

    def form(base: Rule) -> Arm | None:
        rule = around(OPENVINO, base, f"blocks={config.blocks}", PAGES)
        added = config.blocks * config.page_tokens
        return replace(arm(rule), cap=config.cap - added) if added else None

    requested = [(base, "") for base in config.bases]
    requested += [] if config.pyramid is None else [(config.pyramid, "budget=pyramid")]
    return tuple(
        Compared(
            alone=arm(with_options(base, budget)),
            one_set=arm(one_set(base, budget)),
            crushing=arm(crushed(base, config.share, budget)),
            openvino=None if budget else form(base),
        )
        for base, budget in requested
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


def _arms(one: Compared) -> Iterator[Arm]:
    yield from (one.alone, one.one_set, *_crushing(one))


def _crushing(one: Compared) -> Iterator[Arm]:
    yield one.crushing
    if one.openvino is not None:
        yield one.openvino


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
