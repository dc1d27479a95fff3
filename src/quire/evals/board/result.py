"""The result of a leaderboard: what its pages show and its JSON stores."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.evals.board.grid import FULL, BoardEntry
from quire.evals.board.run import Board
from quire.evals.intervals import Mean, mean_of_tasks
from quire.evals.suite.base import MIN_FULL
from quire.evals.suite.cells import CellResult
from quire.evals.suite.perplexity import NLL
from quire.evals.suite.sanity import Sanity

_NO_QUALITY = Mean(0.0, 0.0, 0.0, count=0)  # of a row if no task counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One entry of a leaderboard."""

    entry: BoardEntry
    quality: Mean = _NO_QUALITY  # mean of score over full KV's, with its 95 % interval
    scores: Mapping[str, float]  # of each task
    kv_peak_bytes: float  # mean over the prompts of the peak KV bytes of a request
    kv_share: float  # of full KV's for the same prompts
    tokens_per_s: float | None = None  # prompt and output tokens; None with a shared prefill
    is_reference: bool = False  # full KV that quality and bytes are relative to
    is_unbeaten: bool = False  # no entry has both a higher quality and fewer bytes
    # of another library: mean bytes of its cache after the prefill, over full KV's peak
    retained_share: float | None = None
    # of another library: fraction of the prompt's keys that the next token can read then
    visible: float | None = None

    def as_dict(self) -> dict[str, object]:
        """JSON values without those that are None, and without a quality if no task counts."""
        values = asdict(self) | {"evict": self.entry.evict}
        if not self.quality.count:
            del values["quality"]
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def stored(cls, values: Mapping[str, Any]) -> "Row":
        fields = {name: values[name] for name in cls.__slots__ if name in values}
        if "quality" in values:
            fields["quality"] = Mean(**values["quality"])
        fields["entry"] = entry = BoardEntry(**values["entry"])
        # not stored by earlier versions
        fields.setdefault("is_reference", entry.rule == FULL and values["kv_share"] == 1.0)
        return cls(**fields)


def judged_tasks(board: Board) -> list[str]:
    """Tasks whose score with full KV is high enough to judge a rule, and whose check passed."""
    reference, sanity = board.cells[board.config.reference], board.sanity
    passed = [cell for cell in reference if not (sanity.cases and sanity.refusal(cell.task))]
    return [cell.task for cell in passed if NLL in cell.means() or _score(cell) >= MIN_FULL]


def rows_of(board: Board) -> list[Row]:
    """One row for each entry that runs, the best quality first.

    Quality is over the tasks that full KV answers; without such a task, rows have no quality.
    """
    reference = board.cells[board.config.reference]
    tasks = judged_tasks(board)
    found = [
        _row(entry, cells, reference, tasks, is_shared=board.config.shares(entry))
        for entry, cells in board.cells.items()
    ]
    return ranked(found)


def ranked(rows: Sequence[Row]) -> list[Row]:
    """Rows with the Pareto-optimal ones marked, the best quality first."""
    unbeaten = _unbeaten(rows)
    marked = [
        replace(row, is_unbeaten=is_best) for row, is_best in zip(rows, unbeaten, strict=True)
    ]
    return sorted(marked, key=lambda row: (-row.quality.mean, row.kv_share))


def _row(
    entry: BoardEntry,
    cells: Sequence[CellResult],
    reference: Sequence[CellResult],
    tasks: Sequence[str],
    *,
    is_shared: bool,
) -> Row:
    judged = [
        (values_of(cell), values_of(full))
        for cell, full in zip(cells, reference, strict=True)
        if cell.task in tasks
    ]
    share = _kv_share(cells, reference)
    tokens = sum(p.prompt_tokens + p.output_tokens for cell in cells for p in cell.prompts)
    return Row(
        entry=entry,
        quality=_quality(judged, is_reference=cells is reference),
        scores={cell.task: _score(cell) for cell in cells},
        kv_peak_bytes=share * _mean_bytes(reference),
        kv_share=share,
        tokens_per_s=None if is_shared else tokens / sum(cell.seconds for cell in cells),
        is_reference=cells is reference,
    )


def _quality(
    judged: Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]], *, is_reference: bool
) -> Mean:
    """Mean over tasks of score over full KV's; that of full KV itself has no interval."""
    if not judged:
        return _NO_QUALITY
    found = mean_of_tasks(judged)
    return replace(found, low=1.0, high=1.0) if is_reference else found


def _unbeaten(rows: Sequence[Row]) -> list[bool]:
    """Whether no other row has at least the quality and fewer bytes, or more at equal bytes."""

    def beats(other: Row, row: Row) -> bool:
        better = other.quality.mean >= row.quality.mean and other.kv_share <= row.kv_share
        equal = other.quality.mean == row.quality.mean and other.kv_share == row.kv_share
        return better and not equal

    return [row.quality.count > 0 and not any(beats(other, row) for other in rows) for row in rows]


def best_rules(rows: Sequence[Row], wanted: float) -> dict[str, list[Row]]:
    """Rows that keep a quality, by budget, the fewest bytes first."""
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.kv_share):
        if row.entry.rule != FULL:
            kept = found.setdefault(row.entry.budget, [])
            kept += [row] * (row.quality.mean >= wanted)
    return found


BYTE_CLASSES = (0.3, 0.55, 0.8)
"""KV bytes over full KV's, at most, of the classes whose best entries are confirmed."""


def best_of_classes(rows: Sequence[Row], count: int) -> list[BoardEntry]:
    """The `count` entries of the highest quality in each class of bytes."""
    found: dict[BoardEntry, None] = {}
    least = 0.0
    for most in BYTE_CLASSES:
        own = [row for row in rows if least < row.kv_share <= most and row.quality.count]
        best = sorted(own, key=lambda row: (-row.quality.mean, row.kv_share))[:count]
        found |= dict.fromkeys(row.entry for row in best)
        least = most
    return list(found)


def _score(cell: CellResult) -> float:
    return float(values_of(cell).mean())


def values_of(cell: CellResult) -> NDArray[np.float64]:
    """Scores of which more is better: for text, the mean probability of a token (geometric)."""
    first = cell.metrics[0]
    found = np.asarray(cell.values(first), dtype=np.float64)
    return np.exp(-found) if first == NLL else found


def _mean_bytes(cells: Sequence[CellResult]) -> float:
    known = [prompt.kv_peak_bytes for cell in cells for prompt in cell.prompts]
    return float(np.mean([num_bytes for num_bytes in known if num_bytes is not None]))


def _kv_share(cells: Sequence[CellResult], reference: Sequence[CellResult]) -> float:
    """Peak KV bytes over those of full KV, of the prompts whose bytes were measured."""
    pairs = [
        (one.kv_peak_bytes, full.kv_peak_bytes or 0)
        for cell, other in zip(cells, reference, strict=True)
        for one, full in zip(cell.prompts, other.prompts, strict=True)
        if one.kv_peak_bytes is not None
    ]
    return sum(one for one, _ in pairs) / max(1, sum(full for _, full in pairs))


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardResult:
    """Rows of a leaderboard and how they were measured."""

    rows: Sequence[Row]  # the best quality first
    tasks: Sequence[str]
    tokens: int
    count: int
    seeds: Sequence[int]
    judged: Sequence[str]  # tasks that quality is over
    sanity: Sanity  # whether the model may judge a rule
    refused: Mapping[str, str]  # why entries do not run, by their text
    evict_before_question: bool | None = None  # as in `SampleRunner`
    entries_left: int = 0  # that did not run before the time limit

    @property
    def reference(self) -> Row:
        return next(row for row in self.rows if row.is_reference)

    @property
    def why_no_quality(self) -> str:
        """Why no task counts, and what to change; empty if one counts."""
        if self.judged:
            return ""
        scores = ", ".join(f"{task} {self.reference.scores[task]:.3g}" for task in self.tasks)
        return (
            "No task counts, so there is no quality and no Pareto-optimal entry: each task scores "
            f"below {MIN_FULL} with full KV ({scores}) or failed the sanity check. Choose other "
            "tasks (--tasks), or shorter prompts (--tokens)."
        )

    @property
    def num_prompts(self) -> int:
        return self.count * len(self.seeds)

    def arms(self) -> dict[str, object]:
        return {
            "rows": [row.as_dict() for row in self.rows],
            "refused": dict(self.refused),
            "judged_tasks": list(self.judged),
            "entries_left": self.entries_left,
            "sanity_check": self.sanity.as_dict(),
        }

    def options(self) -> dict[str, object]:
        return {
            "tasks": list(self.tasks),
            "tokens": self.tokens,
            "num_prompts": self.count,
            "seeds": list(self.seeds),
            "evict_before_question": self.evict_before_question,
        }

    @classmethod
    def of(cls, board: Board) -> "BoardResult":
        config = board.config
        return cls(
            rows=rows_of(board),
            tasks=[task.name for task in config.tasks],
            tokens=config.tokens,
            count=config.count,
            seeds=config.seeds,
            judged=judged_tasks(board),
            sanity=board.sanity,
            refused={str(entry): why for entry, why in board.refused.items()},
            evict_before_question=config.evict_before_question,
            entries_left=board.entries_left,
        )

    @classmethod
    def stored(cls, run: Mapping[str, Any]) -> "BoardResult":
        arms, config = run["arms"], run["config"]
        return cls(
            rows=[Row.stored(row) for row in arms["rows"]],
            tasks=config["tasks"],
            tokens=config["tokens"],
            count=config["num_prompts"],
            seeds=config["seeds"],
            judged=arms["judged_tasks"],
            sanity=Sanity.stored(arms["sanity_check"]),
            refused=arms["refused"],
            entries_left=arms.get("entries_left", 0),
            # earlier runs evicted the question with the context
            evict_before_question=config.get("evict_before_question", False),
        )
