"""Parts `fidelity` and `long`: difference of a model with a cap from itself with full KV, on texts.

Texts are processed in blocks, as in part `perplexity` of the eviction benchmark, then continued
greedily; `benchmarks.quality.texts` defines the measures. Part `long` uses the paper's budget of
2,048.
"""

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.common.intervals import bootstrap_mean
from benchmarks.common.result import Cell, Numbers, PartResult, Table
from benchmarks.kvcrush.arms import PYRAMID, Arm, Compared, compared
from benchmarks.kvcrush.config import FidelityConfig
from benchmarks.quality.texts import (
    JudgeText,
    RunningText,
    TextScorer,
    TextScores,
    compare_texts,
    cut_texts,
)
from quire.layout.eviction import PREFILL_AND_DECODE
from quire.models.loader import LoadedModel


def arms_of(config: FidelityConfig) -> tuple[Compared, ...]:
    """Base rules, the same with one set, with KVCrush, and OpenVINO's form, all with one cap."""
    made = []
    for base in config.bases:
        arm = Arm(rule=base, cap=config.first, when=PREFILL_AND_DECODE)
        added = config.blocks * config.page_tokens
        made.append(compared(base, arm, config.share, openvino_tokens=added, blocks=config.blocks))
    if config.pyramid is not None:
        arm = Arm(rule=config.pyramid, cap=config.first, when=PREFILL_AND_DECODE)
        made.append(compared(config.pyramid, arm, config.share, PYRAMID))
    return tuple(made)


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
    scorers = {
        arm: TextScorer(model, config, evict=arm.rule.evict(arm.cap, config.every, arm.when))
        for one in arms_of(config)
        for arm in (one.alone, one.one_set, *one.forms)
    }
    found = compare_texts(scorers, TextScorer(model, config), texts, config.first, rouge_l)
    return PartResult(
        claims=claims(config, found),
        tables=(_table(config, running.name, found),),
        raw={"rules": [{"rule": arm.rule.text} | of.to_json() for arm, of in found.items()]},
    )


def claims(config: FidelityConfig, found: Mapping[Arm, TextScores]) -> Numbers:
    """Mean KL of every rule, and the decrease of KL by KVCrush.

    fidelity_kl_gain: decrease in nats from the base rules. fidelity_kl_gain_one_set: decrease from
    the rules with one set for the heads of a layer. Means over rules, with 95 % bootstrap intervals
    over texts. Claims of the part `long` begin with its name.
    """
    made: Numbers = {f"{config.name}_{a.rule.name}_kl": one.mean_kl for a, one in found.items()}
    arms, name = arms_of(config), f"{config.name}_kl_gain"
    made |= _kl_gain(name, [(found[a.alone], found[a.crushing]) for a in arms])
    return made | _kl_gain(f"{name}_one_set", [(found[a.one_set], found[a.crushing]) for a in arms])


def _kl_gain(name: str, pairs: Sequence[tuple[TextScores, TextScores]]) -> Numbers:
    """Decrease of KL from the first to the second of each pair: mean over pairs, and interval."""
    by_pair = [[a - b for a, b in zip(x.kl, y.kl, strict=True)] for x, y in pairs]
    by_text = [statistics.mean(differences) for differences in zip(*by_pair, strict=True)]
    low, high = bootstrap_mean([by_text], groups_too=False)
    return {f"{name}_mean": statistics.mean(by_text), f"{name}_low": low, f"{name}_high": high}


def _table(config: FidelityConfig, name: str, found: Mapping[Arm, TextScores]) -> Table:
    def row(arm: Arm, *others: Arm | None) -> tuple[Cell, ...]:
        one = found[arm]
        less = (None if o is None else found[o].mean_kl - one.mean_kl for o in others)
        rouge_l = statistics.mean(one.rouge_l)
        scores = (one.mean_kl, one.mean_top_1, rouge_l)
        return (arm.rule.text, arm.cap, *scores, *less, one.request_bytes / 1024)

    rows = []
    for one in arms_of(config):
        rows += [row(one.alone, None, None), row(one.one_set, one.alone, None)]
        rows += [row(arm, one.alone, one.one_set) for arm in one.forms]
    return Table(
        name=f"kvcrush-{config.name}",
        caption=(
            f"{config.texts} texts of {config.tokens:,} tokens from {name}, processed in blocks of "
            f"{config.every} with a cap of {config.first:,} "
            f"({100 * config.first / config.tokens:.0f} %), then continued by {config.new_tokens} "
            "tokens, compared with full KV. KL in nats, for tokens after the cap; KL less: KL of "
            "the base rule minus this KL, and that of the rule with one set for a layer's heads; "
            "KV: most bytes of a text."
        ),
        columns=("rule", "cap", "KL", "top-1", "ROUGE-L", "KL less", "than one set", "KV KiB"),
        rows=tuple(rows),
    )
