"""Calls from several threads: the lock of `LLM`, and commands for the thread of `AsyncLLM`."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from quire.errors import EngineDead, QuireError, RequestError


class CallLock:
    """Serializes the calls of several threads, and refuses calls from inside a step.

    The lock is reentrant. Withdrawing requests does not wait for the lock, because Python may close
    an abandoned generator in any thread at any time, also inside a step. The thread that holds the
    lock then cancels these requests when its step or call ends.

    Args:
        cancel: cancels requests by their ids; called with the lock held and outside of steps.
    """

    def __init__(self, cancel: Callable[[list[str]], None]) -> None:
        self._cancel = cancel
        self._lock = threading.RLock()
        self._in_use = False
        self._withdrawn: deque[str] = deque()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock, after the calls of other threads have ended."""
        try:
            with self._lock:
                yield
        finally:
            self._cancel_withdrawn()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold the lock for reading the engine's state; allowed in a listener inside a step."""
        with self.held():
            before, self._in_use = self._in_use, True
            try:
                yield
            finally:
                self._in_use = before

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Mark a change of the engine, such as a step; the caller holds the lock.

        Raises:
            RequestError: the call comes from inside another change.
        """
        if self._in_use:
            raise RequestError(
                "expected a call between two steps, got one from inside a step, such as by a "
                "listener of KV events: save the event and call generate, stream or close later"
            )
        self._in_use = True
        try:
            yield
        finally:
            self._in_use = False

    def withdraw(self, request_ids: Iterable[str]) -> None:
        """Cancel requests now, or when the thread that holds the lock ends its step or call."""
        self._withdrawn.extend(request_ids)
        self._cancel_withdrawn()

    def _cancel_withdrawn(self) -> None:
        while self._withdrawn and self._lock.acquire(blocking=False):
            try:
                if self._in_use:  # by this thread, which retries when its call ends
                    return
                self._cancel(list(self._taken()))
            finally:
                self._lock.release()

    def _taken(self) -> Iterator[str]:
        """Remove and yield the withdrawn ids; safe if this thread withdraws more meanwhile."""
        with suppress(IndexError):
            while True:
                yield self._withdrawn.popleft()


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Command(Generic[T]):
    """A function to run in the engine's thread, and the future for its result."""

    work: Callable[[], T]
    future: "Future[T]"

    def run(self) -> None:
        """Run the function and set the future; errors other than `QuireError` are also raised."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.work()
        except QuireError as error:  # only the caller handles it
            self.future.set_exception(error)
        except BaseException as error:
            self.future.set_exception(error)
            raise
        else:
            self.future.set_result(result)

    def refuse(self, error: EngineDead) -> None:
        """Set the future to an error without running the function."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)
