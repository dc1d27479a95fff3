"""Chooses the prefilled query for a free row, for paged KV and for dense rows."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from quire.scheduler.batchers.units import Unit, first_member

T = TypeVar("T")


def best_fit(queue: Sequence[T], num_tokens: Callable[[T], int], longest: int) -> T | None:
    """Return the longest query that is not longer than the longest row; None if there is none.

    Args:
        queue: prefilled queries, best first; the first of equal lengths is returned.
        num_tokens: returns the tokens of a query.
        longest: tokens of the longest row.
    """
    fitting = [each for each in queue if num_tokens(each) <= longest]
    return max(fitting, key=num_tokens, default=None)


class Insertion(ABC):
    """Chooses the next query from the queue of prefilled queries."""

    @abstractmethod
    def choose(self, queue: Sequence[Unit], longest: int) -> Unit:
        """Return the query to insert next.

        Args:
            queue: prefilled queries, at least one, best first.
            longest: tokens of the longest row of the batch; 0 for an empty batch.
        """

    @abstractmethod
    def inserted(self, unit: Unit, first: Unit) -> None:
        """Record that a query was inserted while `first` was the first of the queue."""


class FirstPrefilled(Insertion):
    """The order of the queue."""

    def choose(self, queue: Sequence[Unit], longest: int) -> Unit:
        return queue[0]

    def inserted(self, unit: Unit, first: Unit) -> None:
        """See `Insertion`."""


class BestFit(Insertion):
    """The longest query that is not longer than the longest row; if none is, the first.

    Args:
        patience: maximum queries that may be inserted before the first one.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._first: Unit | None = None
        self._passed = 0

    def choose(self, queue: Sequence[Unit], longest: int) -> Unit:
        if queue[0] is self._first and self._passed >= self._patience:
            return queue[0]
        return best_fit(queue, lambda unit: first_member(unit).num_tokens, longest) or queue[0]

    def inserted(self, unit: Unit, first: Unit) -> None:
        if first is not self._first:
            self._first, self._passed = first, 0
        self._passed += unit is not first
