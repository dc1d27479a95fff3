"""Parts of the KVCrush benchmark; correct outputs with and without KVCrush.

quality   every base rule, by token and by page, and OpenVINO's form: the claims
heads     every base rule, with a retained set per KV head, at two budgets

All rules run on the same prompts. Rules with equal statistics share one prefill: if eviction starts
at the end of prefill (`when=prefill_end`), the engine's prefix cache holds the prompt's KV with
these statistics, and the next rule starts at the prompt's last block.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.graded_prompts import GradedPrompt, PromptMaker
from benchmarks.common.intervals import bootstrap_mean
from benchmarks.common.result import Cell as Shown
from benchmarks.common.result import Numbers, PartResult, Table
from benchmarks.common.rouge import rouge_l
from benchmarks.kvcrush.arms import BEST, PAGES, Arm, Compared, by_page, by_token, of_heads
from benchmarks.kvcrush.config import KVCrushBenchConfig, QualityConfig
from benchmarks.kvcrush.fidelity import run_fidelity
from benchmarks.kvcrush.overhead import run_overhead
from benchmarks.quality.cells import Cell, CellKey, Material, judged, mean_share
from quire.api.llm import LLM
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import InvariantError
from quire.models.loader import LoadedModel
from quire.policies.registry import FULL
from quire.scheduler.schedule_config import ScheduleConfig

Part = Callable[[KVCrushBenchConfig], PartResult]
ByTask = Mapping[str, Cell]
Groups = dict[str, list[tuple[Arm, Arm]]]
"""Pairs of arms (without, with) by claim name."""


def make_parts(material: Material) -> Mapping[str, Part]:
    """Create all parts."""

    def run(
        config: KVCrushBenchConfig, part: QualityConfig, tables: Sequence["ArmTable"]
    ) -> PartResult:
        model, commit = material.model, material.commit
        arms = dict.fromkeys(arm for table in tables for row in table.rows for arm in row.arms)
        wanted = keys(part, arms, config.model, commit)
        judge = ManyRules(model, part, material.prompt_maker_for(model), [k.rule for k in wanted])
        cells = list(material.cells(judge.cell, wanted))
        return quality_result(Results(part, cells, config.model, commit), tables)

    return {
        "quality": lambda c: run(c, c.quality, claimed_tables(c.quality)),
        "heads": lambda c: run(c, c.heads, (heads_table(c.heads),)),
        "fidelity": lambda c: run_fidelity(material.model, c.fidelity, material.running, rouge_l),
        "long": lambda c: run_fidelity(material.model, c.long, material.running, rouge_l),
        "overhead": lambda c: run_overhead(c.overhead),
    }


# ---- tables of arms ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A variant in a table.

    Attributes:
        label: label in tables.
        arm: the variant.
        against: the base policy with a retained set per head; None: this variant is itself a
            baseline.
        one_set: the base policy with one retained set for the heads of a layer, as in KVCrush.
    """

    label: str
    arm: Arm
    against: Arm | None = None
    one_set: Arm | None = None

    @property
    def arms(self) -> Iterator[Arm]:
        """The row's arm and the arms it is compared with."""
        yield from (arm for arm in (self.against, self.one_set, self.arm) if arm is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmTable:
    """A table of arms.

    Attributes:
        name: name of the table.
        caption: what the table changes.
        groups: pairs that the claims compare.
        rows: rows in table order.
    """

    name: str
    caption: str
    groups: Groups
    rows: tuple[Row, ...]


def _rows(one: Compared) -> Iterator[Row]:
    alone, shared = one.alone, one.one_set
    label = alone.rule.text.removesuffix(f",{PAGES}").removesuffix(f":{PAGES}")
    yield Row(label=label, arm=alone)
    yield Row(label=f"{label}, one set per layer", arm=shared, against=alone)
    for form, name in zip(one.forms, ("KVCrush", "OpenVINO's form"), strict=False):
        yield Row(label=f"{label} + {name}", arm=form, against=alone, one_set=shared)


def claimed_tables(config: QualityConfig) -> tuple[ArmTable, ArmTable]:
    """Tables of the part quality, with the pairs of its gains.

    quality_gain, page_gain, openvino_gain: KVCrush by token, KVCrush by page and OpenVINO's form,
    over the base policies with a retained set per head. Suffix _one_set: over the base policies
    with one retained set for the heads of a layer, as in KVCrush (and the paper's H2O); this is the
    gain of the representatives. one_set_gain: one retained set over a set per head; this is the
    cost of sharing. With a policy's name: the gain for that policy.
    """
    tokens, pages = by_token(config), by_page(config)
    openvino = [(one, one.openvino) for one in pages if one.openvino is not None]
    groups: Groups = {
        "quality_gain": [(one.alone, one.crushing) for one in tokens],
        "quality_gain_one_set": [(one.one_set, one.crushing) for one in tokens],
        "one_set_gain": [(one.alone, one.one_set) for one in tokens],
    }
    for one in tokens:
        groups[f"quality_gain_{one.alone.rule.name}"] = [(one.alone, one.crushing)]
    by_tokens = ArmTable(
        name="bases",
        caption=f"Rules with and without KVCrush, share {config.share:g}, at equal caps",
        groups=groups,
        rows=tuple(row for one in tokens for row in _rows(one)),
    )
    by_pages = ArmTable(
        name="pages",
        caption=(
            f"The same by pages of {config.page_tokens}; OpenVINO's form retains {config.blocks} "
            "pages in addition to its cap, which is lowered by as many"
        ),
        groups={
            "page_gain": [(one.alone, one.crushing) for one in pages],
            "page_gain_one_set": [(one.one_set, one.crushing) for one in pages],
            "openvino_gain": [(one.alone, form) for one, form in openvino],
            "openvino_gain_one_set": [(one.one_set, form) for one, form in openvino],
        },
        rows=tuple(row for one in pages for row in _rows(one)),
    )
    return by_tokens, by_pages


def heads_table(config: QualityConfig) -> ArmTable:
    """Table of the part heads.

    heads_quality_gain: KVCrush with a retained set per KV head over the base policies, at a budget
    in percent; the name has the form if it is not `best`.
    """
    rows: list[Row] = []
    groups: Groups = {}
    for one in of_heads(config):
        label = f"{one.alone.rule.text}, {one.percent:g} %"
        rows.append(Row(label=label, arm=one.alone))
        for form, arm in one.forms.items():
            rows.append(Row(label=f"{label} + KVCrush, {form}", arm=arm, against=one.alone))
            kind = "" if form == BEST else "_" + re.sub(r"\W+", "_", form)
            name = f"heads{kind}_quality_gain_{one.percent:g}"
            groups.setdefault(name, []).append((one.alone, arm))
    return ArmTable(
        name="heads",
        caption=f"One retained set per KV head, share {config.share:g}, at equal caps",
        groups=groups,
        rows=tuple(rows),
    )


# ---- cells ---------------------------------------------------------------------------------------


def key_of(
    config: QualityConfig, arm: Arm | None, task: str, model: str, commit: str | None
) -> CellKey:
    """Key of the cell of an arm and a task; None: full KV."""
    return CellKey(
        model=model,
        task=task,
        tokens=config.tokens,
        prompts=config.prompts,
        rule=FULL if arm is None else arm.rule.text,
        when="" if arm is None else arm.when,
        budget=1.0 if arm is None else arm.cap / config.tokens,
        evict=FULL if arm is None else arm.rule.evict(arm.cap, config.every, arm.when),
        commit=commit,
        page_tokens=config.page_tokens,
    )


def keys(
    config: QualityConfig, arms: Iterable[Arm], model: str, commit: str | None
) -> list[CellKey]:
    """Keys of all cells, task by task, full KV first.

    Raises:
        ConfigError: a budget is too small for a rule.
    """
    all_arms = (None, *arms)
    return [key_of(config, arm, task, model, commit) for task in config.tasks for arm in all_arms]


CACHED_OVER_KV = 1.5
"""Bytes of a cached prompt, with recorded statistics, over the bytes of its keys and values."""


@dataclass(frozen=True, slots=True)
class _Task:
    """The prompts of a task, and an engine that caches their prefills."""

    name: str
    llm: LLM
    prompts: list[GradedPrompt]
    token_ids: list[list[int]]
    answer_tokens: int


class ManyRules:
    """Runs cells on a model, task by task; each task starts with an empty KV memory.

    Args:
        model: model with trained weights.
        config: lengths and rows.
        make_prompts: makes the prompts of a task.
        rules: all policies that will run, without caps.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: QualityConfig,
        make_prompts: PromptMaker,
        rules: Sequence[str],
    ) -> None:
        self._model, self._config, self._make_prompts = model, config, make_prompts
        self._allow = "; ".join(dict.fromkeys(rule for rule in rules if rule != FULL))
        self._task: _Task | None = None

    @property
    def num_processed_tokens(self) -> int:
        """Tokens processed by the engine of the current task; 0 before the first cell."""
        return 0 if self._task is None else self._task.llm.engine.num_processed_tokens

    def cell(self, key: CellKey) -> Cell:
        """Run all prompts of a cell.

        Raises:
            InvariantError: a request failed.
        """
        started_s = time.perf_counter()
        if self._task is None or self._task.name != key.task:
            self._task = None  # free its memory first
            self._task = self._begun(key)
        task = self._task
        options = SamplingParams(max_tokens=task.answer_tokens, temperature=0.0)
        answers = task.llm.generate(task.token_ids, options, evict=key.evict)
        return judged(key, task.prompts, answers, time.perf_counter() - started_s)

    def _begun(self, key: CellKey) -> _Task:
        rows, number_bytes = self._config.rows, self._model.decoder.dtype.itemsize
        row_bytes = self._model.spec.kv_bytes_per_token(number_bytes) * key.tokens
        cached = min(int(CACHED_OVER_KV * row_bytes) * key.prompts, self._config.cache)
        kv = KVConfig(
            memory=2 * rows * row_bytes + cached + (8 << 20),
            page_tokens=key.page_tokens,
            evict=FULL,
            evict_allow=self._allow,
        )
        llm = LLM(self._model, kv=kv, schedule=ScheduleConfig(max_num_seqs=rows))
        prompts = self._make_prompts(key.task, key.tokens, key.prompts)
        return _Task(
            name=key.task,
            llm=llm,
            prompts=prompts,
            token_ids=[llm.encode(prompt.prompt) for prompt in prompts],
            answer_tokens=max(len(llm.encode(prompt.answer)) for prompt in prompts),
        )


# ---- gains ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Difference of two accuracies, mean over tasks.

    Attributes:
        mean: accuracy with the method minus accuracy without it.
        low, high: 95 % bootstrap interval: tasks are resampled, then prompts inside each task.
    """

    mean: float
    low: float
    high: float


def gain_of(pairs: Sequence[tuple[ByTask, ByTask]]) -> Gain:
    """Gain of the second over the first of each pair.

    A prompt counts with its mean over the pairs: they share the prompt, so they are not
    independent.

    Args:
        pairs: cells by task, without and with the method; all pairs have the same tasks.
    """
    by_task = [
        np.mean([_outcomes(after[task]) - _outcomes(before[task]) for before, after in pairs], 0)
        for task in pairs[0][0]
    ]
    low, high = bootstrap_mean(by_task, groups_too=True)
    return Gain(mean=float(np.mean([gain.mean() for gain in by_task])), low=low, high=high)


def _outcomes(cell: Cell) -> NDArray[np.float64]:
    if len(cell.outcomes) != cell.key.prompts:
        raise InvariantError(
            f"expected an outcome for each of {cell.key.prompts} prompts of "
            f"{cell.key.evict!r}, got {len(cell.outcomes)}; use another folder for --out"
        )
    return np.array([outcome == "1" for outcome in cell.outcomes], dtype=np.float64)


class Results:
    """Cells by arm.

    Args:
        config: configuration of the part.
        cells: all cells.
        model, commit: model and commit in their keys.
    """

    def __init__(
        self, config: QualityConfig, cells: Sequence[Cell], model: str, commit: str | None
    ) -> None:
        self.config, self.cells = config, cells
        self._model, self._commit = model, commit
        self._cells = {cell.key: cell for cell in cells}

    def of(self, arm: Arm | None) -> ByTask:
        """Cells of an arm by task; None: full KV."""
        return {
            task: self._cells[key_of(self.config, arm, task, self._model, self._commit)]
            for task in self.config.tasks
        }

    def over_full(self, arm: Arm | None) -> float:
        """Correct outputs of an arm over those of full KV; 0 if full KV has none."""
        full = mean_share(self.of(None))
        return mean_share(self.of(arm)) / full if full else 0.0

    def gain(self, pairs: Sequence[tuple[Arm, Arm]]) -> Gain:
        """Gain of the second over the first of each pair of arms, over all pairs."""
        return gain_of([(self.of(without), self.of(crushing)) for without, crushing in pairs])


def quality_result(results: Results, tables: Sequence[ArmTable]) -> PartResult:
    """Result of either part."""
    return PartResult(
        claims=claims(results, tables),
        tables=tuple(_table(results, table) for table in tables),
        raw={"cells": [cell.to_json() for cell in results.cells]},
    )


def claims(results: Results, tables: Sequence[ArmTable]) -> Numbers:
    """Gains with intervals over all base rules together, and accuracy over that of full KV.

    heads_rules_not_below: base rules with a gain of at least 0.
    """
    made: Numbers = {}
    for name, pairs in {k: v for table in tables for k, v in table.groups.items()}.items():
        made |= {f"{name}_{key}": value for key, value in asdict(results.gain(pairs)).items()}
        if name.startswith("heads"):
            gains = [results.gain([pair]).mean for pair in pairs]
            below = name.replace("quality_gain", "rules_not_below")
            made[below] = sum(gain >= 0 for gain in gains)
    over = {row.arm.rule.name: results.over_full(row.arm) for table in tables for row in table.rows}
    made |= {f"quality_over_full_{name}": share for name, share in over.items()}
    made["full_quality"] = mean_share(results.of(None))
    made["quality_over_full_best"] = max(over.values())
    return made


def _table(results: Results, table: ArmTable) -> Table:
    config = results.config

    def cells(label: str, arm: Arm | None, *others: Arm | None) -> tuple[Shown, ...]:
        found = results.of(arm)
        gains = [None if other is None or arm is None else (other, arm) for other in others]
        return (
            label,
            config.tokens if arm is None else arm.cap,
            *(cell.share for cell in found.values()),
            mean_share(found),
            results.over_full(arm),
            *(None if pair is None else _shown(results.gain([pair])) for pair in gains),
        )

    return Table(
        name=f"kvcrush-{table.name}",
        caption=(
            f"{table.caption}. Accuracy over {config.prompts} prompts of at most "
            f"{config.tokens} tokens per cell, cap {100 * config.budget:g} % and "
            f"when={config.when} unless stated otherwise. Gain: over the base rule; over one set: "
            "over the base rule with one retained set for a layer's heads, as in KVCrush. The same "
            "prompts, 95 % by bootstrap over tasks and prompts."
        ),
        columns=("rule", "cap", *config.tasks, "mean", "over full", "gain", "over one set"),
        rows=(
            cells("full", None, None, None),
            *(cells(row.label, row.arm, row.against, row.one_set) for row in table.rows),
        ),
    )


def _shown(gain: Gain) -> str:
    return f"{gain.mean:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]"
