"""Who of those that wait is read next: who came first, or prompts of similar length together.

In pages `SimilarLengths` groups the nearest in length, whatever they are: nothing is padded. On
dense rows `similar_group` bounds the padding, and a group is one forward.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import islice
from math import isinf

from quire.scheduler.batchers.base import Q
from quire.scheduler.request import Request
from quire.tenancy.fair_queue import FairQueue

SIMILAR = 1.25
"""Prompts are read together where the longest is at most so many times the shortest."""

SIMILAR_TOKENS = 16
"""Or at most so many tokens longer."""


class PrefillOrder(ABC):
    """Chooses whose prompt is read."""

    @abstractmethod
    def choose(self, head: Request) -> Request:
        """Whom to let in.

        Args:
            head: first in line of its tenant.
        """


class FirstCome(PrefillOrder):
    """In the order of the queue."""

    def choose(self, head: Request) -> Request:
        """See `PrefillOrder`."""
        return head


class SimilarLengths(PrefillOrder):
    """In groups: the first in line, and those behind it whose prompts are nearest in length.

    So the first in line waits for one group at most, which was there before it came to be first.
    Who comes back, has a deadline or a better priority than the group goes at once.

    Args:
        waiting: the queue.
        size: requests of a group.
        window: of one tenant's queue, how many are looked at.
    """

    def __init__(self, waiting: FairQueue[Request], size: int, window: int) -> None:
        self._waiting, self._size, self._window = waiting, size, window
        self._groups: dict[str, list[Request]] = {}

    def choose(self, head: Request) -> Request:
        """See `PrefillOrder`."""
        if head.progress.num_admissions or not isinf(head.deadline_s):
            return head
        group = [r for r in self._groups.get(head.tenant, ()) if self._belongs(r, head)]
        if not group:
            self._groups = {t: g for t, g in self._groups.items() if t in self._waiting.tenants}
            group = self._form(head)
        self._groups[head.tenant] = group
        return group[0]

    def _belongs(self, request: Request, head: Request) -> bool:
        """Whether one of the group still waits, and for as good a reason as the first in line."""
        waits = request in self._waiting and not request.progress.num_admissions
        return waits and request.priority == head.priority and isinf(request.deadline_s)

    def _form(self, head: Request) -> list[Request]:
        line = islice(self._waiting.of_tenant(head.tenant), self._window)
        others = [r for r in line if r is not head and self._belongs(r, head)]
        others.sort(key=lambda r: abs(r.num_tokens - head.num_tokens))
        return [head, *others[: self._size - 1]]


def similar_group(waiting: Sequence[Q], most: int, group_tokens: int) -> list[Q]:
    """The first in line, and those behind it whose prompts are of similar length.

    Args:
        waiting: in line.
        most: queries.
        group_tokens: most tokens, pads counted.
    """
    group: list[Q] = []
    for query in waiting[: 4 * most]:
        lengths = [member.num_to_read for member in (*group, query)]
        shortest, longest = min(lengths), max(lengths)
        if group and query.priority > group[0].priority:
            break
        if longest > max(SIMILAR * shortest, shortest + SIMILAR_TOKENS):
            continue
        if group and longest * len(lengths) > group_tokens:
            continue
        group.append(query)
        if len(group) == most:
            break
    return group
