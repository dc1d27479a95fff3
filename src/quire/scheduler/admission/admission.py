"""Lets waiting requests in: whose turn it is, whether there is room, who gives it back.

tenants    within what is theirs first, then those who borrow
room       free pages, cached prefixes that nobody uses, then what other tenants owe
turns      one that comes back after it gave way, one that is new, one that comes back ...
"""

from collections.abc import Callable, Iterator, Sequence

from quire.errors import OutOfPages
from quire.kv.prefix_blocks import PrefixLease
from quire.scheduler.batchers.base import Batcher
from quire.scheduler.free_pages import FreePages
from quire.scheduler.group import plan_prefill, together
from quire.scheduler.refusals import Refusals
from quire.scheduler.request import Request, RequestState
from quire.scheduler.scheduler_parts import SchedulerParts
from quire.tenancy.accounts import Right

Preempt = Callable[[Request, str], None]  # (request, why)


class Admission:
    """The door of the KV memory.

    Args:
        parts: the rules that are asked.
        running: those that are in; the scheduler's own list.
        batcher: who may enter as the batch stands.
        preempt: takes a request out.
    """

    def __init__(
        self,
        parts: SchedulerParts,
        running: list[Request],
        batcher: Batcher,
        preempt: Preempt,
    ) -> None:
        self._config, self._sequence_memory = parts.config, parts.sequence_memory
        self._admission, self._fairness = parts.admission, parts.fairness
        self._preempter, self._memory = parts.preempter, parts.sequence_memory.memory
        self._running, self._batcher, self._preempt = running, batcher, preempt
        self._room = FreePages(parts, running)
        self._refusals = Refusals(parts.sequence_memory, running, parts.fairness.waiting)
        self._last_returned = False

    def admit(self, budget: int) -> Request | None:
        """Let the next one in, if anybody may enter as things are; return the one that moves first.

        Takes from nobody: those that run may be part of the step already.

        Args:
            budget: tokens that the step has left to read.
        """
        borrowers = []
        for request, is_head in self._candidates(budget):
            right = self._right(request)
            if right is Right.BORROWED:
                borrowers.append(request)
            elif right is not Right.NOTHING:
                entered = self._try(request, may_take=False)
                if entered is not None or is_head:
                    return entered
        tried = (self._try(request, may_take=False) for request in borrowers)
        return next((request for request in tried if request is not None), None)

    @property
    def lacks_free_pages(self) -> bool:
        """Whether memory is above the low watermark, or short for the first that waits."""
        above = self._sequence_memory.sharing.available_bytes < self._room.reserved_free_bytes
        if above or not self._running:
            return above
        head = next(self._fairness.waiting.heads(), None)
        if (
            head is None
            or head not in self._refusals
            or not self._room.rows_left(head, self._running)
        ):
            return False
        return not self._room.fits(head, 0)

    def claim(self) -> None:
        """Let in those who get what is their tenant's own only if others give it back.

        Before a step is planned: who gives way must not be part of it. One a tenant and step.
        Nobody gives way where all that is owed would not be enough.
        """
        if self._fairness.has_several:
            for head in list(self._fairness.waiting.heads()):
                if self.is_turn_of(head) and self._right(head) >= Right.SHARE:
                    self._try(head, may_take=True)

    def is_turn_of(self, head: Request) -> bool:
        """Whether the batcher would let this one in before a step."""
        return self._batcher.candidate(head, self._config.max_num_batched_tokens) is head

    def fetch(self, request: Request) -> bool:
        """Let one in whose turn it is, if there is room; whether it is in."""
        return self._try(request, may_take=False) is not None

    def _right(self, request: Request) -> Right:
        if self._fairness.has_limit(request):
            self._fairness.recount(self._running)  # the step has taken pages since it began
        return self._fairness.right(request, self._promised_bytes(request))

    def _promised_bytes(self, request: Request) -> int:
        """What its tenant would come to hold more: the promise to it and to those of its own."""
        if not self._fairness.has_several:
            return 0
        own = [other for other in self._running if other.tenant == request.tenant]
        peaks = self._admission.peaks
        promised = peaks.num_bytes(self._admission.promised(request, own, 0))
        known = peaks.owed(own, [other.num_tokens for other in own]).sum(axis=0)
        return max(promised, peaks.num_bytes(known) + self._known_bytes(request))

    # ---- whose turn ----------------------------------------------------------------------------

    def _candidates(self, budget: int) -> Iterator[tuple[Request, bool]]:
        """The first of every tenant, best first; before one that comes back perhaps a new one.

        The batcher may name others in their place, or nobody.
        """
        for head in list(self._fairness.waiting.heads()):
            new = self._new_one(head) if self._last_returned and head.entries else None
            if new is not None and (found := self._batcher.candidate(new, budget)) is not None:
                yield found, False
            if (found := self._batcher.candidate(head, budget)) is not None:
                yield found, True

    def _new_one(self, head: Request) -> Request | None:
        """The first of the same tenant, and no lower priority, that was never in."""
        for request in self._fairness.waiting.of_tenant(head.tenant):
            if request.priority > head.priority:
                return None
            if not request.entries:
                return request
        return None

    # ---- room ----------------------------------------------------------------------------------

    def _try(self, request: Request, *, may_take: bool) -> Request | None:
        if self._refusals.hold(request) and not may_take:
            return None
        self._refusals.forget(request)
        if may_take or self._room.rows_left(request, self._running):
            entered = self._enter(request, may_take=may_take)
            if entered is not None:
                return entered
        self._refusals.note(request)
        return None

    def _enter(self, request: Request, *, may_take: bool) -> Request | None:
        away = self._away(request)
        if not (self._running or self._preempter.has_place(away)):
            self._preempter.give_up(away)  # no piece is long enough, and none will come free
        whole = self._preempter.is_whole(away)
        first = away if whole else plan_prefill(request)
        head_tokens = self._preempter.head_tokens(first)
        lease = None if whole else self._sequence_memory.sharing.look_up(first, head_tokens)
        cached_tokens = 0 if lease is None else lease.tokens
        if not (
            self._room.fits(first, cached_tokens) or (may_take and self._take(first, cached_tokens))
        ):
            self._sequence_memory.sharing.give_back(lease)
            return None
        if not (whole or self._starts(first, lease, head_tokens)):
            return None
        self._fairness.waiting.pop(request)
        return self._come_back(request, away) if whole else self._begin(first)

    def _starts(self, request: Request, lease: PrefixLease | None, head_tokens: int | None) -> bool:
        """Whether a request got a row, and pages for the statistics of its cached prefix.

        One that is alone finds them once cached prefixes are dropped, its own among them.
        """
        try:
            self._sequence_memory.enter(request, lease)
        except OutOfPages:
            self._sequence_memory.sharing.give_back(lease)
            if self._running:
                return False
            self._sequence_memory.sharing.drop_cached()
            self._sequence_memory.enter(
                request, self._sequence_memory.sharing.look_up(request, head_tokens)
            )
        return True

    def _away(self, request: Request) -> Request:
        """Who of a group that waits has its KV on the host: not always the one in its place."""
        whole = (member for member in together(request) if self._preempter.is_whole(member))
        return next(whole, request)

    # ---- what others owe -----------------------------------------------------------------------

    def _take(self, request: Request, cached_tokens: int) -> bool:
        """Let debtors give way until a request fits, if that can come to be; say whether it did."""
        if not (self._fairness.has_several and self._debts_suffice(request, cached_tokens)):
            return False
        while not self._room.fits(request, cached_tokens):
            self._fairness.recount(self._running)
            victim = self._debtor(request, cached_tokens, self._running)
            if victim is None:  # what came free was of another page class
                return False
            has_row = self._room.rows_left(request, self._running)
            why = "asks for what is its own" if has_row else "has fewer rows than its part"
            self._preempt(victim, f"tenant {request.tenant} {why}")
        return True

    def _debts_suffice(self, request: Request, cached_tokens: int) -> bool:
        """Whether a request would fit if debtors gave way; nobody does."""
        staying, leaving = list(self._running), list[Request]()
        while not self._room.would_fit(request, cached_tokens, staying):
            self._fairness.suppose(staying, leaving)
            victim = self._debtor(request, cached_tokens, staying)
            if victim is None:
                break
            leaving += [member for member in together(victim) if member in staying]
            staying = [other for other in staying if other not in leaving]
        enough = self._room.would_fit(request, cached_tokens, staying)
        self._fairness.recount(self._running)
        return enough

    def _debtor(
        self, request: Request, cached_tokens: int, running: Sequence[Request]
    ) -> Request | None:
        """Somebody whose tenant owes rows or bytes to this one's; None where nobody does."""
        if self._room.rows_left(request, running):
            missing_bytes = self._known_bytes(request, cached_tokens)
            debtors = self._fairness.debtors(request, missing_bytes)
        else:
            debtors = self._fairness.rows_debtors(request, running, self._room.most_rows)
        theirs = ([r for r in running if r.tenant == debtor] for debtor in debtors)
        victims = map(self._preempter.victim_among, theirs)
        return next((victim for victim in victims if victim is not None), None)

    def _known_bytes(self, request: Request, cached_tokens: int = 0) -> int:
        if not self._fairness.has_several:
            return 0
        missing = self._admission.new_request(request, request.num_tokens, cached_tokens)
        return self._admission.peaks.num_bytes(missing)

    # ---- in ------------------------------------------------------------------------------------

    def _begin(self, request: Request) -> Request:
        """Let a request in that has something to read."""
        self._last_returned = request.entries > 1
        self._join(request)
        return request

    def _come_back(self, request: Request, away: Request) -> Request | None:
        """Copy a request, and those that left with it, back; read again what a copy lost."""
        self._last_returned = True
        returned = self._preempter.bring_back(away)
        if not returned:  # a copy failed: it is read again
            self._fairness.waiting.push(request)
            return self._enter(request, may_take=False)
        for member in returned:
            self._hold_no_more_than_there_is(member)
            self._join(member)
        return away

    def _hold_no_more_than_there_is(self, request: Request) -> None:
        """Let go of cached pages that could be dropped but for a request with a copy of its own.

        They were not promised to it: held, they could have it taken out again at once.
        """
        if self._sequence_memory.sharing.available_bytes < self._room.reserved_free_bytes:
            self._sequence_memory.sharing.stop_sharing(request)

    def _join(self, request: Request) -> None:
        waited_s = self._sequence_memory.events.now_s() - request.queued_s
        self._fairness.entered(request, waited_s)
        request.state = RequestState.RUNNING
        self._running.append(request)
        self._batcher.entered(request)
