"""Runs kvpress's presses on the prompts of a leaderboard; finished cells are stored.

Token ids, output lengths, stop texts and scores are those of the leaderboard. Before a press runs,
the other environment must give exactly the scores of full KV: without a press on all prompts, and
with each press at a compression ratio of 0 on the first prompts of each task. A press is written in
the syntax of eviction rules, with kvpress's class and options:

    SnapKVPress:window_size=16
    AdaKVPress:press=(SnapKVPress:window_size=16),alpha_safeguard=0.2

By default the presses of `SAME_METHOD` run beside the rules of the same method, on equal prompts in
equal precision; all options have kvpress's defaults.
"""

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from quire.api.llm import LLM
from quire.errors import ConfigError, RequestError
from quire.evals.board.grid import NO_CODEC, BoardEntry, Grid
from quire.evals.board.result import BoardResult, Row, values_of
from quire.evals.board.run import Board, BoardConfig
from quire.evals.intervals import DIFFERENCE, Mean, mean_of
from quire.evals.pace import Report
from quire.evals.suite.base import EvalTask, Sample
from quire.evals.suite.cells import CellFolder, CellResult, PromptResult
from quire.evals.suite.runner import split_at_question
from quire.evals.tune.scores import fingerprint_of
from quire.layout.eviction import DECODE, PREFILL_AND_DECODE, PREFILL_END, parse_policy
from quire.layout.packaged import file_of
from quire.models.loader import LoadedModel
from quire.models.source import GGUF
from quire.sampling.detokenizer import Detokenizer, StopChecker

KVPRESS = "kvpress"
"""Source of the entries."""

SAME_METHOD: Mapping[str, str] = {
    "sinks": "StreamingLLMPress",
    "average": "ObservedAttentionPress",
    "snapkv:window=64": "SnapKVPress",
    "snapkv:window=64,budget=ada": "AdaKVPress:press=(SnapKVPress)",
    "criticalkv:base=(snapkv:window=64)": "CriticalKVPress:press=(SnapKVPress)",
    "tova": "TOVAPress",
    "keydiff": "KeyDiffPress",
    "knorm": "KnormPress",
    "lagkv": "LagKVPress",
    "expected_attention": "ExpectedAttentionPress",
}
"""Presses of the same method, by the rules of Quire."""

SCHEDULES = (PREFILL_AND_DECODE, PREFILL_END, DECODE)
"""Values of `when` that kvpress has: by a prefill press, a decoding press, or both."""

_FILES = "need files that the authors computed for certain models"
_SCHEDULE = "run the other presses on the schedules with decode"
NOT_RUN: Mapping[str, str] = {
    "ComposedPress": "combine other presses",
    "PerLayerCompressionPress": "combine other presses",
    "DecodingPress": _SCHEDULE,
    "PrefillDecodingPress": _SCHEDULE,
    "CompressionRatioDecodingPress": "have a budget that grows with the output",
    "DMSPress": "set a threshold, not a budget",
    "SimLayerKVPress": "set a threshold, not a budget",
    "ThinKPress": "remove channels of keys, not tokens",
    "FinchPress": "need a delimiter token in the prompt and in the vocabulary",
    "DuoAttentionPress": _FILES,
    "ExpectedAttentionStatsPress": _FILES,
    "FastKVzipPress": _FILES,
    "KVzapPress": _FILES,
    "LUKVPress": _FILES,
    "QFilterPress": _FILES,
    "RestoreKVPress": _FILES,
}
"""Why presses are not among the default ones."""

_OTHER = "not among --presses"


def chosen_presses(presses: str, budgets: Sequence[str]) -> tuple[str, ...]:
    """The presses that run.

    Args:
        presses: texts of presses, separated by semicolons.
        budgets: caps of the leaderboard.

    Raises:
        ConfigError: a press or a budget is invalid.
    """
    texts = tuple(dict.fromkeys(part.strip() for part in presses.split(";") if part.strip()))
    if not texts:
        raise ConfigError("--presses has no values: name at least one, or leave it out")
    for text in texts:
        spec_of(text)
    for budget in budgets:
        removed_of(budget)
    return texts


def spec_of(text: str) -> dict[str, object]:
    """The name of a press and its options as JSON values.

    Raises:
        ConfigError: the text is invalid.
    """
    parsed = parse_policy(text, "press")
    options = {name: _value(value) for name, value in parsed.options.items()}
    return {"name": parsed.name, "options": options}


def _value(text: str) -> object:
    if text.startswith("(") and text.endswith(")"):
        return spec_of(text[1:-1])
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def removed_of(budget: str) -> float:
    """The fraction of a prompt's tokens that kvpress removes for a cap.

    Raises:
        ConfigError: the cap is no fraction of the prompt.
    """
    try:
        fraction = float(budget.removesuffix("%")) / 100
    except ValueError:
        fraction = 0.0
    if not budget.endswith("%") or not 0 < fraction <= 1:
        raise ConfigError(
            f"expected --budgets as fractions of the prompt such as 25% (0% to 100%), got "
            f"{budget!r}: kvpress has no other budgets"
        )
    return 1.0 - fraction


def entry_of(press: str, budget: str, schedule: str) -> BoardEntry:
    """The entry of a press; kvpress's cache has no codec."""
    return BoardEntry(f"{KVPRESS}/{press}", budget, schedule, NO_CODEC, KVPRESS)


def left_out(known: Iterable[str], presses: Sequence[str]) -> dict[str, str]:
    """Why presses of kvpress do not run, by name.

    Args:
        known: names of all presses.
        presses: texts of those that run.
    """
    used = {parse_policy(text, "press").name for text in presses}
    return {name: NOT_RUN.get(name, _OTHER) for name in known if name not in used}


# ---- the process of the worker -------------------------------------------------------------------

WORKER = Path(__file__).with_name("worker.py")
_FLAG = "--python"
_INSTALL = f"python3 -m venv DIR; DIR/bin/pip install torch kvpress gguf; {_FLAG} DIR/bin/python"
_MAX_CHARACTERS = 300


def model_message(model: LoadedModel, dtype: str) -> dict[str, object]:
    """The first message of a process.

    Args:
        model: the model of the leaderboard.
        dtype: type of its weights, as in --dtype.

    Raises:
        ConfigError: the other environment cannot load the same weights.
    """
    if model.folder is None or model.weight_codec != "auto":
        given = model.name if model.folder is None else f"--weight-codec {model.weight_codec}"
        raise ConfigError(
            f"expected a model folder in Hugging Face format or a GGUF file, and weights without "
            f"a codec with {_FLAG}, got {given}"
        )
    file = Path(file_of(model.argument))
    return {
        "folder": str(model.folder),
        "gguf_file": file.name if file.suffix == GGUF else None,
        "dtype": dtype,
        "device": str(model.decoder.device),
        "threads": torch.get_num_threads(),
    }


class PressProcess:
    """A process that runs kvpress on one model.

    Args:
        python: Python of an environment that has kvpress.
        model: the first message: folder, GGUF file in it, dtype, device and number of threads.

    Raises:
        ConfigError: the Python does not start, or cannot import kvpress or load the model.
    """

    def __init__(self, python: Path, model: Mapping[str, object]) -> None:
        self._python = python
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [str(python), "-I", str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                encoding="utf-8",
            )
        except OSError as error:
            self._log.close()
            raise ConfigError(
                f"expected {_FLAG} as the Python of an environment with kvpress, got {python}: "
                f"{error.strerror}. To build one: {_INSTALL}"
            ) from error
        about = self._first(model)
        self.versions: Mapping[str, str] = about["versions"]
        self.names: tuple[str, ...] = tuple(about["presses"])

    def run(self, job: Mapping[str, object]) -> dict[str, Any]:
        """Run one job.

        Raises:
            RequestError: the press does not run, with kvpress's reason.
            ConfigError: the process ended.
        """
        found = self._answer(job)
        if "error" in found:
            raise RequestError(str(found["error"])[:_MAX_CHARACTERS])
        return found

    def close(self) -> None:
        """End the process."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None, "both are pipes"
            try:
                stream.close()
            except BrokenPipeError:
                continue  # it ended before it read the last message
        self._process.kill()
        self._process.wait()
        self._log.close()

    def __enter__(self) -> "PressProcess":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _first(self, model: Mapping[str, object]) -> dict[str, Any]:
        try:
            about = self._answer(model)
            if "error" in about:
                raise ConfigError(
                    f"expected {_FLAG} as the Python of an environment with kvpress that loads "
                    f"{model['folder']}, got {self._python}: {about['error']}. To build one: "
                    f"{_INSTALL}"
                )
        except ConfigError:
            self.close()
            raise
        return about

    def _answer(self, message: Mapping[str, object]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None, "both are pipes"
        assert stdout is not None, "both are pipes"
        try:
            stdin.write(json.dumps(message) + "\n")
            stdin.flush()
            found = json.loads(stdout.readline())
        except (BrokenPipeError, ValueError) as error:  # an empty line: the process ended
            raise ConfigError(
                f"expected {_FLAG} as the Python of an environment with kvpress, got "
                f"{self._python}, whose process ended: {self._last_words()}. To build one: "
                f"{_INSTALL}"
            ) from error
        return found if isinstance(found, dict) else {"error": f"got {found!r}, expected an object"}

    def _last_words(self) -> str:
        """The last line that the process wrote to standard error."""
        self._process.kill()
        self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return (lines or ["it wrote no message"])[-1][:_MAX_CHARACTERS]


# ---- cells ---------------------------------------------------------------------------------------

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
        pairs: rules with the press of the same method.
    """

    versions: Mapping[str, str]
    left_out: Mapping[str, str]
    pairs: Sequence["Pair"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A rule and the press of the same method on the same prompts, at `prefill_end`.

    Attributes:
        quality: mean score of the rule over the tasks.
        press_quality: that of the press.
        difference: mean over the tasks of score minus the press's, paired by prompt.
        equal: prompts with equal scores.
    """

    rule: str
    press: str
    budget: str
    quality: float
    press_quality: float
    difference: Mean
    equal: int

    @classmethod
    def stored(cls, values: Mapping[str, Any]) -> "Pair":
        return cls(**(dict(values) | {"difference": Mean(**values["difference"])}))


def pairs_of(board: Board) -> list[Pair]:
    """Compare the rules of `SAME_METHOD` with their presses. Each task has as many prompts."""
    found = []
    for own, cells in board.cells.items():
        press = SAME_METHOD.get(own.rule, "")
        other = board.cells.get(entry_of(press, own.budget, own.schedule))
        if other is None or own.codec != NO_CODEC or own.schedule != PREFILL_END:
            continue
        ours, theirs = (np.concatenate([values_of(c) for c in one]) for one in (cells, other))
        found.append(
            Pair(
                rule=own.rule,
                press=press,
                budget=own.budget,
                quality=float(ours.mean()),
                press_quality=float(theirs.mean()),
                difference=mean_of((ours - theirs).tolist(), limits=DIFFERENCE),
                equal=int((ours == theirs).sum()),
            )
        )
    return found


class PressRunner:
    """Runs presses.

    Args:
        process: runs kvpress.
        llm: an engine with the model of the leaderboard; it encodes and decodes.
        config: the leaderboard.
        presses: texts of presses.
        grid: budgets and schedules of the presses.
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
        grid: Grid,
        samples: Callable[[EvalTask], list[Sample]],
        identity: Sequence[object],
        stored: CellFolder,
        report: Report,
    ) -> None:
        self._process, self._llm, self._config, self._presses = process, llm, config, presses
        self._samples, self._stored, self._report = samples, stored, report
        self._grid = grid
        self._identity = (*identity, sorted(process.versions.items()))

    def run(self, board: Board) -> Board:
        """Run all presses; return the leaderboard with their entries.

        Raises:
            ConfigError: without a press the scores differ from full KV's, or the process ended.
        """
        full = board.cells[self._config.reference]
        self._check_environment(full)
        cells: dict[BoardEntry, Sequence[CellResult]] = dict(board.cells)
        refused = dict(board.refused)
        for index, press in enumerate(self._presses, 1):
            for schedule in self._grid.schedules:
                found, reasons = self._entries(press, schedule, full)
                cells |= found
                refused |= reasons
                why = "; ".join(f"{key.budget}: {why}" for key, why in reasons.items())
                self._report(
                    f"{index}/{len(self._presses)} kvpress/{press} {schedule}: {len(found)} "
                    f"entries{why and f', refused {why}'}"
                )
        return replace(board, cells=cells, refused=refused)

    def about(self, board: Board) -> PressRun:
        """The other environment, the presses that do not run, and the pairs of a leaderboard."""
        return PressRun(
            versions=self._process.versions,
            left_out=left_out(self._process.names, self._presses),
            pairs=pairs_of(board),
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
        budgets = self._grid.budgets
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
        options = (config.tokens, config.count, config.seeds, config.evict_before_question, limit)
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
        before = self._config.evict_before_question
        before = schedule == PREFILL_END if before is None else before
        split = [split_at_question(self._llm, sample) for sample in samples]
        prompts = [context + question for context, question in split]
        job = {
            "press": spec_of(press) if press else None,
            "removed": removed_of(budget),
            "schedule": schedule,
            "eos_token_ids": list(self._llm.model.generation.eos_token_ids),
            "undecodable_ids": sorted(self._llm.engine.sampling_step.sampler.undecodable_ids),
            "requests": [
                {
                    "token_ids": context + question,
                    "question_tokens": len(question) * before,
                    "max_tokens": sample.max_tokens,
                    "stop": list(sample.stop),
                }
                for (context, question), sample in zip(split, samples, strict=True)
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


# ---- page ----------------------------------------------------------------------------------------

_SLACK = 0.05
"""Retained bytes may exceed the visible keys by this fraction of full KV in a press that frees."""


def frees_memory(row: Row) -> bool:
    """Whether the memory of removed tokens was freed after the prefill; else they were masked."""
    if row.retained_share is None or row.visible is None:
        return False
    return row.retained_share <= row.visible + _SLACK


def press_lines(rows: Sequence[Row], about: PressRun) -> list[str]:
    """The lines of the section about presses.

    Args:
        rows: all rows of the leaderboard.
        about: about the other environment.
    """
    from benchmarks.common.rendering import environment

    left_out: dict[str, list[str]] = {}
    for name, why in about.left_out.items():
        left_out.setdefault(why, []).append(name)
    templates = environment()
    templates.filters["press"] = lambda rule: rule.removeprefix(f"{KVPRESS}/")
    text = templates.get_template("kvpress.md.j2").render(
        about=about,
        checked_prompts=CHECKED_PROMPTS,
        presses=[row for row in rows if row.entry.source == KVPRESS],
        frees_memory=frees_memory,
        pairs=about.pairs,
        apart=sum(not one.difference.low <= 0 <= one.difference.high for one in about.pairs),
        left_out=left_out,
    )
    return text.splitlines()
