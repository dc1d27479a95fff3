"""Part `prompts`: paged H2O against paged KVCrush on recorded prompts, the paper's figure 8.

As in part `fidelity`, in the paper's pages and caps; and the answers are judged, for models that
know the task. H2O scores a page by the sum of its tokens, as the paper's does; that one has one
kept set for a layer, so both stand here.
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
from benchmarks.kvcrush.reading import Fidelity, JudgeText, measure
from quire.layout.eviction import PREFILL_AND_DECODE
from quire.models.loader import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Prompts of one file of examples.

    Attributes:
        name: name of the task.
        score: name of the mean score.
        prompts: token ids, within the configured length.
        requested: the same prompts, with their judges.
    """

    name: str
    score: str
    prompts: tuple[list[int], ...]
    requested: tuple[GradedPrompt, ...]


def run_prompts(
    model: LoadedModel, config: PromptsConfig, recorded: Sequence[Recorded], rouge_l: JudgeText
) -> PartResult:
    """The part.

    Args:
        model: reads.
        config: of the part.
        recorded: prompts of one or more files.
        rouge_l: judges continuations against those with full KV.
    """
    rows = paper_rows(config.paper, PREFILL_AND_DECODE, config.shares, config.anchors)
    claims: Numbers = {}
    tables, raw = [], {}
    for own in recorded:
        reading = _reading(config, own)
        arms = [row.arm for row in rows]
        full, found = measure(model, reading, arms, own.prompts, rouge_l)
        scores = {arm: _score(own, one.continuations) for arm, one in found.items()}
        claims |= _claims(own.name, rows, found, scores)
        claims[f"{own.name}_full_score"] = _score(own, full)
        tables.append(_table(config, own, rows, found, scores))
        raw[own.name] = [asdict(one) for one in found.values()]
    return PartResult(claims=claims, tables=tuple(tables), raw=raw)


def _reading(config: PromptsConfig, own: Recorded) -> FidelityConfig:
    paper = config.paper
    page_tokens = paper.scaled(paper.page_tokens)
    return FidelityConfig(
        name=own.name,
        tokens=config.tokens,
        texts=len(own.prompts),
        new_tokens=config.new_tokens,
        cap=paper.cap,
        every=page_tokens,
        page_tokens=page_tokens,
    )


def _score(own: Recorded, continuations: Sequence[str]) -> float:
    scores = (a.grade(text) for a, text in zip(own.requested, continuations, strict=True))
    return statistics.mean(scores)


def _claims(
    name: str,
    rows: Sequence[Row],
    found: Mapping[Arm, Fidelity],
    scores: Mapping[Arm, float],
) -> Numbers:
    """Of every rule; and what KVCrush, all splits and anchors together, takes off the KL of H2O."""
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
    own: Recorded,
    rows: Sequence[Row],
    found: Mapping[Arm, Fidelity],
    scores: Mapping[Arm, float],
) -> Table:
    paper = config.paper
    lengths = [len(prompt) for prompt in own.prompts]
    return Table(
        name=f"kvcrush-{own.name}",
        caption=(
            f"{len(lengths)} prompts of {own.name}, {min(lengths):,} to {max(lengths):,} tokens, "
            f"read on in pages of {paper.scaled(paper.page_tokens)} under a cap of {paper.cap} "
            f"({paper.scaled(paper.initial)} initial, {paper.scaled(paper.middle)} middle, "
            f"{paper.scaled(paper.recent)} recent), then answered by {config.new_tokens} tokens; "
            f"otherwise as part fidelity. {own.score}: of the answers, by the task."
        ),
        columns=(*COLUMNS, own.score),
        rows=tuple(
            (row.label, *row_of(found, row.arm, row.against, row.one_set)[1:], scores[row.arm])
            for row in rows
        ),
    )
