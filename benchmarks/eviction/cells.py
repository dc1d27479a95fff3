"""Cells of the quality table: a task with a rule, a budget and a schedule; stored when finished."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.intervals import wilson
from benchmarks.common.json_lines import JsonLines
from benchmarks.eviction.config import CellsConfig

FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellKey:
    """Key of a cell: one configuration of the quality measurement.

    Attributes:
        model: model name as given.
        task: task of `quire.evals`.
        tokens: maximum length of a prompt with its answer.
        prompts: number of prompts.
        rule: text of the eviction policy, or FULL.
        when: the eviction schedule; "" for FULL.
        budget: cap as a fraction of `tokens`; 1 for FULL.
        evict: as `KVConfig.evict`.
        commit: commit of the code that ran the cell; None outside a checkout.
        page_tokens: slots in a page.
    """

    model: str
    task: str
    tokens: int
    prompts: int
    rule: str
    when: str
    budget: float
    evict: str
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
        counted = {k: stored[k] for k in ("hits", "old_hits", "old_prompts")}
        return cls(
            key=CellKey(**stored["key"]),
            **counted,
            request_bytes=stored["request_bytes"],
            seconds=stored["seconds"],
            outcomes=stored.get("outcomes", ""),
        )


def cell_keys(config: CellsConfig, model: str, commit: str | None) -> Iterator[CellKey]:
    """All cells, task by task, full KV first.

    Raises:
        ConfigError: a budget is too small for a rule.
    """
    for task in config.tasks:
        for rule, when, budget, evict in _arms(config):
            yield CellKey(
                model=model,
                task=task,
                tokens=config.tokens,
                prompts=config.prompts,
                rule=rule,
                when=when,
                budget=budget,
                evict=evict,
                commit=commit,
            )


def _arms(config: CellsConfig) -> Iterator[tuple[str, str, float, str]]:
    yield FULL, "", 1.0, FULL
    for when in config.schedules:
        for budget in config.budgets:
            for rule in config.rules:
                evict = rule.evict(int(budget * config.tokens), config.every, when)
                yield rule.text, when, budget, evict


class CellFile:
    """Store of finished cells, one line of JSON each, so that an interrupted run can continue.

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
