"""Which of the prefilled queries takes a row that is free."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from quire.scheduler.batchers.units import Unit, first_member


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
        fitting = [unit for unit in queue if first_member(unit).num_tokens <= longest]
        if not fitting or (queue[0] is self._first and self._passed >= self._patience):
            return queue[0]
        return max(fitting, key=lambda unit: first_member(unit).num_tokens)

    def inserted(self, unit: Unit, first: Unit) -> None:
        """See `Insertion`."""
        if first is not self._first:
            self._first, self._passed = first, 0
        self._passed += unit is not first
