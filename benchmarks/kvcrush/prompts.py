"""Part `prompts`: paged H2O and paged KVCrush on recorded prompts, as in the paper's figure 8.

The measures are those of part `fidelity`, with the paper's pages and caps, and the graded outputs,
for models that can do the task. H2O scores a page by the sum over its tokens, as in the paper. The
paper's H2O has one retained set per layer; both H2O variants are measured.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarks.common.graded_prompts import GradedPrompt
from benchmarks.common.result import Numbers, PartResult, Table
from benchmarks.eviction.rules import Rule
from benchmarks.kvcrush.arms import Arm, Row, paper_rows
from benchmarks.kvcrush.config import FidelityConfig, PromptsConfig
from benchmarks.kvcrush.fidelity import COLUMNS, kl_gain, means, row_of
from benchmarks.kvcrush.text_scores import Fidelity, JudgeText, measure
from quire.layout.eviction import PREFILL_AND_DECODE
from quire.models.loader import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Prompts of one file of examples.

    Attributes:
        name: name of the task.
        score: name of the mean score.
        prompts: token ids, within the configured length.
        graded: the same prompts, with their grading functions.
    """

    name: str
    score: str
    prompts: tuple[list[int], ...]
    graded: tuple[GradedPrompt, ...]


def run_prompts(
    model: LoadedModel, config: PromptsConfig, recorded: Sequence[Recorded], rouge_l: JudgeText
) -> PartResult:
    """Run the part.

    Args:
        model: evaluated model.
        config: configuration of the part.
        recorded: prompts of one or more files.
        rouge_l: scores a continuation against the continuation with full KV.
    """
    rows = paper_rows(config.paper, PREFILL_AND_DECODE, config.shares, config.anchors)
    claims: Numbers = {}
    tables, raw = [], {}
    for source in recorded:
        fidelity = _fidelity_config(config, source)
        arms = [row.arm for row in rows]
        full, found = measure(model, fidelity, arms, source.prompts, rouge_l)
        scores = {arm: _score(source, one.continuations) for arm, one in found.items()}
        claims |= _claims(source.name, rows, found, scores)
        claims[f"{source.name}_full_score"] = _score(source, full)
        tables.append(_table(config, source, rows, found, scores))
        raw[source.name] = [asdict(one) for one in found.values()]
    return PartResult(claims=claims, tables=tuple(tables), raw=raw)


def _fidelity_config(config: PromptsConfig, source: Recorded) -> FidelityConfig:
    paper = config.paper
    page_tokens = paper.scaled(paper.page_tokens)
    return FidelityConfig(
        name=source.name,
        tokens=config.tokens,
        texts=len(source.prompts),
        new_tokens=config.new_tokens,
        cap=paper.cap,
        every=page_tokens,
        page_tokens=page_tokens,
    )


def _score(source: Recorded, continuations: Sequence[str]) -> float:
    scores = (a.grade(text) for a, text in zip(source.graded, continuations, strict=True))
    return statistics.mean(scores)


def _claims(
    name: str,
    rows: Sequence[Row],
    found: Mapping[Arm, Fidelity],
    scores: Mapping[Arm, float],
) -> Numbers:
    """Means of every rule, and the decrease of H2O's KL by KVCrush over all splits and anchors."""
    made: Numbers = {}
    for arm, one in found.items():
        made |= means(f"{name}_{Rule(one.rule).name}", one)
        made[f"{name}_{Rule(one.rule).name}_score"] = scores[arm]
    crushing = [row for row in rows if row.one_set is not None]
    for gain, others in (
        (f"{name}_kl_gain", [row.against for row in crushing]),
        (f"{name}_kl_gain_one_set", [row.one_set for row in crushing]),
    ):
        pairs = [(found[o], found[r.arm]) for o, r in zip(others, crushing, strict=True) if o]
        made |= kl_gain(gain, pairs)
    return made


def _table(
    config: PromptsConfig,
    source: Recorded,
    rows: Sequence[Row],
    found: Mapping[Arm, Fidelity],
    scores: Mapping[Arm, float],
) -> Table:
    paper = config.paper
    lengths = [len(prompt) for prompt in source.prompts]
    return Table(
        name=f"kvcrush-{source.name}",
        caption=(
            f"{len(lengths)} prompts of {source.name} of {min(lengths):,} to {max(lengths):,} "
            f"tokens, processed in pages of {paper.scaled(paper.page_tokens)} with a cap of "
            f"{paper.cap} "
            f"({paper.scaled(paper.initial)} initial, {paper.scaled(paper.middle)} middle, "
            f"{paper.scaled(paper.recent)} recent), then continued by {config.new_tokens} tokens; "
            f"otherwise as in part fidelity. {source.score}: graded continuations."
        ),
        columns=(*COLUMNS, source.score),
        rows=tuple(
            (row.label, *row_of(found, row.arm, row.against, row.one_set)[1:], scores[row.arm])
            for row in rows
        ),
    )
