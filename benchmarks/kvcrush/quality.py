"""Parts `quality`, `heads` and `sweeps`: correct outputs with and without KVCrush.

quality   every base rule, by token and by page, and OpenVINO's form: the claims
heads     every base rule, with a retained set per KV head, at two budgets
sweeps    some of these, with one change at a time
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict

from benchmarks.common.result import Chart, Numbers, PartResult, Table
from benchmarks.eviction.cells import Cell, CellFile, CellKey
from benchmarks.eviction.quality import mean_share, measure_cells
from benchmarks.kvcrush import arms
from benchmarks.kvcrush.arm_tables import DYNAMIC, KMEANS, keys, tables
from benchmarks.kvcrush.arms import (
    BEST,
    Arm,
    ArmTable,
    Row,
    by_page,
    by_token,
    of_heads,
)
from benchmarks.kvcrush.config import CLAIMED, HEADS, QualityConfig
from benchmarks.kvcrush.gains import ByTask, Gain, gain_of

Groups = dict[str, list[tuple[Arm, Arm]]]
"""Pairs of arms (without, with) by claim name."""


class Results:
    """Cells by arm.

    Args:
        config: configuration of the part.
        cells: all cells.
        model, commit: model and commit in their keys.
    """

    def __init__(
        self, config: QualityConfig, cells: Iterable[Cell], model: str, commit: str | None
    ) -> None:
        self.config = config
        self._model, self._commit = model, commit
        self._cells = {cell.key: cell for cell in cells}

    @property
    def full(self) -> ByTask:
        """Cells of full KV by task."""
        config = self.config
        wanted = (arms.full_key(config, task, self._model, self._commit) for task in config.tasks)
        return {key.task: self._cells[key] for key in wanted}

    def of(self, arm: Arm) -> ByTask:
        """Cells of an arm by task."""
        config = self.config
        wanted = (
            arms.key_of(config, arm, task, self._model, self._commit) for task in config.tasks
        )
        return {key.task: self._cells[key] for key in wanted}

    def over_full(self, arm: Arm) -> float:
        """Correct outputs of an arm over those of full KV; 0 if full KV has none."""
        full = mean_share(self.full)
        return mean_share(self.of(arm)) / full if full else 0.0

    def gain(self, pairs: Sequence[tuple[Arm, Arm]]) -> Gain:
        """Gain of the second over the first of each pair of arms, over all pairs."""
        return gain_of([(self.of(without), self.of(crushing)) for without, crushing in pairs])


def run_quality(
    run_cell: Callable[[CellKey], Cell],
    config: QualityConfig,
    *,
    model: str,
    commit: str | None,
    stored: CellFile,
    show: Callable[[Cell], None],
) -> PartResult:
    """Run either quality part.

    Args:
        run_cell: runs a cell.
        config: configuration of the part.
        model: model name of the cells.
        commit: commit of the cells.
        stored: store of finished cells.
        show: called with every cell that runs.
    """
    cells = list(measure_cells(run_cell, keys(config, model, commit), stored, show))
    results = Results(config, cells, model, commit)
    return PartResult(
        claims=claims(results),
        tables=tuple(_table(results, table) for table in tables(config)),
        charts=(_shares_chart(results),) if "shares" in config.tables else (),
        raw={
            "cells": [cell.to_json() for cell in cells],
            "gains": {name: asdict(gain) for name, gain in gains(results).items()},
        },
    )


def gains(results: Results) -> dict[str, Gain]:
    """Gains of the configured tables, over all their base rules together; see `claims`."""
    groups: Groups = {}
    if set(CLAIMED) <= set(results.config.tables):
        groups |= _claimed(results.config)
    if "forms" in results.config.tables:
        groups |= _of_forms(results.config)
    if HEADS in results.config.tables:
        groups |= _of_heads(results.config)
    return {name: results.gain(pairs) for name, pairs in groups.items()}


def _claimed(config: QualityConfig) -> Groups:
    tokens, pages = by_token(config), by_page(config)
    openvino = [(one, one.openvino) for one in pages if one.openvino is not None]
    by_base = zip(tokens, openvino, strict=False)  # the pyramid is the last entry of `tokens`
    groups: Groups = {
        "quality_gain": [(one.alone, one.crushing) for one in tokens],
        "quality_gain_one_set": [(one.one_set, one.crushing) for one in tokens],
        "one_set_gain": [(one.alone, one.one_set) for one in tokens],
        "page_gain": [(one.alone, one.crushing) for one in pages],
        "page_gain_one_set": [(one.one_set, one.crushing) for one in pages],
        "openvino_gain": [(one.alone, form) for one, form in openvino],
        "openvino_gain_one_set": [(one.one_set, form) for one, form in openvino],
        "openvino_over_tokens_gain": [(one.alone, form) for one, (_, form) in by_base],
    }
    for one in tokens:
        groups[f"quality_gain_{one.alone.rule.name}"] = [(one.alone, one.crushing)]
        groups[f"quality_gain_one_set_{one.alone.rule.name}"] = [(one.one_set, one.crushing)]
    return groups


def _of_heads(config: QualityConfig) -> Groups:
    """Pairs by form and budget, over all base rules and for each of them."""
    groups: Groups = {}
    for one in of_heads(config):
        for form, arm in one.forms.items():
            name = _heads_claim(form, one.percent)
            groups.setdefault(name, []).append((one.alone, arm))
            if form == BEST:
                groups[f"{name}_{one.name}"] = [(one.alone, arm)]
    return groups


def _heads_claim(form: str, percent: float) -> str:
    """Name of a claim; the form that counts has no suffix."""
    kind = "" if form == BEST else "_" + re.sub(r"\W+", "_", form)
    return f"heads{kind}_quality_gain_{percent:g}"


def _rules_not_below(results: Results) -> Numbers:
    """Number of base rules whose accuracy does not fall, by form and budget."""
    made: Numbers = {}
    for one in of_heads(results.config):
        for form, arm in one.forms.items():
            name = _heads_claim(form, one.percent).replace("quality_gain", "rules_not_below")
            gained = results.gain([(one.alone, arm)]).mean >= 0
            made[name] = made.get(name, 0) + int(gained)
    return made


def _of_forms(config: QualityConfig) -> Groups:
    [table] = [table for table in tables(config) if table.name == "forms"]
    return {
        name: [
            (row.against, row.arm)
            for row in table.rows
            if row.against is not None and row.label.endswith(form)
        ]
        for name, form in (("dynamic_share_gain", DYNAMIC), ("kmeans_gain", KMEANS))
    }


def claims(results: Results) -> Numbers:
    """Gains with intervals, and correct outputs relative to full KV for every policy at the budget.

    quality_gain, page_gain, openvino_gain: KVCrush by token, KVCrush by page and OpenVINO's form,
    over the base policies with a retained set per head. openvino_over_tokens_gain: OpenVINO's form
    over the base policies by token. Suffix _one_set: over the base policies with one retained set
    for the heads of a layer, as in KVCrush (and the paper's H2O); this is the gain of the
    representatives. one_set_gain: one retained set over a set per head; this is the cost of
    sharing. With a policy's name: the gain for that policy. dynamic_share_gain, kmeans_gain: over
    KVCrush with a static share.

    heads_quality_gain: KVCrush with a retained set per KV head over the base policies, at a budget
    in percent; the name has the form if it is not `best`. heads_rules_not_below: base rules with a
    gain of at least 0.
    """
    made: Numbers = {}
    for name, gain in gains(results).items():
        made |= gain.claims(name)
    if HEADS in results.config.tables:
        made |= _rules_not_below(results)
    if not set(CLAIMED) <= set(results.config.tables):
        return made
    over = {
        row.arm.rule.name: results.over_full(row.arm)
        for table in tables(results.config)
        if table.name in CLAIMED
        for row in table.rows
    }
    made |= {f"quality_over_full_{name}": share for name, share in over.items()}
    return made | {
        "full_quality": mean_share(results.full),
        "quality_over_full_best": max(over.values()),
    }


def _table(results: Results, table: ArmTable) -> Table:
    config, first = results.config, table.rows[0].arm
    return Table(
        name=f"kvcrush-{table.name}",
        caption=(
            f"{table.caption}. Accuracy over {config.prompts} prompts of at most "
            f"{config.tokens} tokens per cell, cap {100 * config.budget:g} % and when={first.when} "
            "unless stated otherwise. Gain: over the base rule, or the first row of the group; "
            "over one set: over the base rule with one retained set for a layer's heads, as in "
            "KVCrush. The same prompts, 95 % by bootstrap over tasks and prompts."
        ),
        columns=("rule", "cap", *config.tasks, "mean", "over full", "gain", "over one set"),
        rows=(_full_row(results), *(_row(results, row) for row in table.rows)),
    )


def _full_row(results: Results) -> tuple[str | int | float | None, ...]:
    full, tokens = results.full, results.config.tokens
    shares = (cell.share for cell in full.values())
    return ("full", tokens, *shares, mean_share(full), 1.0, None, None)


def _row(results: Results, row: Row) -> tuple[str | int | float | None, ...]:
    found = results.of(row.arm)
    shares = (cell.share for cell in found.values())
    over = results.over_full(row.arm)
    won = (_shown(results, other, row.arm) for other in (row.against, row.one_set))
    return (row.label, row.arm.cap, *shares, mean_share(found), over, *won)


def _shown(results: Results, without: Arm | None, arm: Arm) -> str | None:
    if without is None:
        return None
    gain = results.gain([(without, arm)])
    return f"{gain.mean:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]"


def _shares_chart(results: Results) -> Chart:
    """Correct outputs over the fraction of representatives, with a line for each base rule."""
    return Chart(
        name="kvcrush-shares",
        title="Accuracy over all tasks",
        x_label="share of the budget for representatives",
        y_label="accuracy",
        lines=dict(_share_lines(results)),
    )


def _share_lines(
    results: Results,
) -> Iterator[tuple[str, tuple[tuple[str | int | float, int | float], ...]]]:
    config = results.config
    for base in config.swept:
        made = ((s, arms.base_arm(config, arms.crushed(base, s))) for s in config.shares)
        yield base.text, tuple((s, mean_share(results.of(arm))) for s, arm in made)
