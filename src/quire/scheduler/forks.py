"""Forks running sequences, and falls back if there are no pages for a fork.

    no pages for          first                                   then
    a fork of a prompt    evict cached prefixes and tokens of     the fork leaves the group and
                          lanes above their cap                   prefills its own prompt; beams
                                                                  are preempted together
    a branching beam      the same, then preempt other requests   all beams are preempted and
                                                                  recomputed with their new tokens

A fork shares the pages of its parent. Only the pages of statistics are copied, so only these pages
can be missing.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from quire.errors import NeverFits, OutOfPages, RequestError
from quire.kv.sharing import statistics_pages
from quire.layout.pages import PageClass
from quire.scheduler.lanes import LaneCapacities
from quire.scheduler.lifecycle import Lifecycle
from quire.scheduler.request import (
    PlannedFork,
    Request,
    RequestGroup,
    RequestState,
    branch,
    due_forks,
    leave,
    not_continued,
    same_group,
    together,
)
from quire.scheduler.sequence_memory import SequenceMemory, rows_of, share_evictions

NO_PAGES = "no pages for the statistics of a fork"
NEVER = (
    "no pages for the request's next step, even alone: use fewer beams or completions, shorten the "
    "prompt, lower max_tokens or raise --kv-memory"
)


class Forks:
    """Forks of the groups of one scheduler.

    Args:
        sequence_memory: the requests' pages.
        capacities: evicts tokens for the pages of a fork.
        lifecycle: preempts and ends requests.
    """

    def __init__(
        self, sequence_memory: SequenceMemory, capacities: LaneCapacities, lifecycle: Lifecycle
    ) -> None:
        self._sequence_memory, self._memory = sequence_memory, sequence_memory.memory
        self._capacities, self._lifecycle = capacities, lifecycle
        self._preempter, self._running = lifecycle.preempter, lifecycle.running

    # ---- members that begin as forks -----------------------------------------------------------

    def make_due(self, requests: Iterable[Request]) -> list[PlannedFork]:
        """Fork the planned children whose common tokens are computed; return the new forks.

        Args:
            requests: the requests of a completed step.
        """
        due = [planned for request in requests for planned in due_forks(request)]
        return [planned for planned in due if self._make(planned)]

    def _make(self, planned: PlannedFork) -> bool:
        if self._fork(planned):
            self._lifecycle.add_fork(planned.child)
            return True
        child = planned.child
        if child.group is None or together(child)[0] in self._lifecycle.waiting:
            return False  # its group was preempted: forks are planned again at its admission
        if not child.group.atomic:
            self._split(child)
        elif self._are_alone([planned.parent]):
            self._lifecycle.fail(planned.parent, NeverFits(NEVER))
        else:
            self._lifecycle.preempt(planned.parent, NO_PAGES, recompute=True)
        return False

    def _fork(self, planned: PlannedFork) -> bool:
        """Fork a running request if pages are free or can be freed without preemptions."""
        parent = planned.parent
        while parent.is_running and not self._has_free_pages([parent]):
            if not self._capacities.evict_under_pressure(self._running):
                if not self._are_alone([parent]):
                    return False
                self._compact([parent])
                return self._has_free_pages([parent]) and self._copy(parent, planned.child)
        return parent.is_running and self._copy(parent, planned.child)

    def _compact(self, parents: Sequence[Request]) -> None:
        """Compact the pages of a group that runs alone, and offload as many as possible."""
        for free_pages in (self._preempter.compact, self._preempter.halve_staging):
            if not self._has_free_pages(parents):
                free_pages(parents[0])

    def _copy(self, parent: Request, child: Request) -> bool:
        try:
            self._sequence_memory.fork(parent, child)
        except OutOfPages:
            return False
        return True

    def _are_alone(self, members: Sequence[Request]) -> bool:
        """Whether only these requests and members of their group run."""
        first = members[0]
        return all(r in members or same_group(r, first) for r in self._running)

    def _split(self, member: Request) -> None:
        """Split a member, and the members planned as its forks, off their group."""
        group = member.group
        assert group is not None
        leave(member)
        planned_from = [f.child for f in group.forks if f.parent is member]
        group.forks = [f for f in group.forks if f.parent is not member]
        member.group, member.split_from = None, group
        if member.is_running:
            self._lifecycle.preempt(member, NO_PAGES, recompute=True)
        else:
            self._lifecycle.wait(member)
        for other in planned_from:
            self._split(other)

    def split_off(self, request: Request) -> bool:
        """Split the last running member other than `request` off its group.

        Returns:
            False if there is none, or if the group is a beam search.
        """
        if request.group is None or request.group.atomic:
            return False
        others = [r for r in self._running if same_group(r, request) and r is not request]
        if not others:
            return False
        self._split(max(others, key=self._preempter.order))
        return True

    # ---- beams ---------------------------------------------------------------------------------

    def branch(self, group: RequestGroup, parents: Sequence[int]) -> None:
        """Replace the members of a running group; see `group.branch`.

        If there are no pages for the forks, the group is preempted and recomputed. If a fork
        raises, the search ends with an error, because only some of its beams have branched.
        """
        beams = [*group.members, *group.spare]
        self._lifecycle.pause_group(group.members)
        try:
            for member in not_continued(group, parents):
                self._drop(member)
            copied = [group.members[n] for i, n in enumerate(parents) if n in parents[:i]]
            if copied:
                self._free_pages(copied)
            branch(group, parents, self._copy_or_inherit)
        except BaseException as error:
            self._lifecycle.fail_group(beams, RequestError(f"beams could not be copied: {error}"))
            raise
        self._lifecycle.resume_group(group.members)
        if any(member.memory.row < 0 for member in group.members):
            self._lifecycle.preempt(group.members[0], NO_PAGES, recompute=True)

    def _drop(self, request: Request) -> None:
        self._sequence_memory.free(request, "beam dropped")
        request.progress.state = RequestState.WAITING
        request.eviction.trace.clear()  # it will be used again as a fork of another beam

    def _free_pages(self, parents: Sequence[Request]) -> None:
        """Free pages for forks of beams, by evictions and then by preemptions if needed.

        Beams of other groups are not preempted: their tokens of this step may not be sampled yet.
        """
        while not self._has_free_pages(parents):
            if self._capacities.evict_under_pressure(self._running):
                continue
            others = [r for r in self._running if r.group is None or not r.group.atomic]
            victim = self._preempter.victim(others, parents[0])
            if victim is None:
                break
            self._lifecycle.preempt(victim, NO_PAGES)
        if not self._running:
            self._compact(parents)

    def _copy_or_inherit(self, parent: Request, child: Request) -> None:
        """Fork a beam; without pages, copy its eviction state and leave the child without KV."""
        if not self._copy(parent, child):
            share_evictions(parent, child)

    # ---- free pages ----------------------------------------------------------------------------

    def _has_free_pages(self, parents: Sequence[Request]) -> bool:
        """Whether there are rows and pages for forks of these requests.

        Evicts cached prefixes and offloads pages.
        """
        if self._memory.num_free_rows < len(parents):
            return False
        # After prefill a window lane still holds the pages of its last chunk, which are outside of
        # the window of all later tokens. Free them now: the fork was admitted without them.
        self._memory.drop_behind_windows(np.unique(rows_of(parents)))
        needed: dict[PageClass, int] = {}
        for parent in parents:
            for page_class, pages in statistics_pages(self._memory, parent.memory.row).items():
                needed[page_class] = needed.get(page_class, 0) + pages
        return self._sequence_memory.free_pages(needed)
