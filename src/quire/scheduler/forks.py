"""Forks sequences that run, and does without where there are no pages for it.

    no pages for          first                                   then
    a copy of a prompt    cached prefixes are dropped, lanes      the copy runs apart and reads
                          over their cap go down to it            its own prompt; beams all wait
    a beam that branches  likewise; then others are preempted     all beams wait, and are computed
                                                                  again with their new tokens

A fork shares the pages of its parent, and copies those of statistics: only these can be missing.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from quire.errors import NeverFits, OutOfPages, RequestError
from quire.kv.sharing import statistics_pages
from quire.layout.pages import PageClass
from quire.scheduler.components import SchedulerComponents
from quire.scheduler.group import branch, due_forks, leave, not_continued, same_group, together
from quire.scheduler.request import PlannedFork, Request, RequestGroup
from quire.scheduler.request_parts import RequestState
from quire.scheduler.sequence_memory import rows_of, share_evictions

NO_PAGES = "no pages for the statistics of a fork"
NEVER = (
    "no pages for the request's next step, even alone: ask for fewer beams or answers, shorten the "
    "prompt, lower max_tokens or raise --kv-memory"
)


class Forks:
    """Forks of the groups of one scheduler.

    Args:
        components: of the scheduler.
    """

    def __init__(self, components: SchedulerComponents) -> None:
        self._sequence_memory, self._preempter = components.sequence_memory, components.preempter
        self._memory = components.sequence_memory.memory
        self._running, self._waiting = components.state.running, components.state.waiting
        self._capacities, self._lifecycle = components.capacities, components.lifecycle

    # ---- members that begin as forks ----------------------------------------------------------

    def make_due(self, requests: Iterable[Request]) -> list[PlannedFork]:
        """Fork those that have read what they share with another; return the forks made.

        Args:
            requests: of a step that has run.
        """
        due = [planned for request in requests for planned in due_forks(request)]
        return [planned for planned in due if self._make(planned)]

    def _make(self, planned: PlannedFork) -> bool:
        if self._fork(planned):
            self._lifecycle.add_fork(planned.child)
            return True
        child = planned.child
        if child.group is None or together(child)[0] in self._waiting:
            return False  # its group has been preempted: forks are planned anew when it enters
        if not child.group.atomic:
            self._split(child)
        elif self._are_alone([planned.parent]):
            self._lifecycle.fail(planned.parent, NeverFits(NEVER))
        else:
            self._lifecycle.preempt(planned.parent, NO_PAGES, recompute=True)
        return False

    def _fork(self, planned: PlannedFork) -> bool:
        """Fork a running request if there are pages for it, or can be without preemptions."""
        parent = planned.parent
        while parent.is_running and not self._has_room([parent]):
            if not self._capacities.evict_under_pressure(self._running):
                return self._are_alone([parent]) and self._fork_compacted(planned)
        return parent.is_running and self._copy(parent, planned.child)

    def _fork_compacted(self, planned: PlannedFork) -> bool:
        """Fork a request of a group that is alone, once its pages lie together."""
        self._preempter.compact(planned.parent)
        return self._has_room([planned.parent]) and self._copy(planned.parent, planned.child)

    def _copy(self, parent: Request, child: Request) -> bool:
        try:
            self._sequence_memory.fork(parent, child)
        except OutOfPages:
            return False
        return True

    def _are_alone(self, members: Sequence[Request]) -> bool:
        """Whether nobody runs but these and those of their group."""
        first = members[0]
        return all(r in members or same_group(r, first) for r in self._running)

    def _split(self, member: Request) -> None:
        """Let a member, and those planned to be forked from it, read their prompt alone."""
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
        """Let another member of a request's group run apart, the last one that holds KV.

        Returns:
            False where there is none, or they are beams, which cannot.
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
        """Let member i of a running group become what member `parents[i]` is; see `group.branch`.

        Where there are no pages for the copies the group waits, and is computed again. Where a
        copy raises, the search ends with an error: its beams are half exchanged.
        """
        beams = [*group.members, *group.spare]
        self._lifecycle.pause_group(group.members)
        try:
            for member in not_continued(group, parents):
                self._drop(member)
            copied = [group.members[n] for i, n in enumerate(parents) if n in parents[:i]]
            if copied:
                self._make_room(copied)
            branch(group, parents, self._copy_or_follow)
        except BaseException as error:
            self._lifecycle.fail_group(beams, RequestError(f"beams could not be copied: {error}"))
            raise
        self._lifecycle.resume_group(group.members)
        if any(member.memory.row < 0 for member in group.members):
            self._lifecycle.preempt(group.members[0], NO_PAGES, recompute=True)

    def _drop(self, request: Request) -> None:
        self._sequence_memory.free(request, "beam dropped")
        request.progress.state = RequestState.WAITING
        request.eviction.trace.clear()  # when it comes back it is another beam's copy

    def _make_room(self, parents: Sequence[Request]) -> None:
        """Make room for copies of beams, as far as others have it.

        Other beams are not preempted: their tokens of this step may still be missing.
        """
        while not self._has_room(parents):
            if self._capacities.evict_under_pressure(self._running):
                continue
            others = [r for r in self._running if r.group is None or not r.group.atomic]
            victim = self._preempter.victim(others, parents[0])
            if victim is None:
                break
            self._lifecycle.preempt(victim, NO_PAGES)
        if not self._running and not self._has_room(parents):
            self._preempter.compact(parents[0])

    def _copy_or_follow(self, parent: Request, child: Request) -> None:
        """Fork a beam; where there are no pages its child loses what it has lost, and waits."""
        if not self._copy(parent, child):
            share_evictions(parent, child)

    # ---- room ----------------------------------------------------------------------------------

    def _has_room(self, parents: Sequence[Request]) -> bool:
        """Whether there are rows and pages for forks of these, cached prefixes dropped."""
        if self._memory.num_free_rows < len(parents):
            return False
        # After the prompt a window lane still holds the pages of its last chunk, which no token
        # to come can see: they are freed now, as a fork is admitted without them.
        self._memory.drop_behind_windows(np.unique(rows_of(parents)))
        needed: dict[PageClass, int] = {}
        for parent in parents:
            for page_class, pages in statistics_pages(self._memory, parent.memory.row).items():
                needed[page_class] = needed.get(page_class, 0) + pages
        return self._sequence_memory.sharing.make_room(needed)
