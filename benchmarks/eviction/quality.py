"""Part `quality`: correct answers and bytes by rule, budget and task, with 95 % intervals."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from benchmarks.common.graded_prompts import GradedPrompt, PromptMaker
from benchmarks.common.result import Cell as Shown
from benchmarks.common.result import Chart, Numbers, PartResult, Table
from benchmarks.eviction.cells import FULL, Cell, CellFile, CellKey
from benchmarks.eviction.config import CellsConfig
from quire.api.llm import LLM
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import InvariantError
from quire.models.loader import LoadedModel
from quire.sampling.outputs import RequestOutput
from quire.scheduler.schedule_config import ScheduleConfig

OLD_DEPTH = 0.25


class Judge:
    """Runs cells on a model.

    Args:
        model: model with trained weights.
        config: configuration; gives the rows at once.
        make_prompts: makes the prompts of a task.
    """

    def __init__(self, model: LoadedModel, config: CellsConfig, make_prompts: PromptMaker) -> None:
        self._model, self._config, self._make_prompts = model, config, make_prompts
        self._prompts_of: dict[str, list[GradedPrompt]] = {}

    def cell(self, key: CellKey) -> Cell:
        """Run all prompts of a cell; the KV memory holds all rows, so no request waits for it.

        Raises:
            InvariantError: a request failed.
        """
        started_s = time.perf_counter()
        prompts = self._prompts(key)
        llm = self._open(key)
        most = max(len(llm.encode(prompt.answer)) for prompt in prompts)
        options = SamplingParams(max_tokens=most, temperature=0.0)
        answers = llm.generate([prompt.prompt for prompt in prompts], options)
        return judged(key, prompts, answers, time.perf_counter() - started_s)

    def _prompts(self, key: CellKey) -> list[GradedPrompt]:
        if key.task not in self._prompts_of:
            self._prompts_of = {key.task: self._make_prompts(key.task, key.tokens, key.prompts)}
        return self._prompts_of[key.task]

    def _open(self, key: CellKey) -> LLM:
        rows, spec = self._config.rows, self._model.spec
        row_bytes = spec.kv_bytes_per_token(self._model.decoder.dtype.itemsize) * 2 * key.tokens
        kv = self.kv_config(key, rows * row_bytes + (8 << 20))
        return LLM(self._model, kv=kv, schedule=ScheduleConfig(max_num_seqs=rows))

    def kv_config(self, key: CellKey, memory: int) -> KVConfig:
        """KV configuration of a cell."""
        return KVConfig(
            memory=memory,
            page_tokens=key.page_tokens,
            evict=key.evict,
            prefix_cache=PrefixCacheConfig(enabled=False),
        )


def judged(
    key: CellKey,
    prompts: Sequence[GradedPrompt],
    answers: Sequence[RequestOutput],
    seconds: float,
) -> Cell:
    """Create a cell from the outputs of all its prompts.

    Raises:
        InvariantError: a request failed.
    """
    hits = [_is_hit(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    old = [hit for hit, prompt in zip(hits, prompts, strict=True) if _is_old(prompt)]
    return Cell(
        key=key,
        hits=sum(hits),
        old_hits=sum(old),
        old_prompts=len(old),
        request_bytes=sum(a.usage.kv_peak_bytes for a in answers) / len(answers),
        seconds=seconds,
        outcomes="".join("1" if hit else "0" for hit in hits),
    )


def _is_hit(prompt: GradedPrompt, answer: RequestOutput) -> bool:
    if answer.error is not None:
        raise InvariantError(f"expected no failed request in a benchmark, got: {answer.error}")
    return prompt.grade(answer.text) == 1.0


def _is_old(prompt: GradedPrompt) -> bool:
    return prompt.depth is not None and prompt.depth <= OLD_DEPTH


def measure_cells(
    run_cell: Callable[[CellKey], Cell],
    keys: Sequence[CellKey],
    stored: CellFile,
    show: Callable[[Cell], None],
) -> Iterator[Cell]:
    """Yield all cells; a stored cell does not run again."""
    known = stored.read()
    for key in keys:
        cell = known.get(key)
        if cell is None:
            cell = run_cell(key)
            stored.add(cell)
            show(cell)
        yield cell


def run_quality(
    judge: Judge,
    config: CellsConfig,
    keys: Sequence[CellKey],
    stored: CellFile,
    show: Callable[[Cell], None],
) -> PartResult:
    """Run the part.

    Args:
        judge: runs cells.
        config: configuration of the cells.
        keys: keys of all cells.
        stored: store of finished cells.
        show: called with every cell that runs.
    """
    cells = list(measure_cells(judge.cell, keys, stored, show))
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


def mean_share(by_task: Mapping[str, Cell]) -> float:
    """Mean fraction of correct answers over tasks."""
    return sum(cell.share for cell in by_task.values()) / len(by_task)


def tasks_table(
    name: str, label: str, config: CellsConfig, found: Mapping[str, Mapping[str, Cell]]
) -> Table:
    """Fractions of correct answers with their intervals.

    Args:
        name: of the table.
        label: heading of the first column.
        config: of the cells.
        found: cells by task, by what is compared.
    """
    rows: tuple[tuple[Shown, ...], ...] = tuple(
        (compared, *map(_with_interval, by_task.values()), mean_share(by_task))
        for compared, by_task in found.items()
    )
    return Table(
        name=name,
        caption=(
            f"Correct answers, {config.prompts} prompts of at most {config.tokens} tokens per "
            "cell, with their 95 % interval (Wilson)."
        ),
        columns=(label, *config.tasks, "mean"),
        rows=rows,
    )


def _with_interval(cell: Cell) -> str:
    low, high = cell.interval
    return f"{cell.share:.2f} [{low:.2f}, {high:.2f}]"


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
                rows=tuple(_row(rule, by_task) for rule, by_task in rows.items()),
            )


def _row(rule: str, by_task: Mapping[str, Cell]) -> tuple[str | float, ...]:
    shown = tuple(map(_shown, by_task.values()))
    return (rule, *shown, mean_share(by_task), _mean_bytes(by_task) / 1024)


def _shown(cell: Cell) -> str:
    low, high = cell.interval
    old = f" ({cell.old_hits / cell.old_prompts:.2f})" if cell.old_prompts else ""
    return f"{cell.share:.2f} [{low:.2f}, {high:.2f}]{old}"


def _charts(config: CellsConfig, cells: Sequence[Cell]) -> Iterator[Chart]:
    for when in config.schedules:
        lines = {}
        for budget in config.budgets:
            rows = rows_of(cells, when, budget)
            lines[f"{100 * budget:g} %"] = tuple(
                (rule, mean_share(by_task)) for rule, by_task in rows.items()
            )
        yield Chart(
            name=f"eviction-{when}".replace("_", "-"),
            title=f"Accuracy over all tasks, when={when}",
            x_label="rule",
            y_label="accuracy",
            lines=lines,
        )
