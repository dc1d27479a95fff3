"""Asynchronous copies: by a thread here, by a stream of a device in `kv.cuda_transfer`."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, runtime_checkable

from quire.offload.step_log import ClockMarks, Marks


@runtime_checkable
class Transfer(Protocol):
    """A copy in flight, as the computation sees it."""

    def result(self) -> None:
        """Make later computation wait for the copy; raises the copy's error."""
        ...

    def exception(self) -> BaseException | None:
        """Wait until the copy is done; its error, or None."""
        ...

    def done(self) -> bool:
        """Whether the copy has ended."""
        ...


@runtime_checkable
class TransferWorker(Protocol):
    """Runs copies one after another, concurrently with the computation."""

    def submit(self, copy: Callable[[], None], num_bytes: int) -> Transfer:
        """Queue a copy; the result waits for its end and raises its error.

        Args:
            copy: runs the copy.
            num_bytes: size of the copy.
        """
        ...

    def marks(self) -> Marks:
        """Time marks for one step."""
        ...


class ThreadTransferWorker:
    """Runs copies on a thread."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="quire-transfer")

    def submit(self, copy: Callable[[], None], num_bytes: int) -> Transfer:
        return self._threads.submit(copy)

    def marks(self) -> Marks:
        return ClockMarks()

    def close(self) -> None:
        """End the thread after its last copy."""
        self._threads.shutdown()
