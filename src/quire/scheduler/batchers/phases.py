"""Batches that run to completion: alternating prefill and decoding phases.

static   all rows of a batch finish before the next batch starts
pd       similar prompts are prefilled together, then decode as a batch

prefill  | prompts of up to `held` rows; no request decodes
decoding | batches of up to `max_num_seqs` of these rows, each until its last row ends
prefill  | ...

`Phases` implements this for paged KV. On dense rows, a `RunToEnd` rule opens no row before all rows
have ended. For paged KV, `SimilarLengths` groups the prompts nearest in length, however different
they are, because nothing is padded. For dense rows, `similar_group` bounds the padding; a group is
one forward.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import isinf

from quire.policies.options import check_at_least
from quire.scheduler.batchers.base import (
    Batcher,
    BatchState,
    BatchSwaps,
    BatchView,
    DenseRule,
    PagedRule,
    Q,
    Unit,
    count_rows,
    first_member,
    has_ended,
    holds_kv,
    is_prefilled,
    num_rows,
    unit_of,
    waits,
    waits_to_decode,
    was_preempted,
)
from quire.scheduler.request import Request
from quire.tenancy.fair_queue import FairQueue

SIMILAR = 1.25
"""Maximum ratio of the longest to the shortest prompt of a group ..."""
SIMILAR_TOKENS = 16
"""... or maximum difference of their lengths, in tokens."""


# ---- order of prefill ----------------------------------------------------------------------------


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


# ---- phases --------------------------------------------------------------------------------------


class Phases(Batcher):
    """Admits no request while a batch decodes, except preempted requests of the batch.

    Args:
        state: the scheduler's state.
        held: number of rows that are prefilled before any of them decodes.
        order: chooses the request to prefill next.
    """

    def __init__(self, state: BatchState, held: int, order: PrefillOrder) -> None:
        self._state, self._held, self._order = state, held, order
        self._admitted: dict[Unit, None] = {}  # in the order of admission
        self._batch: dict[Unit, None] = {}
        self._prefills = True

    def begin(self) -> BatchSwaps | None:
        self._admitted = {unit: None for unit in self._admitted if not has_ended(unit)}
        self._batch = {unit: None for unit in self._batch if unit in self._admitted}
        is_over = not self._batch
        if self._prefills:  # units would alternate if the phase went on after a preemption
            is_over = any(map(was_preempted, self._admitted))
            is_over = is_over and any(map(is_prefilled, self._admitted))
        if is_over:
            self._next_batch()
        return None

    def _next_batch(self) -> None:
        self._batch = {}
        rows = 0
        for unit in sorted(self._admitted, key=lambda unit: not holds_kv(unit)):
            rows += num_rows(unit)
            if self._batch and rows > self._state.max_num_seqs:
                break
            self._batch[unit] = None
        self._prefills = not self._batch

    def decoding(self, ready: list[Request]) -> list[Request]:
        return [] if self._prefills else [r for r in ready if unit_of(r) in self._batch]

    def candidate(self, head: Request, budget: int) -> Request | None:
        for unit in self._admitted if self._prefills else self._batch:
            if waits(unit, self._state.waiting):
                return first_member(unit)
        chosen = self._order.choose(head) if self._prefills else None
        if chosen is None or count_rows(self._admitted) + num_rows(unit_of(chosen)) > self._held:
            return None
        return chosen

    def admitted(self, request: Request) -> None:
        self._admitted[unit_of(request)] = None

    def may_compute(self, request: Request) -> bool:
        if not waits_to_decode(request):
            return True
        return not self._prefills and unit_of(request) in self._batch

    def prefill_tokens(self, budget: int) -> int:
        return budget

    def stalled(self) -> bool:
        """The prefill phase is over, or a preempted batch cannot resume."""
        if not self._prefills and any(map(holds_kv, self._batch)):
            return False
        self._next_batch()
        return any(map(holds_kv, self._batch))


class RunToEnd(DenseRule):
    """Fills dense rows only when all rows are free."""

    runs_to_end = True

    def open_rows(self, view: BatchView[Q]) -> int:
        """All rows once no row is live, else none."""
        return 0 if view.live else view.size


# ---- static --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Static(PagedRule, RunToEnd):
    """Finished rows are idle until the last one finishes; each output is returned at its end.

    Source: `generate` of Transformers, and the baseline of BATON.

    Differs from them: there is no padding, and a preempted request resumes in its batch. On dense
    rows the batch's own forward prefills the prompts, padded to the longest.
    """

    name = "static"

    shapes = True

    def make(self, state: BatchState) -> Batcher:
        return Phases(state, self.num_rows(state.max_num_seqs), FirstCome())

    def next_group(self, view: BatchView[Q]) -> list[Q]:
        """As many queries as the batch has rows."""
        return list(view.waiting[: view.size])


# ---- pd ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrefillDecode(PagedRule, RunToEnd):
    """Queries are prefilled in groups of similar length, and decode in the same order.

    Source: Cong et al., BATON, section 5.1, method "PD": without its vector embedding.

    On dense rows, batches are formed in the order of arrival: less padding in prefill than
    `static`, the same idle rows in decoding.

    Attributes:
        ahead: number of rows prefilled before any of them decodes; 0: one batch.
        window: maximum waiting requests searched for similar lengths.
    """

    name = "pd"

    ahead: int = 0
    window: int = 64

    def __post_init__(self) -> None:
        check_at_least(0, ahead=self.ahead)
        check_at_least(1, window=self.window)

    def num_rows(self, max_num_seqs: int) -> int:
        return max(self.ahead, max_num_seqs)

    def make(self, state: BatchState) -> Batcher:
        order = SimilarLengths(state.waiting, state.max_num_seqs, self.window)
        return Phases(state, self.num_rows(state.max_num_seqs), order)

    def next_group(self, view: BatchView[Q]) -> list[Q]:
        """Queries of similar length among those of the next batch."""
        batch = view.waiting[: view.free - len(view.ready)]
        return similar_group(batch, max(1, len(batch)), view.group_tokens)
