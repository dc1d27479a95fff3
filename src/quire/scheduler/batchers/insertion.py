"""Which of the prefilled queries takes a row that is free, in pages and in dense rows."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from quire.scheduler.batchers.units import Unit, first_member

T = TypeVar("T")


def best_fit(queue: Sequence[T], num_tokens: Callable[[T], int], longest: int) -> T | None:
    """The longest that is no longer than the longest row, the first of equals; None if none is.

    Args:
        queue: prefilled, best first.
        num_tokens: of one of them.
        longest: tokens of the longest row.
    """
    fitting = [each for each in queue if num_tokens(each) <= longest]
    return max(fitting, key=num_tokens, default=None)


class Insertion(ABC):
    """Chooses from the queue."""

    @abstractmethod
    def choose(self, queue: Sequence[Unit], longest: int) -> Unit:
        """The one to be inserted next.

        Args:
            queue: prefilled, at least one, best first.
            longest: tokens of the longest row of the batch; 0 where nobody is in it.
        """

    @abstractmethod
    def inserted(self, unit: Unit, first: Unit) -> None:
        """One has been inserted, which need not be the first of the queue."""


class FirstPrefilled(Insertion):
    """In the order of the queue."""

    def choose(self, queue: Sequence[Unit], longest: int) -> Unit:
        """See `Insertion`."""
        return queue[0]

    def inserted(self, unit: Unit, first: Unit) -> None:
        """See `Insertion`."""


class BestFit(Insertion):
    """The largest that fits the longest row; where none does, the first.

    Args:
        patience: others that may be inserted before the one that is first.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._first: Unit | None = None
        self._passed = 0

    def choose(self, queue: Sequence[Unit], longest: int) -> Unit:
        """See `Insertion`."""
        if queue[0] is self._first and self._passed >= self._patience:
            return queue[0]
        return best_fit(queue, lambda unit: first_member(unit).num_tokens, longest) or queue[0]

    def inserted(self, unit: Unit, first: Unit) -> None:
        """See `Insertion`."""
        if first is not self._first:
            self._first, self._passed = first, 0
        self._passed += unit is not first
