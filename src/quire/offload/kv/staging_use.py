"""The step that uses staging pages now: whoever moves pages ends its copies first."""

from typing import Protocol, runtime_checkable


@runtime_checkable  # for the type checks in tests
class Pending(Protocol):
    """A step whose copies may still be under way."""

    def finalize(self) -> None:
        """Return when nothing is under way."""
        ...


class StagingUse:
    """Shared by the bookkeeping of offloaded pages and by the steps that read them."""

    def __init__(self) -> None:
        self._step: Pending | None = None

    def begin(self, step: Pending) -> None:
        """Note the step that uses the staging pages from now on."""
        self._step = step

    def finalize(self) -> None:
        """Return when the step has no copies under way; it stays the one that uses the pages."""
        if self._step is not None:
            self._step.finalize()

    def end(self) -> None:
        """Settle the step and forget it."""
        self.finalize()
        self._step = None
