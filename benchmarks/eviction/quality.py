"""Part `quality`: right answers and bytes of rules x budgets x tasks, with 95 % intervals."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from benchmarks.common.graded_prompts import GradedPrompt, PromptMaker
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
        self._requested: dict[str, list[GradedPrompt]] = {}

    def cell(self, key: CellKey) -> Cell:
        """Run all prompts of a cell; the KV memory holds all rows, so no request waits for it.

        Raises:
            InvariantError: a request failed.
        """
        started_s = time.perf_counter()
        requested = self._prompts(key)
        llm = self._open(key)
        most = max(len(llm.encode(found.answer)) for found in requested)
        options = SamplingParams(max_tokens=most, temperature=0.0)
        answers = llm.generate([found.prompt for found in requested], options)
        return judged(key, requested, answers, time.perf_counter() - started_s)

    def _prompts(self, key: CellKey) -> list[GradedPrompt]:
        if key.task not in self._requested:
            self._requested = {key.task: self._make_prompts(key.task, key.tokens, key.prompts)}
        return self._requested[key.task]

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
    requested: Sequence[GradedPrompt],
    answers: Sequence[RequestOutput],
    seconds: float,
) -> Cell:
    """A cell of answers to all of its prompts.

    Raises:
        InvariantError: a request failed.
    """
    hits = [_is_hit(found, answer) for found, answer in zip(requested, answers, strict=True)]
    old = [hit for hit, found in zip(hits, requested, strict=True) if _is_old(found)]
    return Cell(
        key=key,
        hits=sum(hits),
        old_hits=sum(old),
        old_prompts=len(old),
        request_bytes=sum(a.usage.kv_peak_bytes for a in answers) / len(answers),
        seconds=seconds,
        outcomes="".join("1" if hit else "0" for hit in hits),
    )


def _is_hit(requested: GradedPrompt, answer: RequestOutput) -> bool:
    if answer.error is not None:
        raise InvariantError(f"a request of a bench failed: {answer.error}")
    return requested.grade(answer.text) == 1.0


def _is_old(requested: GradedPrompt) -> bool:
    return requested.depth is not None and requested.depth <= OLD_DEPTH


def measure_cells(
    ask: Callable[[CellKey], Cell],
    keys: Sequence[CellKey],
    kept: CellFile,
    show: Callable[[Cell], None],
) -> Iterator[Cell]:
    """Yield all cells; cells that the file already holds do not run again."""
    known = kept.read()
    for key in keys:
        cell = known.get(key)
        if cell is None:
            cell = ask(key)
            kept.add(cell)
            show(cell)
        yield cell


def run_quality(
    judge: Judge,
    config: CellsConfig,
    keys: Sequence[CellKey],
    kept: CellFile,
    show: Callable[[Cell], None],
) -> PartResult:
    """The quality part of the bench.

    Args:
        judge: runs cells.
        config: configuration of the cells.
        keys: keys of all cells.
        kept: file that finished cells are read from and written to.
        show: called with every cell that runs.
    """
    cells = list(measure_cells(judge.cell, keys, kept, show))
    return PartResult(
        claims=claims(config, cells),
        tables=tuple(_tables(config, cells)),
        charts=tuple(_charts(config, cells)),
        raw={"cells": [cell.to_json() for cell in cells]},
    )


def rows_of(cells: Sequence[Cell], when: str, budget: float) -> dict[str, dict[str, Cell]]:
    """Rule to task to cell, of one schedule and budget; full KV is in every one."""
    found: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        if cell.key.rule == FULL or (cell.key.when, cell.key.budget) == (when, budget):
            found.setdefault(cell.key.rule, {})[cell.key.task] = cell
    return found


def mean_share(by_task: Mapping[str, Cell]) -> float:
    """Mean of right answers over tasks."""
    return sum(cell.share for cell in by_task.values()) / len(by_task)


def _mean_bytes(by_task: Mapping[str, Cell]) -> float:
    return sum(cell.request_bytes for cell in by_task.values()) / len(by_task)


def claims(config: CellsConfig, cells: Sequence[Cell]) -> Numbers:
    """Mean share over all tasks, and bytes of a request over full KV's, of every arm."""
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
                    f"Right answers, {config.prompts} prompts of at most {config.tokens} tokens a "
                    f"cell, cap {int(budget * config.tokens)} tokens ({100 * budget:g} %), when="
                    f"{when}. In a cell: share, its 95 % interval (Wilson), and the share about "
                    "the first quarter of the prompt; KV: most bytes of a request, mean."
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
            title=f"Right answers over all tasks, when={when}",
            x_label="rule",
            y_label="share",
            lines=lines,
        )
