"""Parts of the eviction benchmark; correct answers and bytes by rule, budget and task."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from benchmarks.common.result import Chart, Numbers, PartResult, Table
from benchmarks.eviction.config import CellsConfig, EvictionBenchConfig
from benchmarks.eviction.cost import run_cost, run_ready
from benchmarks.eviction.texts import run_perplexity, run_retained
from benchmarks.quality.cells import Cell, CellKey, Judge, Material, mean_share, shown
from quire.policies.registry import FULL

Part = Callable[[EvictionBenchConfig], PartResult]


def make_parts(material: Material) -> Mapping[str, Part]:
    """Create all parts."""

    def quality(config: EvictionBenchConfig) -> PartResult:
        keys = list(cell_keys(config.quality, config.model, material.commit))
        make_prompts = material.prompt_maker_for(material.model)
        judge = Judge(material.model, config.quality.rows, make_prompts)
        return quality_result(config.quality, list(material.cells(judge.cell, keys)))

    return {
        "quality": quality,
        "perplexity": lambda c: run_perplexity(material.model, c.perplexity, material.running),
        "kept": lambda c: run_retained(material.model, c.kept, material.running),
        "cost": lambda c: run_cost(c.cost),
        "ready": lambda c: run_ready(c.ready),
    }


def cell_keys(config: CellsConfig, model: str, commit: str | None) -> Iterator[CellKey]:
    """All cells, task by task, full KV first.

    Raises:
        ConfigError: a budget is too small for a rule.
    """
    arms = [(FULL, "", 1.0, FULL)]
    for when in config.schedules:
        for budget in config.budgets:
            for rule in config.rules:
                evict = rule.evict(int(budget * config.tokens), config.every, when)
                arms.append((rule.text, when, budget, evict))
    for task in config.tasks:
        for rule_text, when, budget, evict in arms:
            yield CellKey(
                model=model,
                task=task,
                tokens=config.tokens,
                prompts=config.prompts,
                rule=rule_text,
                when=when,
                budget=budget,
                evict=evict,
                commit=commit,
            )


def quality_result(config: CellsConfig, cells: Sequence[Cell]) -> PartResult:
    """Result of the part quality."""
    return PartResult(
        claims=claims(config, cells),
        tables=tuple(_tables(config, cells)),
        charts=tuple(_charts(config, cells)),
        raw={"cells": [cell.to_json() for cell in cells]},
    )


def rows_of(cells: Sequence[Cell], when: str, budget: float) -> dict[str, dict[str, Cell]]:
    """Cells of a schedule and a budget by rule and task; full KV is always included."""
    found: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        if cell.key.rule == FULL or (cell.key.when, cell.key.budget) == (when, budget):
            found.setdefault(cell.key.rule, {})[cell.key.task] = cell
    return found


def _mean_bytes(by_task: Mapping[str, Cell]) -> float:
    return sum(cell.request_bytes for cell in by_task.values()) / len(by_task)


def claims(config: CellsConfig, cells: Sequence[Cell]) -> Numbers:
    """Mean fraction over all tasks, and bytes of a request over full KV's, for every arm."""
    made: Numbers = {}
    for when in config.schedules:
        for budget in config.budgets:
            by_rule = rows_of(cells, when, budget)
            for rule in config.rules:
                name = f"{when}_{100 * budget:g}_{rule.name}".replace(".", "_")
                made[f"{name}_quality"] = mean_share(by_rule[rule.text])
                full_bytes = _mean_bytes(by_rule[FULL])
                made[f"{name}_bytes_over_full"] = _mean_bytes(by_rule[rule.text]) / full_bytes
            made["full_quality"] = mean_share(by_rule[FULL])
    return made


def _tables(config: CellsConfig, cells: Sequence[Cell]) -> Iterator[Table]:
    for when in config.schedules:
        for budget in config.budgets:
            rows = rows_of(cells, when, budget)
            yield Table(
                name=f"eviction-{when}-{100 * budget:g}".replace("_", "-"),
                caption=(
                    f"Accuracy over {config.prompts} prompts of at most {config.tokens} tokens "
                    f"per cell, cap {int(budget * config.tokens)} tokens ({100 * budget:g} %), "
                    f"when={when}. In a cell: accuracy, its 95 % interval (Wilson), accuracy for "
                    "facts in the first quarter of the prompt; KV: mean peak bytes of a request."
                ),
                columns=("rule", *config.tasks, "mean", "KV KiB"),
                rows=tuple(
                    (rule, *map(_with_old, of.values()), mean_share(of), _mean_bytes(of) / 1024)
                    for rule, of in rows.items()
                ),
            )


def _with_old(cell: Cell) -> str:
    old = f" ({cell.old_hits / cell.old_prompts:.2f})" if cell.old_prompts else ""
    return shown(cell) + old


def _charts(config: CellsConfig, cells: Sequence[Cell]) -> Iterator[Chart]:
    for when in config.schedules:
        yield Chart(
            name=f"eviction-{when}".replace("_", "-"),
            title=f"Accuracy over all tasks, when={when}",
            x_label="rule",
            y_label="accuracy",
            lines={
                f"{100 * budget:g} %": tuple(
                    (rule, mean_share(of)) for rule, of in rows_of(cells, when, budget).items()
                )
                for budget in config.budgets
            },
        )
