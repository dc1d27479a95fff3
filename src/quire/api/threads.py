"""Calls from several threads: the lock of `LLM`, and work that `AsyncLLM` hands to its thread."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from quire.errors import EngineDead, QuireError, RequestError


class CallLock:
    """Serializes the calls of several threads; no thread enters a step that is running.

    A thread that holds the lock may take it again. Requests are withdrawn without waiting, because
    Python closes an abandoned generator in any thread, at any moment, also inside a step: the
    thread that holds the lock cancels them when its step or its call ends.

    Args:
        cancel: ends requests by their ids; called with the lock held and outside steps.
    """

    def __init__(self, cancel: Callable[[list[str]], None]) -> None:
        self._cancel = cancel
        self._lock = threading.RLock()
        self._in_use = False
        self._withdrawn: deque[str] = deque()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Wait for the calls of other threads; hold the lock meanwhile."""
        try:
            with self._lock:
                yield
        finally:
            self._cancel_withdrawn()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold the lock and read the engine's state; a listener may do so inside a step."""
        with self.held():
            before, self._in_use = self._in_use, True
            try:
                yield
            finally:
                self._in_use = before

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change the engine, as a step does; the caller holds the lock.

        Raises:
            RequestError: the call comes from inside another change.
        """
        if self._in_use:
            raise RequestError(
                "expected a call between two steps, got one from inside a step, such as by a "
                "listener of KV events: note the event and call generate, stream or close later"
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
                if self._in_use:  # by this thread, whose call looks again when it ends
                    return
                self._cancel(list(self._taken()))
            finally:
                self._lock.release()

    def _taken(self) -> Iterator[str]:
        """All that are withdrawn; a generator closed meanwhile in this thread may take the rest."""
        with suppress(IndexError):
            while True:
                yield self._withdrawn.popleft()


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Command(Generic[T]):
    """Work for the engine's thread, and where its result goes."""

    work: Callable[[], T]
    future: "Future[T]"

    def run(self) -> None:
        """Do it, and hand its result over; what is no refusal is raised here too."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.work()
        except QuireError as error:  # a refusal: its caller's business only
            self.future.set_exception(error)
        except BaseException as error:
            self.future.set_exception(error)
            raise
        else:
            self.future.set_result(result)

    def refuse(self, error: EngineDead) -> None:
        """Say that it will not be done."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)
