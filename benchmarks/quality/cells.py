"""Graded tasks: one cell is a task with one rule or codec; finished cells are stored.

A stored cell does not run again, so that an interrupted run can continue.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.common.graded_prompts import GradedPrompt, PromptMaker, PromptMakerFor
from benchmarks.common.intervals import wilson
from benchmarks.common.json_lines import JsonLines
from benchmarks.common.result import Cell as Shown
from benchmarks.common.result import Table
from benchmarks.quality.texts import RunningText
from quire.api.llm import LLM
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import ConfigError, InvariantError
from quire.models.loader import LoadedModel
from quire.policies.registry import FULL
from quire.sampling.outputs import RequestOutput
from quire.scheduler.schedule_config import ScheduleConfig

TASKS = ("lines", "kv", "niah", "facts", "copy", "labels")
OLD_DEPTH = 0.25
"""Facts in the first quarter of a prompt are old."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksConfig:
    """Prompts of the cells.

    Attributes:
        tasks: tasks of `quire.evals`.
        tokens: most tokens of a prompt with its output.
        prompts: number of prompts of each cell.
        rows: most running requests.
    """

    tasks: tuple[str, ...] = TASKS
    tokens: int = 512
    prompts: int = 100
    rows: int = 32

    def __post_init__(self) -> None:
        if self.prompts < 1:
            raise ConfigError(f"expected prompts of 1 or more, got {self.prompts}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CellKey:
    """Key of a cell: one configuration of the quality measurement.

    Attributes:
        model: model name as given.
        task: task of `quire.evals`.
        tokens: maximum length of a prompt with its answer.
        prompts: number of prompts.
        rule: text of the eviction policy, a codec, or FULL.
        when: the eviction schedule; "" without eviction.
        budget: cap as a fraction of `tokens`; 1 without eviction.
        evict: as `KVConfig.evict`.
        commit: commit of the code that ran the cell; None outside a checkout.
        page_tokens: slots in a page.
    """

    model: str
    task: str
    tokens: int
    prompts: int
    rule: str = FULL
    when: str = ""
    budget: float = 1.0
    evict: str = FULL
    commit: str | None
    page_tokens: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Result of a cell.

    Attributes:
        key: key of the cell.
        hits: number of correct outputs.
        old_hits, old_prompts: hits and prompts whose fact is in the first quarter of the prompt.
        request_bytes: peak KV bytes of a request, mean over the prompts.
        seconds: elapsed time.
        outcomes: 1 for each prompt with a correct output, else 0, in the order of the prompts. The
            same prompts under two policies make pairs.
    """

    key: CellKey
    hits: int
    old_hits: int
    old_prompts: int
    request_bytes: float
    seconds: float
    outcomes: str = ""

    @property
    def share(self) -> float:
        """Fraction of correct outputs."""
        return self.hits / self.key.prompts

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of the fraction."""
        return wilson(self.hits, self.key.prompts)

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values, with fraction and interval."""
        return asdict(self) | {"share": self.share, "interval": list(self.interval)}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "Cell":
        """Convert from the JSON values of `to_json`."""
        fields = ("hits", "old_hits", "old_prompts", "request_bytes", "seconds")
        return cls(
            key=CellKey(**stored["key"]),
            **{name: stored[name] for name in fields},
            outcomes=stored.get("outcomes", ""),
        )


class CellFile:
    """Store of finished cells, one line of JSON each.

    Args:
        path: path of the file, created with the first cell; None: do not store cells.
    """

    def __init__(self, path: Path | None) -> None:
        self._lines = JsonLines(path)

    def read(self) -> dict[CellKey, Cell]:
        """Read finished cells; an incomplete last line is ignored."""
        found = {}
        for stored in self._lines.read():
            try:
                cell = Cell.from_json(stored)
            except (KeyError, TypeError):
                continue
            found[cell.key] = cell
        return found

    def add(self, cell: Cell) -> None:
        """Store a cell."""
        self._lines.add(cell.to_json())


@dataclass(frozen=True, kw_only=True)
class Material:
    """Inputs of the parts in addition to their configuration.

    Attributes:
        load: loads the evaluated model when the first part needs it.
        prompt_maker_for: returns the prompt maker for the model.
        running_for: returns the source of the long texts for the model.
        stored: store of finished cells.
        commit: commit of this code.
        show: called with every cell that runs.
    """

    load: Callable[[], LoadedModel]
    prompt_maker_for: PromptMakerFor
    running_for: Callable[[LoadedModel], RunningText]
    stored: CellFile
    commit: str | None
    show: Callable[[Cell], None]

    @cached_property
    def model(self) -> LoadedModel:
        """The evaluated model, loaded on first use."""
        return self.load()

    @cached_property
    def running(self) -> RunningText:
        """Source of the long texts."""
        return self.running_for(self.model)

    def cells(self, run_cell: Callable[[CellKey], Cell], keys: Sequence[CellKey]) -> Iterator[Cell]:
        """Yield all cells; a stored cell does not run again."""
        known = self.stored.read()
        for key in keys:
            cell = known.get(key)
            if cell is None:
                cell = run_cell(key)
                self.stored.add(cell)
                self.show(cell)
            yield cell


class Judge:
    """Runs cells on a model.

    Args:
        model: model with trained weights.
        rows: requests at once.
        make_prompts: makes the prompts of a task.
    """

    def __init__(self, model: LoadedModel, rows: int, make_prompts: PromptMaker) -> None:
        self._model, self._rows, self._make_prompts = model, rows, make_prompts
        self._prompts_of: dict[str, list[GradedPrompt]] = {}

    def cell(self, key: CellKey) -> Cell:
        """Run all prompts of a cell; the KV memory holds all rows, so no request waits for it.

        Raises:
            InvariantError: a request failed.
        """
        started_s = time.perf_counter()
        if key.task not in self._prompts_of:
            self._prompts_of = {key.task: self._make_prompts(key.task, key.tokens, key.prompts)}
        prompts = self._prompts_of[key.task]
        token_bytes = self._model.spec.kv_bytes_per_token(self._model.decoder.dtype.itemsize)
        kv = self.kv_config(key, self._rows * 2 * key.tokens * token_bytes + (8 << 20))
        llm = LLM(self._model, kv=kv, schedule=ScheduleConfig(max_num_seqs=self._rows))
        most = max(len(llm.encode(prompt.answer)) for prompt in prompts)
        options = SamplingParams(max_tokens=most, temperature=0.0)
        answers = llm.generate([prompt.prompt for prompt in prompts], options)
        return judged(key, prompts, answers, time.perf_counter() - started_s)

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
    for answer in answers:
        if answer.error is not None:
            raise InvariantError(f"expected no failed request in a benchmark, got: {answer.error}")
    hits = [p.grade(answer.text) == 1.0 for p, answer in zip(prompts, answers, strict=True)]
    old = [
        hit
        for hit, prompt in zip(hits, prompts, strict=True)
        if prompt.depth is not None and prompt.depth <= OLD_DEPTH
    ]
    return Cell(
        key=key,
        hits=sum(hits),
        old_hits=sum(old),
        old_prompts=len(old),
        request_bytes=sum(a.usage.kv_peak_bytes for a in answers) / len(answers),
        seconds=seconds,
        outcomes="".join("1" if hit else "0" for hit in hits),
    )


def mean_share(by_task: Mapping[str, Cell]) -> float:
    """Mean fraction of correct answers over tasks."""
    return sum(cell.share for cell in by_task.values()) / len(by_task)


def tasks_table(
    name: str, label: str, config: TasksConfig, found: Mapping[str, Mapping[str, Cell]]
) -> Table:
    """Fractions of correct answers with their intervals.

    Args:
        name: of the table.
        label: heading of the first column.
        config: of the cells.
        found: cells by task, by what is compared.
    """
    rows: tuple[tuple[Shown, ...], ...] = tuple(
        (compared, *map(shown, by_task.values()), mean_share(by_task))
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


def shown(cell: Cell) -> str:
    """Fraction of correct answers with its interval."""
    low, high = cell.interval
    return f"{cell.share:.2f} [{low:.2f}, {high:.2f}]"
