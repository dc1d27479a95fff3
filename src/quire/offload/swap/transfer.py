"""Copies next to the computation: by a thread here, by a stream of a device in `kv.cuda_transfer`.

Swap copies run on a stream of their own:

    compute   step n |        step n + 1        | step n + 2
    copies           | out: pages 4 5 6 -> host |  in: host -> pages 8 9
                       |                               |
                       before 4 5 6 are used again     before later computation

The CPU waits for no copy. Copies run in the order of the calls, so host memory that is freed can be
overwritten by later copies at once. Pages that are copied out are fenced (`quire.kv.pages`):
computation waits for the copy if it is to use one of them.
"""

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from quire.kv.pages import CopyFences, PageNumbers
from quire.kv.swap import TimedCopy
from quire.layout.pages import PageClass
from quire.offload.step_log import ClockMarks, Marks
from quire.offload.swap.host_pool import HostCopies


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


@dataclass(slots=True, eq=False)
class _Group:
    """Copies of one swap in one direction.

    Attributes:
        back: whether they copy into the arena.
        marks: time stamps of the group.
        num_bytes: bytes copied.
        spans: marks of the start and the end of each copy.
        transfers: the copies.
    """

    back: bool
    marks: Marks
    num_bytes: int = 0
    spans: list[tuple[object, object]] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Duration of the copies, which have ended."""
        seconds = self.marks.seconds
        return sum(seconds(end) - seconds(begin) for begin, end in self.spans)


class StreamedCopies:
    """`HostCopies` that a transfer worker runs next to the computation.

    Args:
        copies: run on the worker's stream.
        worker: runs copies one after another, each after earlier computation.
        fences: of the arena.
    """

    def __init__(self, copies: HostCopies, worker: TransferWorker, fences: CopyFences) -> None:
        self._copies, self._worker, self._fences = copies, worker, fences
        self._open: _Group | None = None
        self._groups: list[_Group] = []  # the open one included
        weakref.finalize(self, _finish, self._groups)  # before the host memory is unpinned

    def save(self, page_class: PageClass, pages: PageNumbers, start: int) -> None:
        """Start to copy pages of the arena to consecutive host bytes from `start`."""

        def copy() -> None:
            self._copies.save(page_class, pages, start)

        transfer = self._submit(copy, len(pages) * page_class.page_bytes, back=False)
        self._fences.add(pages, page_class.page_bytes, transfer)

    def load(self, page_class: PageClass, pages: PageNumbers, start: int) -> None:
        """Start to copy host bytes into pages; later computation waits for them.

        If the copy fails, later computation waits for its parts that were started.
        """

        def copy() -> None:
            self._copies.load(page_class, pages, start)

        try:
            self._submit(copy, len(pages) * page_class.page_bytes, back=True).result()
        except BaseException:
            self._worker.submit(_nothing, 0).result()
            raise

    def wait(self) -> None:
        """Return at once: fences order the copies that were started."""
        self._open = None

    def timed(self) -> list[TimedCopy]:
        """Return the copies that ended since the last call, one for each `wait`."""
        closed = (group for group in self._groups if group is not self._open)
        ended = [g for g in closed if all(copy.done() for copy in g.transfers)]
        self._groups[:] = [group for group in self._groups if group not in ended]
        return [TimedCopy(g.back, g.num_bytes, g.seconds) for g in ended if g.spans]

    def _submit(self, copy: Callable[[], None], num_bytes: int, *, back: bool) -> Transfer:
        if self._open is None or self._open.back != back:
            self._open = _Group(back, self._worker.marks())
            self._groups.append(self._open)
        group = self._open

        def timed() -> None:
            begin = group.marks.now()
            copy()
            group.spans.append((begin, group.marks.now()))

        transfer = self._worker.submit(timed, num_bytes)
        group.transfers.append(transfer)
        group.num_bytes += num_bytes
        return transfer


def _finish(groups: list[_Group]) -> None:
    """Wait until no copy is in flight."""
    for group in groups:
        for transfer in group.transfers:
            transfer.exception()


def _nothing() -> None:
    """Copy nothing: its end is the end of all earlier copies."""
