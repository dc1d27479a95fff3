"""Runs an evaluation: the sanity check, the cells of each configuration, then the verdicts."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from quire.config.kv_config import KVConfig
from quire.errors import ConfigError
from quire.evals.suite.base import EvalTask, SampleOptions
from quire.evals.suite.cells import CellFolder, CellResult
from quire.evals.suite.engines import CONFIGURED, FULL, Engines, full_kv, is_full
from quire.evals.suite.samples import PromptOptions, SampleRunner
from quire.evals.suite.sanity import SKIPPED, Sanity, sanity_of
from quire.evals.suite.verdicts import Verdict, compare
from quire.evals.tune.scores import fingerprint_of

Report = Callable[[str], None]
"""Takes a line about the progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """What is evaluated.

    Attributes:
        tasks: the tasks, in their order.
        tokens: lengths of the prompts that have a length.
        count: prompts of each task and length.
        seed: seed of generated prompts.
        shots: worked examples; None: the task's default.
        data: files by task.
        prompts: how texts become prompts.
        sanity: whether the sanity check runs.
    """

    tasks: tuple[EvalTask, ...]
    tokens: tuple[int, ...]
    count: int
    seed: int = 1
    shots: int | None = None
    data: Mapping[str, Path] = field(default_factory=dict)
    prompts: PromptOptions = field(default_factory=PromptOptions)
    sanity: bool = True

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ConfigError("expected a suite or a task, got none: add --suite quick")
        if not self.tokens or min(self.tokens) < 1:
            raise ConfigError(f"expected --tokens of 1 or more, got {list(self.tokens)}")
        for name, value, least in (("num-prompts", self.count, 1), ("shots", self.shots, 0)):
            if value is not None and value < least:
                raise ConfigError(f"expected --{name} of {least} or more, got {value}")
        known = {task.name for task in self.tasks}
        for name in self.data.keys() - known:
            raise ConfigError(f"--data names the task {name!r}, which does not run: add --tasks")

    def cells(self) -> list[tuple[EvalTask, int]]:
        """Tasks with lengths, in their order; 0 for tasks without lengths."""
        return [
            (task, tokens)
            for task in self.tasks
            for tokens in (self.tokens if task.by_length else (0,))
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result of a run.

    Attributes:
        sanity: result of the sanity check.
        cells: results by configuration, in the order of the tasks.
        verdicts: comparison with full KV; empty if nothing differs from full KV.
    """

    sanity: Sanity
    cells: Mapping[str, Sequence[CellResult]]
    verdicts: tuple[Verdict, ...]

    def claims(self) -> dict[str, int | float]:
        """Scores with their intervals, KV bytes and tokens/s, as a flat mapping."""
        found: dict[str, int | float] = {}
        for arm, results in self.cells.items():
            for cell in results:
                found |= _claims(cell, "" if len(self.cells) == 1 else f"{arm}_")
        return found | {"sanity_check_passed": int(self.sanity.passed)}


def _claims(cell: CellResult, prefix: str) -> dict[str, int | float]:
    name = f"{prefix}{cell.name}"
    found: dict[str, int | float] = {}
    for metric, mean in cell.means().items():
        found[f"{name}_{metric}"] = mean.mean
        found[f"{name}_{metric}_low"], found[f"{name}_{metric}_high"] = mean.low, mean.high
    found[f"{name}_kv_peak_bytes"] = cell.kv_peak_bytes
    found[f"{name}_output_tokens_per_s"] = cell.output_tokens_per_s
    return found


class Evaluator:
    """Runs an evaluation of one model.

    Args:
        engines: opens engines.
        kv: the configured KV.
        config: what is evaluated.
        identity: texts that identify the model and its options, for stored cells.
        stored: stored cells.
        report: takes lines about the progress.
    """

    def __init__(
        self,
        engines: Engines,
        kv: KVConfig,
        config: EvalConfig,
        *,
        identity: Sequence[object],
        stored: CellFolder,
        report: Report,
    ) -> None:
        self._engines, self._kv, self._config = engines, kv, config
        self._identity, self._stored, self._report = identity, stored, report

    def run(self) -> Evaluation:
        """Run everything that is not stored.

        Raises:
            ConfigError: an invalid option or file, before any prompt is run where possible.
        """
        for task in self._config.tasks:
            task.check()
        arms = {FULL: full_kv(self._kv)}
        if not is_full(self._kv):
            arms[CONFIGURED] = self._kv
            self._engines.of(self._kv)  # refuses an invalid rule or codec at once
        sanity = self._sanity()
        cells = {arm: self._cells(arm, kv) for arm, kv in arms.items()}
        verdicts = tuple(
            compare(task, full, found, sanity)
            for (task, _), full, found in zip(
                self._config.cells(), cells[FULL], cells.get(CONFIGURED, ()), strict=False
            )
        )
        return Evaluation(sanity=sanity, cells=cells, verdicts=verdicts)

    def _sanity(self) -> Sanity:
        if not self._config.sanity:
            return SKIPPED
        return sanity_of(
            self._engines,
            full_kv(self._kv),
            seed=self._config.seed,
            identity=self._identity,
            stored=self._stored,
            report=self._report,
        )

    def _cells(self, arm: str, kv: KVConfig) -> list[CellResult]:
        return [self._cell(task, tokens, arm, kv) for task, tokens in self._config.cells()]

    def _cell(self, task: EvalTask, tokens: int, arm: str, kv: KVConfig) -> CellResult:
        name = "-".join(str(part) for part in (task.name, tokens or "", arm) if part)
        fingerprint = self._fingerprint(task, tokens, kv)
        found = self._stored.cell(name, fingerprint)
        if found is None:
            found = self._measured(task, tokens, arm, kv)
            self._stored.write(name, fingerprint, asdict(found))
        metric, mean = next(iter(found.means().items()))
        self._report(f"{name}: {metric} {mean}, {found.seconds:.1f} s")
        return found

    def _measured(self, task: EvalTask, tokens: int, arm: str, kv: KVConfig) -> CellResult:
        llm = self._engines.of(kv)
        self._engines.refuse_long(tokens)
        options = SampleOptions(
            count=self._config.count,
            measure=self._engines.measure,
            tokens=tokens or max(self._config.tokens),
            seed=self._config.seed,
            shots=self._config.shots,
            data=self._config.data.get(task.name),
        )
        samples = task.samples(options)
        if not samples:
            raise ConfigError(
                f"task {task.name!r} has no prompts left: the first records of {options.data} are "
                "its worked examples; lower --shots, or add records"
            )
        prompts, seconds = SampleRunner(llm, kv, self._config.prompts).run(task, samples)
        return CellResult(task=task.name, tokens=tokens, arm=arm, prompts=prompts, seconds=seconds)

    def _fingerprint(self, task: EvalTask, tokens: int, kv: KVConfig) -> str:
        config = self._config
        data = config.data.get(task.name)
        content = "" if data is None else [_digest(path) for path in task.files(data)]
        options = (tokens, config.count, config.seed, config.shots, config.prompts)
        return fingerprint_of(*self._identity, kv, task, options, content)


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
