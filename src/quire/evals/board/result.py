"""The result of a leaderboard: what its pages show and its JSON stores.

`joined` adds the rows of another source, such as kvpress, that ran the same prompts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.errors import ConfigError
from quire.evals.board.grid import FULL, QUIRE
from quire.evals.board.run import Board
from quire.evals.board.table import Row, judged_tasks, ranked, rows_of
from quire.evals.suite.sanity import Sanity


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardResult:
    """Rows of a leaderboard and how they were measured.

    Attributes:
        rows: one row for each entry that ran, the best quality first.
        tasks: names of the tasks.
        tokens: length of the prompts.
        count: prompts of each task and seed.
        seeds: seeds of the prompts.
        judged: tasks that quality is over.
        sanity: whether the model may judge a rule.
        refused: why entries do not run, by their text.
    """

    rows: Sequence[Row]
    tasks: Sequence[str]
    tokens: int
    count: int
    seeds: Sequence[int]
    judged: Sequence[str]
    sanity: Sanity
    refused: Mapping[str, str]

    @property
    def reference(self) -> Row:
        """The row of full KV with the first codec."""
        return next(r for r in self.rows if r.entry.rule == FULL and r.kv_share == 1.0)

    @property
    def num_prompts(self) -> int:
        """Prompts of each task."""
        return self.count * len(self.seeds)

    def arms(self) -> dict[str, object]:
        """Rows and refusals as JSON values."""
        return {
            "rows": [row.as_dict() for row in self.rows],
            "refused": dict(self.refused),
            "judged_tasks": list(self.judged),
            "sanity_check": self.sanity.as_dict(),
        }

    def options(self) -> dict[str, object]:
        """Tasks and prompts as JSON values."""
        return {
            "tasks": list(self.tasks),
            "tokens": self.tokens,
            "num_prompts": self.count,
            "seeds": list(self.seeds),
        }

    @classmethod
    def of(cls, board: Board) -> "BoardResult":
        """The result of finished cells."""
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
        )

    @classmethod
    def stored(cls, run: Mapping[str, Any]) -> "BoardResult":
        """The result in a JSON object of `quire board`."""
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
        )

    def joined(self, other: "BoardResult") -> "BoardResult":
        """This result with the rows of other sources in another run, instead of its own.

        Raises:
            ConfigError: the other run has no such rows, other prompts, or another full KV.
        """
        added = [row for row in other.rows if row.entry.source != QUIRE]
        if not added:
            raise ConfigError("expected a run with rows of another source, got one without")
        own, others = self._comparable(), other._comparable()
        if own != others:
            raise ConfigError(
                f"expected a run with the same prompts and the same full KV, {own}, got {others}: "
                "use the same model and options in both runs"
            )
        retained = [row for row in self.rows if row.entry.source == QUIRE]
        sources = tuple({f"{row.entry.source}/" for row in added})
        about = {text: why for text, why in other.refused.items() if text.startswith(sources)}
        return replace(self, rows=ranked([*retained, *added]), refused={**self.refused, **about})

    def _comparable(self) -> dict[str, object]:
        full = self.reference
        measured = {"scores": dict(full.scores), "kv_peak_bytes": full.kv_peak_bytes}
        return {**self.options(), **measured}
