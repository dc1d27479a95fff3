"""Runs the entries of a leaderboard on its tasks; every entry gets the same prompts.

A cell is one entry on one task. All prompts of a cell are submitted at once to an engine with the
KV memory of the leaderboard, so its tokens/s are those of a fixed memory. Finished cells are
stored.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from quire.api.llm import LLM
from quire.config.kv_config import KVConfig
from quire.errors import ConfigError, QuireError, UnsoundCombination
from quire.evals.board.grid import BoardEntry, Grid
from quire.evals.pace import Pace
from quire.evals.suite.base import EvalTask, Sample, SampleOptions
from quire.evals.suite.cells import CellFolder, CellResult
from quire.evals.suite.engines import Engines
from quire.evals.suite.runner import SampleRunner
from quire.evals.suite.sanity import SKIPPED, Sanity, sanity_of
from quire.evals.tune.scores import fingerprint_of
from quire.layout.kv_format import fill_plain, read_format
from quire.policies.eviction import make_eviction


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardConfig:
    """What is compared."""

    grid: Grid
    tasks: tuple[EvalTask, ...]
    tokens: int = 256
    count: int = 10  # prompts of each task and seed
    seeds: tuple[int, ...] = (1, 2)
    sanity: bool = True  # whether the sanity check runs
    evict_before_question: bool | None = None  # as in `SampleRunner`

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ConfigError("expected at least one task, got none: add --tasks")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"expected --seeds with different numbers, got {list(self.seeds)}")
        for name, value in (("tokens", self.tokens), ("num-prompts", self.count)):
            if value < 1:
                raise ConfigError(f"expected --{name} of 1 or more, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """All cells of a leaderboard."""

    config: BoardConfig
    cells: Mapping[BoardEntry, Sequence[CellResult]]  # of each entry, in the order of the tasks
    refused: Mapping[BoardEntry, str]  # why entries do not run, by entry
    sanity: Sanity  # whether the model may judge a rule
    entries_left: int = 0  # that did not run before the time limit


def check_names(grid: Grid) -> None:
    """Check rules and codecs before any entry runs: those at the end would fail after hours."""
    for rule in grid.rules:
        with suppress(UnsoundCombination):  # shown in the table
            make_eviction(BoardEntry(rule, "50%", grid.schedules[0], grid.codecs[0]).evict)
    for codec in grid.codecs:
        read_format(fill_plain(codec, "float32"))


class BoardRunner:
    """Runs a leaderboard of one model; `identity` is that of the model of stored cells."""

    def __init__(
        self,
        engines: Engines,
        kv: KVConfig,
        config: BoardConfig,
        *,
        identity: Sequence[object],
        stored: CellFolder,
        pace: Pace,
    ) -> None:
        self._engines, self._kv, self._config = engines, kv, config
        self._identity, self.stored, self._pace = identity, stored, pace
        self._samples: dict[str, list[Sample]] = {}

    def reference(self) -> LLM:
        return self._engines.of(self._config.grid.reference.applied(self._kv))

    def run(self) -> Board:
        check_names(self._config.grid)
        entries, tasks = self._config.grid.entries(), self._config.tasks
        listed = [self._key(entry, task) for entry in entries for task in tasks]
        for line in self.stored.resumption(listed):
            self._pace.report(line)
        sanity = self._sanity()
        cells: dict[BoardEntry, Sequence[CellResult]] = {}
        refused: dict[BoardEntry, str] = {}
        for index, entry in enumerate(entries, 1):
            if cells and self._pace.is_over:
                break
            try:
                cells[entry] = [self._cell(entry, task) for task in tasks]
            except QuireError as error:
                if entry == self._config.grid.reference:
                    raise
                refused[entry] = str(error)
            scores = (
                f"{cell.task} {next(iter(cell.means().values())).mean:.2f}"
                for cell in cells.get(entry, ())
            )
            left = self._pace.left(len(tasks) * (len(entries) - index))
            found = refused.get(entry) or ", ".join(scores)
            self._pace.report(f"{index}/{len(entries)} {entry}: {found}{left}")
        done = len(cells) + len(refused)
        if done < len(entries):
            self._pace.report(
                f"time limit: {done} of {len(entries)} entries are done; the same command with the "
                "same --out goes on"
            )
        return Board(
            config=self._config,
            cells=cells,
            refused=refused,
            sanity=sanity,
            entries_left=len(entries) - done,
        )

    def _sanity(self) -> Sanity:
        if not self._config.sanity:
            return SKIPPED
        return sanity_of(
            self._engines,
            self._config.grid.reference.applied(self._kv),
            tasks=[task.name for task in self._config.tasks],
            seed=self._config.seeds[0],
            identity=self._identity,
            stored=self.stored,
            report=self._pace.report,
            make_prompts=lambda: [self.samples(task) for task in self._config.tasks],
        )

    def _cell(self, entry: BoardEntry, task: EvalTask) -> CellResult:
        key = self._key(entry, task)
        found = self.stored.cell(*key)
        if found is None:
            found = self._measured(entry, task)
            self.stored.write(*key, asdict(found))
        return found

    def _key(self, entry: BoardEntry, task: EvalTask) -> tuple[str, str]:
        """Name and fingerprint of a stored cell."""
        kv, config = entry.applied(self._kv), self._config
        options = (config.tokens, config.count, config.seeds, config.evict_before_question)
        fingerprint = fingerprint_of(*self._identity, kv, task, options)
        return f"{task.name}-{fingerprint}", fingerprint

    def _measured(self, entry: BoardEntry, task: EvalTask) -> CellResult:
        kv = entry.applied(self._kv)
        llm = self._engines.of(kv)
        samples = self.samples(task)
        before = self._config.evict_before_question
        runner = SampleRunner(llm, kv, evict_before_question=before)
        with self._pace.measuring():
            prompts, seconds = runner.run(task, samples)
        return CellResult(
            task=task.name,
            tokens=self._config.tokens,
            arm=str(entry),
            prompts=prompts,
            seconds=seconds,
        )

    def samples(self, task: EvalTask) -> list[Sample]:
        """The prompts of a task for all seeds; an engine must be open."""
        if task.name not in self._samples:
            config = self._config
            self._engines.refuse_long(config.tokens)
            self._samples[task.name] = [
                sample
                for seed in config.seeds
                for sample in task.samples(
                    SampleOptions(
                        count=config.count,
                        measure=self._engines.measure,
                        tokens=config.tokens,
                        seed=seed,
                    )
                )
            ]
        return self._samples[task.name]
