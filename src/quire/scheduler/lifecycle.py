"""Moves requests between waiting, running and finished, and frees their pages.

    submit -> WAITING -> start -> RUNNING -> finish | fail -> FINISHED
                 ^                   |
                 +---- preempt ------+     with KV in the swap space, or without

A group (parallel samples, beams) moves as a whole, because pages that another member references
would not be freed. Torch-free.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from quire.errors import QuireError
from quire.scheduler.fairness import Fairness
from quire.scheduler.preemption import Preempter
from quire.scheduler.request import Request, RequestState, leave, together
from quire.scheduler.sequence_memory import FINISHED, SequenceMemory


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that ended with an error; the engine reports it."""

    request: Request
    error: QuireError


class Lifecycle:
    """State transitions of the requests of one scheduler.

    Args:
        running: running requests, which hold KV, in the order of admission; only this object
            changes the list.
        sequence_memory: the requests' pages.
        fairness: the tenants' accounts.
        preempter: swaps KV out or frees it.
        learn: called with each request that finished normally.

    Attributes:
        running, fairness, preempter: see above.
        waiting: the fair queue, from which admission takes the next request.
        failures: requests that ended with an error and were not reported yet.
    """

    def __init__(
        self,
        running: list[Request],
        sequence_memory: SequenceMemory,
        fairness: Fairness,
        preempter: Preempter,
        learn: Callable[[Request], None],
    ) -> None:
        self.running, self.waiting = running, fairness.waiting
        self._sequence_memory, self._learn = sequence_memory, learn
        self.fairness, self.preempter = fairness, preempter
        self.failures: list[Failure] = []

    # ---- waiting -------------------------------------------------------------------------------

    def wait(self, request: Request) -> None:
        """Queue a request; a group is queued as its first member."""
        for member in together(request):
            member.progress.state = RequestState.WAITING
            member.progress.queued_s = self._sequence_memory.events.now_s()
        self.waiting.push(together(request)[0])

    def preempt(
        self, request: Request, reason: str, *, swap_all: bool = False, recompute: bool = False
    ) -> None:
        """Preempt a request and its group, and queue them.

        Args:
            request: a running request.
            reason: reason for the event log.
            swap_all: swap out all KV if the swap space has enough memory, regardless of cost.
            recompute: free all KV without a swap; it is recomputed.
        """
        leaving = self._stop(request)
        self.fairness.preempted(leaving)
        self.preempter.preempt(leaving, reason, swap_all=swap_all, recompute=recompute)
        self.wait(request)
        self.fairness.recount(self.running)

    def swap_out(self, request: Request) -> None:
        """Swap out a request and its group, and queue them; if it fails, they keep running.

        For batchers that hold prefilled requests in the swap space; it is not a preemption.
        """
        leaving = _running_members(request)
        if self.preempter.swap_out(leaving):
            for member in leaving:
                self.running.remove(member)
                self.fairness.finalize(member)
            self.wait(request)

    def restart(self, request: Request, reason: str) -> None:
        """Free the KV of a request and its group without a swap, and queue them."""
        self._free_group(request, reason)
        self.wait(request)

    # ---- running -------------------------------------------------------------------------------

    def start(self, request: Request) -> None:
        """Mark an admitted request, which holds KV, as running."""
        waited_s = self._sequence_memory.events.now_s() - request.progress.queued_s
        self.fairness.admitted(request, waited_s)
        request.progress.state = RequestState.RUNNING
        self.running.append(request)

    # ---- finished ------------------------------------------------------------------------------

    def finish(self, request: Request, reason: str = FINISHED) -> None:
        """End a request in any state and free its pages.

        The admission rule learns only from requests that finished normally (`FINISHED`).
        """
        queued = request in self.waiting
        if request.is_running:
            self.running.remove(request)
            self._sequence_memory.free(request, reason)
            if reason == FINISHED:
                self._learn(request)
        elif request.progress.state is RequestState.WAITING:
            self.waiting.discard(request)
        self.preempter.free_swapped(request)
        request.progress.state = RequestState.FINISHED
        # remove an ended member from its group
        copies_wait = leave(request)
        if request.group is None or not request.group.members or not (queued or copies_wait):
            return
        for member in together(request) if copies_wait else ():
            self.preempter.free_swapped_group(member)  # its forks are planned again
        self._free_group(request, reason)
        if together(request)[0] not in self.waiting:  # the group has a new first member
            self.wait(request)

    def fail(self, request: Request, error: QuireError) -> None:
        """End a request with an error; other requests are unaffected."""
        self.failures.append(Failure(request, error))
        self.finish(request, "policy error")

    # ---- groups --------------------------------------------------------------------------------

    def _stop(self, request: Request) -> list[Request]:
        """Remove a request and its group from the running list; return them."""
        leaving = _running_members(request)
        for member in leaving:
            self.running.remove(member)
        return leaving

    def _free_group(self, request: Request, reason: str) -> None:
        for member in self._stop(request):
            self.fairness.finalize(member)
            self._sequence_memory.free(member, reason)

    # ---- forks ---------------------------------------------------------------------------------

    def add_fork(self, child: Request) -> None:
        """Add a forked request, whose pages are shared already, to the running list."""
        self.running.append(child)

    def pause_group(self, members: Iterable[Request]) -> None:
        """Remove the beams of a group from the running list while they branch."""
        for member in members:
            self.running.remove(member)

    def resume_group(self, members: Sequence[Request]) -> None:
        """Add the beams that hold pages to the running list again."""
        self.running.extend(member for member in members if member.memory.row >= 0)

    def fail_group(self, members: Sequence[Request], error: QuireError) -> None:
        """End all beams of a paused group with one error; other requests are unaffected."""
        self.failures.append(Failure(members[0], error))
        for member in members:
            if member.memory.row >= 0:
                member.progress.state = RequestState.RUNNING
                self.running.append(member)
            self.finish(member, "beams could not be copied")


def _running_members(request: Request) -> list[Request]:
    return [member for member in together(request) if member.is_running]
