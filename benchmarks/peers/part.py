"""One part of the benchmark: a model with a shape of work, on every engine in turn."""

import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.models import SHAPES
from benchmarks.common.result import Cell as TableCell
from benchmarks.common.result import Chart, PartResult, Table
from benchmarks.peers.config import PeersConfig, Shape
from benchmarks.peers.engines import Engine, preloaded, python_of
from benchmarks.peers.environments import FOLDER
from benchmarks.peers.measures import (
    Cell,
    Cells,
    Measures,
    build_job,
    cell_key,
    decode_rate,
    interleaved,
    median,
    paired,
    part_claims,
    runs_of,
    tokens_per_s,
    total_s,
)
from benchmarks.peers.workers.protocol import Job
from quire.errors import InvariantError

ROOT = Path(__file__).resolve().parents[2]
_ERROR = re.compile(r"^(?:\(.*?\)\s*)?[\w.]*(?:Error|Exception|Exit|Interrupt)\b.*")
_BROKEN = re.compile(r"ModuleNotFoundError|ImportError|bin/python: ")
_LONGEST_REASON = 400


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker without a result.

    Attributes:
        reason: the error, in one line.
    """

    reason: str


def run_worker(engine: Engine, job: Job, config: PeersConfig) -> dict[str, Any] | Failure:
    """Run one job in a new process.

    Args:
        engine: the engine.
        job: its job.
        config: environments, time limit, and the command that the process runs under.
    """
    python = python_of(engine, config.environments)
    if python is None:
        folder = config.environments / engine.environment
        return Failure(f"no environment in {folder}: run {_make(config)}")
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "job.json"
        file.write_text(json.dumps(job), encoding="utf-8")
        module = f"benchmarks.peers.workers.{engine.worker}"
        command = [*config.run_under, str(python), "-m", module, str(file)]
        found = _finished(command, variables(engine, config), temporary, config.timeout_s)
    if isinstance(found, Failure) and not engine.is_quire and _BROKEN.search(found.reason):
        folder = config.environments / engine.environment
        return Failure(f"{found.reason}; to rebuild it: rm -r {folder}, then {_make(config)}")
    return found


def _make(config: PeersConfig) -> str:
    """Command that builds the environments in the folder of the run."""
    default = config.environments == FOLDER.resolve()
    return "make peers" if default else f"make peers PEERS={config.environments}"


def variables(engine: Engine, config: PeersConfig) -> dict[str, str]:
    """Environment variables of a worker: only Quire's can import quire."""
    found = dict(os.environ)
    paths = [str(ROOT)]
    if engine.is_quire:
        paths += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    found["PYTHONPATH"] = os.pathsep.join(paths)
    found["OMP_NUM_THREADS"] = str(config.threads)
    libraries = preloaded(engine, config.environments)
    if libraries:
        found["LD_PRELOAD"] = os.pathsep.join(libraries)
    return found


def _finished(
    command: list[str], environment: dict[str, str], folder: str, timeout_s: float
) -> dict[str, Any] | Failure:
    """Wait for the process; its group is killed after `timeout_s`."""
    with (Path(folder) / "out").open("w+") as out, (Path(folder) / "err").open("w+") as err:
        try:
            process = subprocess.Popen(
                command, env=environment, stdout=out, stderr=err, cwd=folder, start_new_session=True
            )
        except OSError as error:
            return Failure(f"{command[0]}: {error.strerror}")
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return Failure(f"not finished after {timeout_s:g} s")
        finally:
            _kill_group(process)
        out.seek(0)
        err.seek(0)
        return result_of(status, out.read(), err.read())


def _kill_group(process: subprocess.Popen[Any]) -> None:
    """Kill the worker, if it runs, and the processes that it left."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def result_of(status: int, out: str, err: str) -> dict[str, Any] | Failure:
    """The result of a finished worker: the last line of its output that is a JSON object.

    Args:
        status: exit status; negative: the signal that ended the process.
        out: its standard output.
        err: its standard error.
    """
    if status:
        return Failure(f"exit status {status}: {reason_of(err or out)}")
    for line in reversed(out.splitlines()):
        if line.startswith("{"):
            try:
                found: dict[str, Any] = json.loads(line)
            except json.JSONDecodeError:
                break
            return found
    return Failure("the worker printed no result")


def reason_of(text: str) -> str:
    """The line of an output that names the error: the last exception, else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.match(line)]
    found = (errors or lines or ["no output"])[-1]
    return found[:_LONGEST_REASON]


# ---- model files ---------------------------------------------------------------------------------


def make_model(name: str, files: Path) -> Path:
    """Write a model with random bfloat16 weights, unless its folder exists; return the folder."""
    import torch

    from benchmarks.common.models import random_weights

    folder = files / name
    if not folder.exists():
        files.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=files) as made:
            model = random_weights(SHAPES[name](), dtype=torch.bfloat16)
            model.save_pretrained(f"{made}/model")
            (Path(made) / "model").rename(folder)
    return folder


def prepare(config: PeersConfig, model: str, shape: Shape, engine: Engine) -> Failure | None:
    """Convert a model to the engine's own format, unless that is done; return the error, if any."""
    if not engine.prepares:
        return None
    job = build_job(config, model, shape, engine, 0)
    folder = Path(job["prepared"])
    if folder.exists():
        return None
    with tempfile.TemporaryDirectory(dir=config.files) as made:
        job["task"], job["prepared"] = "prepare", f"{made}/model"
        found = run_worker(engine, job, config)
        if isinstance(found, Failure):
            return found
        (Path(made) / "model").rename(folder)
    return None


# ---- part ----------------------------------------------------------------------------------------

COLUMNS = (
    "engine", "version", "weights", "weights MB", "KV", "KV MB", "total s", "least s", "most s",
    "prefill s", "decode tokens/s", "tokens/s", "first token s", "at once", "peak RSS MB",
    "logit regret", "Quire's time / engine's", "error",
)  # fmt: skip
MB = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersPart:
    """A model with a shape of work.

    Attributes:
        config: configuration of the run.
        model: name of the model.
        shape: the work.
        engines: all engines, Quire first.
        cells: store of finished cells.
        commit: commit of the code.
        show: called with every cell when it is finished.
    """

    config: PeersConfig
    model: str
    shape: Shape
    engines: tuple[Engine, ...]
    cells: Cells
    commit: str | None
    show: Callable[[Cell], None]

    @property
    def name(self) -> str:
        """Name of the part."""
        return f"{self.model} {self.shape.name}"

    def running(self) -> tuple[Engine, ...]:
        """Engines of this part: those that evict run in a fixed KV memory only."""
        return tuple(e for e in self.engines if self.shape.is_fixed or not e.evicts)

    def run(self) -> PartResult:
        """Run all rounds, and summarise them."""
        make_model(self.model, self.config.files)
        found = list(self._cells())
        rounds = [
            {
                c.key.engine: c.measures
                for c in found
                if c.key.round == round_ and c.measures is not None
            }
            for round_ in range(self.config.repeats)
        ]
        compared = part_claims(self.model, self.shape, rounds, self.engines)
        regrets = self._regrets(rounds)
        errors = {cell.key.engine: cell.error for cell in found if cell.error}
        return PartResult(
            claims=compared.claims,
            tables=(self._table(rounds, errors, regrets),),
            charts=self._charts(rounds),
            raw={
                "cells": [_without_tokens(cell) for cell in found],
                "best_peers": compared.best_peers,
                "mean_regrets": regrets,
            },
        )

    def _cells(self) -> Iterator[Cell]:
        """Run or find every cell; an engine whose model cannot be converted fails in each."""
        failed: dict[str, Failure] = {}
        for engine in self.running():
            failure = prepare(self.config, self.model, self.shape, engine)
            if failure is not None:
                failed[engine.name] = failure
        for round_, engine in interleaved(self.running(), self.config.repeats):
            key = cell_key(self.config, self.model, self.shape, engine, round_, self.commit)
            cell = self.cells.find(key)
            if cell is None:
                run = failed.get(engine.name) or self._run(engine, round_)
                if isinstance(run, Failure):
                    cell = Cell(key=key, measures=None, error=run.reason)
                else:
                    cell = Cell(key=key, measures=run)
                self.cells.add(cell)
                self.show(cell)
            yield cell

    def _run(self, engine: Engine, round_: int) -> Measures | Failure:
        """Run one process; outputs of wrong lengths are a failure."""
        from benchmarks.peers.measures import measures_of

        job = build_job(self.config, self.model, self.shape, engine, round_)
        found = run_worker(engine, job, self.config)
        if isinstance(found, Failure):
            return found
        try:
            return measures_of(found, self.shape, self.config.judged_prompts)
        except (InvariantError, KeyError) as error:
            return Failure(f"{type(error).__name__}: {error}")

    def _regrets(self, rounds: Sequence[Mapping[str, Measures]]) -> dict[str, float]:
        """Mean regret of each engine's first outputs in its first round, in float32."""
        if not self.config.judged_prompts:
            return {}
        from transformers import AutoModelForCausalLM

        from benchmarks.common.regret import RegretJudge

        model = AutoModelForCausalLM.from_pretrained(
            self.config.files / self.model, dtype="float32"
        )
        judge = RegretJudge(model)
        regrets: dict[str, float] = {}
        for round_, found in enumerate(rounds):
            for name, run in found.items():
                if name not in regrets:
                    job = build_job(self.config, self.model, self.shape, self.engines[0], round_)
                    regrets[name] = judge.mean_regret(job["prompts"], run.judged)
        return regrets

    def _table(
        self,
        rounds: Sequence[Mapping[str, Measures]],
        errors: Mapping[str, str],
        regrets: Mapping[str, float],
    ) -> Table:
        quire = self.engines[0].name
        rows = []
        for engine in self.running():
            runs = runs_of(rounds, engine.name)
            over = paired(rounds, quire, engine.name, total_s) if runs else None
            numbers = self._numbers(runs, regrets.get(engine.name)) if runs else _NO_NUMBERS
            rows.append((engine.name, *numbers, over, errors.get(engine.name, "")))
        return Table(
            name=f"peers_{self.name.replace(' ', '_').replace('+', '_').replace(':', '_')}",
            caption=self._caption(),
            columns=COLUMNS,
            rows=tuple(rows),
        )

    def _numbers(self, runs: Sequence[Measures], regret: float | None) -> tuple[TableCell, ...]:
        last, totals = runs[-1], [run.total_s for run in runs]
        # with unequal requests the last first token comes late, and few requests are left
        is_equal = len(set(self.shape.lengths)) == 1 and not self.shape.is_fixed
        return (
            last.version,
            last.weights_type,
            last.weight_bytes / MB,
            last.kv_type,
            last.kv_bytes / MB,
            median(runs, total_s),
            min(totals),
            max(totals),
            median(runs, lambda run: run.prefill_s),
            median(runs, decode_rate) if is_equal else None,
            median(runs, tokens_per_s),
            median(runs, lambda run: run.first_token_s),
            median(runs, lambda run: run.max_at_once),
            median(runs, lambda run: run.peak_rss_bytes / MB),
            regret,
        )

    def _caption(self) -> str:
        shape, config = self.shape, self.config
        memory = "a quarter" if shape.is_fixed else f"{shape.kv_share:g} times"
        return (
            f"{_requests(len(shape.lengths))} ({shape.name}), {shape.needed_tokens:,} tokens "
            f"with {shape.new_tokens:,} generated, random-weight Llama ({self.model}), KV memory "
            f"{memory} of what all requests need, {config.threads} threads, medians of "
            f"{config.repeats} rounds, engines in turn, a new process each."
        )

    def _charts(self, rounds: Sequence[Mapping[str, Measures]]) -> tuple[Chart, ...]:
        bars = []
        for engine in self.running():
            total = median(runs_of(rounds, engine.name), total_s)
            if total is not None:
                bars.append((engine.name, total))
        if not bars:
            return ()
        chart = Chart(
            name=self._table([], {}, {}).name,
            title=f"{self.name}: total time",
            x_label="engine",
            y_label="seconds",
            lines={"": tuple(bars)},
        )
        return (chart,)


def _requests(number: int) -> str:
    return "One request" if number == 1 else f"{number} requests at once"


_NO_NUMBERS: tuple[TableCell, ...] = (None,) * (len(COLUMNS) - 3)


def _without_tokens(cell: Cell) -> dict[str, Any]:
    """A cell for the results: the key without the lengths, the numbers without outputs."""
    found = cell.to_json()
    found["key"].pop("lengths")
    if found["measures"] is not None:
        found["measures"].pop("judged")
    return found
