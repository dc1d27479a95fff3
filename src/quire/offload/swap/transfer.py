"""Who copies beside whoever computes: a thread here, a stream of a device in `stream_carrier`."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, runtime_checkable

from quire.kv.step_log import ClockMarks, Marks


@runtime_checkable
class Transfer(Protocol):
    """A copy under way, as who computes sees it."""

    def result(self) -> None:
        """Return when what is computed from now on finds it done; raise what it raised."""
        ...

    def exception(self) -> BaseException | None:
        """Return when it is done; what it raised, or None."""
        ...


@runtime_checkable
class TransferWorker(Protocol):
    """Copies one thing after another, beside whoever asks."""

    def submit(self, copy: Callable[[], None], num_bytes: int) -> Transfer:
        """Begin a copy behind all others; its end can be waited for, and raises what it raised.

        Args:
            copy: does it.
            num_bytes: how much that is.
        """
        ...

    def marks(self) -> Marks:
        """For the times of one step."""
        ...


class ThreadTransferWorker:
    """A thread that copies as fast as memory lets it."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="quire-carrier")

    def submit(self, copy: Callable[[], None], num_bytes: int) -> Transfer:
        """See `TransferWorker`."""
        return self._threads.submit(copy)

    def marks(self) -> Marks:
        """See `TransferWorker`."""
        return ClockMarks()

    def close(self) -> None:
        """End the thread behind its last copy."""
        self._threads.shutdown()
