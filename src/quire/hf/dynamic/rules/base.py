"""What a batch rule decides: who is read when, and who gets which free row."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from quire.hf.dynamic.query import Query

SIMILAR = 1.25
"""Prompts are read together where the longest is at most so many times the shortest."""

SIMILAR_TOKENS = 16
"""Or at most so many tokens longer."""


@dataclass(frozen=True, slots=True)
class BatchView:
    """What a rule sees.

    Attributes:
        size: rows the batch may have now.
        live: queries in rows.
        waiting: prompts to be read, in line.
        ready: queries with KV and no row, in line.
        columns: of the longest row.
        group_tokens: most tokens, pads counted, that are read together.
    """

    size: int
    live: Sequence[Query]
    waiting: Sequence[Query]
    ready: Sequence[Query]
    columns: int
    group_tokens: int

    @property
    def free(self) -> int:
        """Rows that may be filled."""
        return self.size - len(self.live)


class BatchRule(ABC):
    """One rule.

    Attributes:
        name: in the registry.
        shapes: prompts are read by the batch's own forward, all rows padded to the longest.
        runs_to_end: rows stay as they are, finished ones too, until all have ended.
        reads_ahead: prompts may be read in the background, before a row is free.
        least_ready: prefilled queries wanted to choose from when a row is free.
    """

    name: str
    shapes = False
    runs_to_end = False
    reads_ahead = False
    least_ready = 1

    def open_rows(self, view: BatchView) -> int:
        """Rows that may be filled now."""
        return view.free

    @abstractmethod
    def next_group(self, view: BatchView) -> list[Query]:
        """Which waiting queries are read together next; empty where none waits."""

    def choose(self, view: BatchView) -> Query | None:
        """Which ready query enters next; None to read others first."""
        if not view.ready:
            return None
        first = view.ready[0]
        outranked = view.waiting and view.waiting[0].priority < first.priority
        return None if outranked else first


def similar_group(waiting: Sequence[Query], most: int, group_tokens: int) -> list[Query]:
    """The first in line, and those behind it whose prompts are of similar length.

    Args:
        waiting: in line.
        most: queries.
        group_tokens: most tokens, pads counted.
    """
    group: list[Query] = []
    for query in waiting[: 4 * most]:
        lengths = [member.num_to_read for member in (*group, query)]
        shortest, longest = min(lengths), max(lengths)
        if group and query.priority > group[0].priority:
            break
        if longest > max(SIMILAR * shortest, shortest + SIMILAR_TOKENS):
            continue
        if group and longest * len(lengths) > group_tokens:
            continue
        group.append(query)
        if len(group) == most:
            break
    return group
