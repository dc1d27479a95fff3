"""Runs kvpress's presses on the prompts of a leaderboard; finished cells are stored.

Token ids, output lengths, stop texts and scores are those of the leaderboard. Before a press runs,
the other environment must give exactly the scores of full KV: without a press on all prompts, and
with each press at a compression ratio of 0 on the first prompts of each task.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from benchmarks.kvpress.process import PressProcess
from benchmarks.kvpress.spec import (
    KVPRESS,
    SCHEDULES,
    entry_of,
    left_out,
    removed_of,
    spec_of,
)
from quire.api.llm import LLM
from quire.errors import ConfigError, RequestError
from quire.evals.board.grid import BoardEntry
from quire.evals.board.result import BoardResult, Row
from quire.evals.board.run import Board, BoardConfig, Report
from quire.evals.suite.base import EvalTask, Sample
from quire.evals.suite.cells import CellFolder, CellResult, PromptResult
from quire.evals.tune.scores import fingerprint_of
from quire.layout.eviction import PREFILL_END
from quire.sampling.detokenizer import Detokenizer, StopChecker

NO_PRESS = ""
"""Text of the run without a press."""

CHECKED_PROMPTS = 2
"""Prompts of each task on which a press at a compression ratio of 0 is compared with full KV."""

_NOTHING_REMOVED = "100%"


@dataclass(frozen=True, slots=True, kw_only=True)
class PressCell(CellResult):
    """All prompts of a cell of kvpress.

    Attributes:
        retained_bytes: bytes of the cache's memory after each prompt's prefill.
        visible: fraction of the prompt's keys that the next token can read then.
    """

    retained_bytes: tuple[int, ...]
    visible: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PressRun:
    """What is known about kvpress's rows beyond their scores.

    Attributes:
        versions: of the packages of the other environment.
        left_out: why presses did not run, by name.
    """

    versions: Mapping[str, str]
    left_out: Mapping[str, str]


class PressRunner:
    """Runs presses.

    Args:
        process: runs kvpress.
        llm: an engine with the model of the leaderboard; it encodes and decodes.
        config: the leaderboard.
        presses: texts of presses.
        samples: returns the prompts of a task.
        identity: values that identify the model and its options, for stored cells.
        stored: stored cells.
        report: takes lines about the progress.
    """

    def __init__(  # noqa: PLR0913 - one parameter per collaborator
        self,
        process: PressProcess,
        llm: LLM,
        config: BoardConfig,
        presses: Sequence[str],
        *,
        samples: Callable[[EvalTask], list[Sample]],
        identity: Sequence[object],
        stored: CellFolder,
        report: Report,
    ) -> None:
        self._process, self._llm, self._config, self._presses = process, llm, config, presses
        self._samples, self._stored, self._report = samples, stored, report
        self._identity = (*identity, sorted(process.versions.items()))

    def run(self, board: Board) -> Board:
        """Run all presses; return the leaderboard with their entries.

        Raises:
            ConfigError: without a press the scores differ from full KV's, or the process ended.
        """
        full = board.cells[self._config.grid.reference]
        self._check_environment(full)
        cells: dict[BoardEntry, Sequence[CellResult]] = dict(board.cells)
        refused = dict(board.refused)
        for index, press in enumerate(self._presses, 1):
            for schedule in self._config.grid.schedules:
                found, reasons = self._entries(press, schedule, full)
                cells |= found
                refused |= reasons
                why = "; ".join(f"{key.budget}: {why}" for key, why in reasons.items())
                self._report(
                    f"{index}/{len(self._presses)} kvpress/{press} {schedule}: {len(found)} "
                    f"entries{why and f', refused {why}'}"
                )
        return replace(board, cells=cells, refused=refused)

    @property
    def about(self) -> PressRun:
        """The other environment, and the presses that do not run."""
        return PressRun(
            versions=self._process.versions,
            left_out=left_out(self._process.names, self._presses),
        )

    def _check_environment(self, full: Sequence[CellResult]) -> None:
        for task, cell in zip(self._config.tasks, full, strict=True):
            found = self._cell(NO_PRESS, _NOTHING_REMOVED, PREFILL_END, task)
            if _scores(found) != _scores(cell):
                raise ConfigError(
                    f"expected kvpress's environment to score task {task.name!r} as full KV does "
                    f"({_total(cell):g}), got {_total(found):g} without a press: its rows would "
                    "not be comparable; use another --dtype"
                )

    def _entries(
        self, press: str, schedule: str, full: Sequence[CellResult]
    ) -> tuple[dict[BoardEntry, Sequence[CellResult]], dict[BoardEntry, str]]:
        """Cells of a press that ran, and why other budgets are refused."""
        budgets = self._config.grid.budgets
        why = self._refusal(press, schedule, full)
        if why:
            return {}, {entry_of(press, ",".join(budgets), schedule): why}
        cells: dict[BoardEntry, Sequence[CellResult]] = {}
        reasons: dict[str, list[str]] = {}
        for budget in budgets:
            try:
                cells[entry_of(press, budget, schedule)] = [
                    self._cell(press, budget, schedule, task) for task in self._config.tasks
                ]
            except RequestError as error:
                reasons.setdefault(str(error), []).append(budget)
        refused = {
            entry_of(press, ",".join(which), schedule): why for why, which in reasons.items()
        }
        return cells, refused

    def _refusal(self, press: str, schedule: str, full: Sequence[CellResult]) -> str:
        """Why a press may not run on a schedule: the result at a compression ratio of 0."""
        if schedule not in SCHEDULES:
            return f"kvpress does not evict on {schedule}, only on {', '.join(SCHEDULES)}"
        for task, cell in zip(self._config.tasks, full, strict=True):
            try:
                found = self._cell(press, _NOTHING_REMOVED, schedule, task, CHECKED_PROMPTS)
            except RequestError as error:
                return str(error)
            if _scores(found) != _scores(cell)[:CHECKED_PROMPTS]:
                return f"at a compression ratio of 0 its scores of {task.name} are not full KV's"
        return ""

    def _cell(
        self, press: str, budget: str, schedule: str, task: EvalTask, limit: int | None = None
    ) -> PressCell:
        config = self._config
        options = (config.tokens, config.count, config.seeds, limit)
        fingerprint = fingerprint_of(*self._identity, press, budget, schedule, task, options)
        name = f"kvpress-{task.name}-{fingerprint}"
        values = self._stored.read(name, fingerprint)
        found = None if values is None else _stored_cell(values)
        if found is None:
            found = self._measured(press, budget, schedule, task, limit)
            self._stored.write(name, fingerprint, asdict(found))
        return found

    def _measured(
        self, press: str, budget: str, schedule: str, task: EvalTask, limit: int | None
    ) -> PressCell:
        samples = self._samples(task)[:limit]
        prompts = [self._llm.encode(sample.prompt) for sample in samples]
        job = {
            "press": spec_of(press) if press else None,
            "removed": removed_of(budget),
            "schedule": schedule,
            "eos_token_ids": list(self._llm.model.generation.eos_token_ids),
            "undecodable_ids": sorted(self._llm.engine.sampling_step.sampler.undecodable_ids),
            "requests": [
                {"token_ids": ids, "max_tokens": sample.max_tokens, "stop": list(sample.stop)}
                for ids, sample in zip(prompts, samples, strict=True)
            ],
        }
        answer = self._process.run(job)
        outputs = answer["outputs"]
        return PressCell(
            task=task.name,
            tokens=self._config.tokens,
            arm=str(entry_of(press, budget, schedule)),
            prompts=tuple(
                self._result(task, sample, ids, output)
                for sample, ids, output in zip(samples, prompts, outputs, strict=True)
            ),
            seconds=answer["seconds"],
            retained_bytes=tuple(output["retained_bytes"] for output in outputs),
            visible=tuple(output["visible"] for output in outputs),
        )

    def _result(
        self, task: EvalTask, sample: Sample, prompt: list[int], output: Mapping[str, Any]
    ) -> PromptResult:
        text = self._text(prompt, output["token_ids"], sample.stop)
        return PromptResult(
            scores=task.score(sample, text),
            depth=sample.depth,
            chance=sample.chance,
            prompt_tokens=len(prompt),
            output_tokens=len(output["token_ids"]),
            kv_peak_bytes=output["peak_bytes"],
            output=text,
        )

    def _text(self, prompt: list[int], token_ids: Sequence[int], stop: Sequence[str]) -> str:
        """The text of an output up to a stop text, as the engine makes it."""
        detokenizer = Detokenizer(self._llm.model.tokenizer, prompt, skip_special_tokens=True)
        checker, text = StopChecker(stop, include=False), ""
        pieces = [*map(detokenizer.push, token_ids), detokenizer.finish()]
        for piece in pieces:
            new, found = checker.push(piece)
            text += new
            if found is not None:
                return text
        return text + checker.flush()


def result_of(board: Board) -> BoardResult:
    """The leaderboard with the bytes and the visible keys of the presses in their rows."""
    found = BoardResult.of(board)
    cells = {str(entry): own for entry, own in board.cells.items()}
    full_bytes = found.reference.kv_peak_bytes
    return replace(
        found, rows=[_with_bytes(row, cells[str(row.entry)], full_bytes) for row in found.rows]
    )


def _with_bytes(row: Row, cells: Sequence[CellResult], full_bytes: float) -> Row:
    if row.entry.source != KVPRESS:
        return row
    own = [cell for cell in cells if isinstance(cell, PressCell)]
    retained = float(np.mean([count for cell in own for count in cell.retained_bytes]))
    visible = float(np.mean([part for cell in own for part in cell.visible]))
    return replace(row, retained_share=retained / full_bytes, visible=visible)


def _stored_cell(values: dict[str, Any]) -> PressCell | None:
    try:
        prompts = tuple(PromptResult(**prompt) for prompt in values.pop("prompts"))
        retained, visible = tuple(values.pop("retained_bytes")), tuple(values.pop("visible"))
        return PressCell(prompts=prompts, retained_bytes=retained, visible=visible, **values)
    except (TypeError, KeyError):
        return None  # written by another version


def _scores(cell: CellResult) -> list[Mapping[str, float]]:
    return [prompt.scores for prompt in cell.prompts]


def _total(cell: CellResult) -> float:
    return next(iter(cell.means().values())).mean
