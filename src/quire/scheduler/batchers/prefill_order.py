"""Order of prefill: first come first served, or prompts of similar length together.

For paged KV, `SimilarLengths` groups the prompts nearest in length, however different they are,
because nothing is padded. For dense rows, `similar_group` bounds the padding; a group is one
forward.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import islice
from math import isinf

from quire.scheduler.batchers.base import Q
from quire.scheduler.request import Request
from quire.tenancy.fair_queue import FairQueue

SIMILAR = 1.25
"""Maximum ratio of the longest to the shortest prompt of a group ..."""

SIMILAR_TOKENS = 16
"""... or maximum difference of their lengths, in tokens."""


class PrefillOrder(ABC):
    """Chooses the request to prefill next."""

    @abstractmethod
    def choose(self, head: Request) -> Request:
        """Return the request to admit.

        Args:
            head: its tenant's first waiting request.
        """


class FirstCome(PrefillOrder):
    """The order of the queue."""

    def choose(self, head: Request) -> Request:
        return head


class SimilarLengths(PrefillOrder):
    """Groups: a tenant's first request, and the later ones whose prompts are nearest in length.

    The first request waits at most for one group, which was formed before. A resumed request, one
    with a deadline, and one of better priority than the group do not wait for the group.

    Args:
        waiting: the queue.
        size: maximum requests of a group.
        window: maximum requests of a tenant's queue that are considered.
    """

    def __init__(self, waiting: FairQueue[Request], size: int, window: int) -> None:
        self._waiting, self._size, self._window = waiting, size, window
        self._groups: dict[str, list[Request]] = {}

    def choose(self, head: Request) -> Request:
        if head.progress.num_admissions or not isinf(head.deadline_s):
            return head
        group = [r for r in self._groups.get(head.tenant, ()) if self._belongs(r, head)]
        if not group:
            self._groups = {t: g for t, g in self._groups.items() if t in self._waiting.tenants}
            group = self._form(head)
        self._groups[head.tenant] = group
        return group[0]

    def _belongs(self, request: Request, head: Request) -> bool:
        """Whether a new request waits with the same priority as `head` and without a deadline."""
        waits = request in self._waiting and not request.progress.num_admissions
        return waits and request.priority == head.priority and isinf(request.deadline_s)

    def _form(self, head: Request) -> list[Request]:
        window = islice(self._waiting.of_tenant(head.tenant), self._window)
        others = [r for r in window if r is not head and self._belongs(r, head)]
        others.sort(key=lambda r: abs(r.num_tokens - head.num_tokens))
        return [head, *others[: self._size - 1]]


def similar_group(waiting: Sequence[Q], most: int, group_tokens: int) -> list[Q]:
    """Return the first waiting query and later ones of similar length.

    Args:
        waiting: waiting queries, in order.
        most: maximum number of queries.
        group_tokens: maximum tokens of the group, padding included.
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
