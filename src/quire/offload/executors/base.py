"""The seam of executors."""

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from quire.offload.schedule.operations import Operation, Schedule
from quire.offload.timeline import Timeline

Work = Callable[[Operation], object]
"""Does what an operation says: copies, multiplies. It begins it and may return before it is done
where a device does it in order."""


@runtime_checkable
class Executor(Protocol):
    """Carries schedules out."""

    def run(self, schedule: Schedule, work: Work | None = None) -> Timeline:
        """Run all operations, each after what it needs; return when all have ended.

        Args:
            schedule: what to run.
            work: does an operation; None: nothing but time passes.

        Raises:
            OffloadError: an operation did not end, or failed.
        """


def nothing(_operation: Operation) -> None:
    """Work that does nothing."""


def dispatch(kinds: Mapping[str, Work]) -> Work:
    """Work that differs by kind; kinds that are not named do nothing."""

    def do(operation: Operation) -> object:
        return kinds.get(operation.kind, nothing)(operation)

    return do
