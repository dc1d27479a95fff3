"""Admits waiting requests: which one is next, whether it fits, which requests it may preempt.

tenants    first those within their share, then those above it
memory     free pages, then cached prefixes that no request uses, then KV of tenants above their
           share
order      preempted and new requests alternate
urgent     admitted before a step is planned; they preempt requests of lower priority

An admission rule computes which pages must be free before a waiting request may start:

optimistic   pages of the known tokens; requests are preempted if outputs outgrow the memory
reserved     pages of prompt and max_tokens of all requests; no preemptions
estimated    the peak over time, estimated from the lengths of past outputs

pages  |      ____
|   __/    |__        each running request grows with every step until it ends, and then its
|__/          |___    pages are freed; the peak must fit.
+-----------------> steps
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from quire.errors import OutOfPages, UnknownName
from quire.kv.prefix import PrefixLease
from quire.scheduler.batchers.base import Batcher
from quire.scheduler.lifecycle import Lifecycle
from quire.scheduler.peaks import Counts, Peaks, need_of
from quire.scheduler.request import (
    Request,
    bytes_of,
    copies_to_come,
    num_rows,
    plan_prefill,
    reserved_rows,
    together,
)
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.sequence_memory import SequenceMemory
from quire.tenancy.accounts import Right


class AdmissionRule(ABC):
    """Computes the pages promised to a new request and to the running requests.

    Args:
        peaks: page arithmetic.

    Attributes:
        name: name in options.
        promises_growth: whether the promised pages include those of tokens to come.
    """

    name: str
    promises_growth = True

    def __init__(self, peaks: Peaks) -> None:
        self.peaks = peaks

    @abstractmethod
    def promised(self, request: Request, running: Sequence[Request], cached_tokens: int) -> Counts:
        """Pages that must be free, or unused in the prefix cache, for `request` to start.

        Args:
            request: a waiting request.
            running: the running requests.
            cached_tokens: tokens of `request` whose pages are found in the prefix cache.

        Returns:
            [page classes], in the order of `Peaks.page_classes`.
        """

    def end_of(self, request: Request) -> int:
        """Tokens of a request for which pages are promised."""
        return request.num_tokens

    def learn(self, request: Request) -> None:  # noqa: B027 - most rules learn nothing
        """Record a request that finished normally."""

    def new_request(self, request: Request, tokens: int, cached_tokens: int) -> Counts:
        """Pages that a waiting request allocates until `tokens` tokens, without shared pages.

        Offloading a shared page frees no memory, so the request either offloads or shares. A longer
        sequence may need fewer pages, because it is computed in smaller steps: the request was
        accepted with the pages of its final length, so it never needs more.
        """
        needs = [need_of(request, n) for n in (tokens, max(tokens, request.final_tokens))]
        offloaded = self.peaks.counts(needs).min(axis=0)
        whole = self.peaks.counts([replace(need, may_offload=False) for need in needs]).min(axis=0)
        missing = np.maximum(whole - self.peaks.shared_counts(needs[0], cached_tokens), 0)
        least: Counts = np.minimum(offloaded, missing)
        return least


class Optimistic(AdmissionRule):
    """Largest batches; requests are preempted when outputs outgrow the memory.

    Source: the admission of vLLM. The pages that running prefills will still allocate are counted,
    as with vLLM's option `scheduler_reserve_full_isl`.
    """

    name = "optimistic"
    promises_growth = False

    def promised(self, request: Request, running: Sequence[Request], cached_tokens: int) -> Counts:
        prefills = [other for other in running if other.num_uncomputed > 1]
        further = self.peaks.further_pages(prefills, [other.num_tokens for other in prefills])
        promised: Counts = self.new_request(
            request, request.num_tokens, cached_tokens
        ) + further.sum(axis=0)
        return promised


class Reserved(AdmissionRule):
    """No preemptions for lack of memory; small batches if outputs end early.

    Source: the admission of Orca and of Text Generation Inference: input and longest output.
    """

    name = "reserved"

    def end_of(self, request: Request) -> int:
        return request.final_tokens

    def promised(self, request: Request, running: Sequence[Request], cached_tokens: int) -> Counts:
        further = self.peaks.further_pages(running, [other.final_tokens for other in running])
        promised: Counts = self.new_request(
            request, request.final_tokens, cached_tokens
        ) + further.sum(axis=0)
        return promised


AUTO = "auto"
INITIAL_RATIO = 1.0
LEARNING_RATE = 0.05
CAUTION = 1.2
ROUNDING = 1e-6  # pages; counts are in the thousands


class Estimated(AdmissionRule):
    """Compromise between the other two rules, from the lengths of past outputs.

    The fraction of `max_tokens` that outputs use is learned from finished requests: their mean at
    first, then a moving average, times a margin. It starts at 1, which equals the reserved rule.
    Outputs that cannot end early (`ignore_eos` without stop tokens) use all of `max_tokens`.

    Source: the ratio of new tokens follows SGLang's `new_token_ratio`; the peak over time follows
    LightLLM's Past-Future estimator. Differs from them: the ratio is learned from finished requests
    instead of decaying with every step, and pages are counted instead of tokens.

    Attributes:
        ratio: fraction of `max_tokens` that an output is expected to use.
    """

    name = "estimated"

    def __init__(self, peaks: Peaks) -> None:
        super().__init__(peaks)
        self.ratio = INITIAL_RATIO
        self._num_learned = 0

    def learn(self, request: Request) -> None:
        """Move the ratio towards the fraction of `max_tokens` that this output used."""
        if request.params.max_tokens and not has_fixed_length(request):
            self._num_learned += 1
            used = len(request.output_token_ids) / request.params.max_tokens
            rate = max(LEARNING_RATE, 1 / (1 + self._num_learned))  # the initial ratio counts once
            self.ratio += rate * (used - self.ratio)

    def end_of(self, request: Request) -> int:
        """Length at which a request is expected to end: at least one token more than now."""
        ratio = 1.0 if has_fixed_length(request) else min(1.0, CAUTION * self.ratio)
        output = round(ratio * request.params.max_tokens)
        ended = max(len(request.prompt_token_ids) + output - 1, request.num_tokens + 1)
        return max(request.num_tokens, min(ended, request.final_tokens))

    def promised(self, request: Request, running: Sequence[Request], cached_tokens: int) -> Counts:
        """The peak of further pages over time."""
        ends = [self.end_of(other) for other in running]
        end = self.end_of(request)
        further = self.peaks.further_pages(running, ends)
        new_request = self.new_request(request, end, cached_tokens)
        held = self.peaks.held(running)
        steps = [e - other.num_tokens for e, other in zip(ends, running, strict=True)]
        return highest_point(
            np.array([*steps, end - request.num_tokens]),
            np.vstack([further, new_request]),
            np.vstack([held + further, new_request]),
        )


def has_fixed_length(request: Request) -> bool:
    """Whether the output of a request always has `max_tokens` tokens."""
    params = request.params
    return params.ignore_eos and not (params.stop or params.stop_token_ids)


def highest_point(steps: Counts, further: Counts, returned: Counts) -> Counts:
    """Peak of further pages of each class over time.

    Args:
        steps: [n] steps until each sequence ends.
        further: [n, page classes] pages it allocates until then, at a constant rate.
        returned: [n, page classes] pages it frees at its end.

    Returns:
        [page classes]; at least 0.
    """
    order = np.argsort(steps, kind="stable")
    steps, further, returned = steps[order], further[order], returned[order]
    rate = further / np.maximum(steps, 1)[:, None]
    # at the i-th end, later sequences have grown for as many steps and earlier ones are freed
    growing = np.cumsum(rate[::-1], axis=0)[::-1] * np.maximum(steps, 1)[:, None]
    freed = np.cumsum(returned, axis=0) - returned
    allocated = np.cumsum(further, axis=0) - further  # by the ended sequences; part of `freed`
    level = growing + allocated - freed
    # rounding errors of rate times steps must not count as a page
    highest: Counts = np.ceil(level.max(axis=0, initial=0) - ROUNDING).astype(np.int64)
    return highest


RULES: dict[str, type[AdmissionRule]] = {
    rule.name: rule for rule in (Optimistic, Reserved, Estimated)
}


def make_admission(name: str, peaks: Peaks, *, can_swap: bool = False) -> AdmissionRule:
    """Create the admission rule with this name.

    Args:
        name: a name in `RULES`, or "auto": `optimistic` if preempted requests can be swapped out,
            which costs little, else `estimated`.
        peaks: page arithmetic.
        can_swap: whether preempted requests can be swapped out.

    Raises:
        UnknownName: an unknown rule.
    """
    if name == AUTO:
        name = Optimistic.name if can_swap else Estimated.name
    if name not in RULES:
        raise UnknownName("admission rule", name, (AUTO, *RULES))
    return RULES[name](peaks)


URGENT_WAITING = "an urgent request is waiting"
AHEAD_TOKENS = 16  # further tokens for which pages must be free with `scale_down_at`


class FreePages:
    """Free rows and pages of the KV memory.

    Args:
        config: the scheduling options.
        sequence_memory: the requests' pages.
        rule: computes the pages promised to requests.
        lifecycle: the running requests.
    """

    def __init__(
        self,
        config: ScheduleConfig,
        sequence_memory: SequenceMemory,
        rule: AdmissionRule,
        lifecycle: Lifecycle,
    ) -> None:
        self._sequence_memory, self._memory = sequence_memory, sequence_memory.memory
        self._rule, self._peaks, self._known = rule, rule.peaks, Optimistic(rule.peaks)
        self._running, self._preempter = lifecycle.running, lifecycle.preempter
        self._num_rows, self._looks_ahead = config.num_rows, config.scale_down_at is not None
        self._reserved = 1 - config.full_at
        # above the levels at which running requests are preempted
        self._reserved_at_peak = 1 - min(config.high_watermark, config.scale_down_at or 1.0)

    @property
    def reserved_bytes(self) -> float:
        """Bytes above the low watermark; an admission leaves them free while other requests run."""
        return self._reserved * self._memory.total_bytes

    def has_rows(self, request: Request, staying: Sequence[Request]) -> bool:
        """Whether there are rows for a request and its group if only `staying` keep running."""
        num_leaving = len(self._running) - len(staying)
        free = self._memory.num_free_rows + num_leaving
        free = min(self._num_rows - len(staying), free)
        return num_rows(request) + reserved_rows(staying) <= free

    def fits(self, request: Request, cached_tokens: int) -> bool:
        """Whether there are rows and pages for a request, and pages for its swapped KV.

        Pages of known tokens must fit below the low watermark, pages promised for tokens to come
        below the high one. A request that would run alone may use all of the KV memory.
        """
        if not self.has_rows(request, self._running):
            return False
        if self._running:
            promised = self._promised(self._rule, request, cached_tokens, self._running)
            by_class = self._rule.peaks.by_class(promised)
            fits = self._leaves_enough(request, cached_tokens, self._running, promised)
            fits = fits and self._sequence_memory.evict_cached(by_class)
            if not (fits or self._fits_offloaded(request, self._running)):
                return False
        return request.memory.swapped is None or self._preempter.can_swap_in(request)

    def would_fit(self, request: Request, cached_tokens: int, staying: Sequence[Request]) -> bool:
        """Whether a request would fit if only `staying` keep running."""
        if not self.has_rows(request, staying):
            return False
        promised = self._promised(self._rule, request, cached_tokens, staying)
        fits = not staying or self._leaves_enough(request, cached_tokens, staying, promised)
        return fits or self._fits_offloaded(request, staying)

    def _fits_offloaded(self, request: Request, staying: Sequence[Request]) -> bool:
        """Whether a request and those that stay fit if their oldest pages are offloaded."""
        if not self._peaks.offloaded_tokens:
            return False
        requests = [request, *staying]
        requests += copies_to_come(requests)
        needs = [need_of(each, self._rule.end_of(each)) for each in requests]
        return self._peaks.fit_offloaded(needs, self._memory.total_bytes - self.reserved_bytes)

    def shortages(self, request: Request) -> Iterator[tuple[int, float]]:
        """Yield bytes that a request needs and bytes that are free: below the watermarks, in slabs.

        Evicts nothing: prefixes that can be evicted count as free, but not as free slabs.
        """
        promised = self._promised(self._rule, request, 0, self._running)
        yield min(self._needs(request, 0, self._running, promised), key=lambda n: n[1] - n[0])
        pages, swapped = self._rule.peaks.by_class(promised), request.memory.swapped
        if swapped is not None and not swapped.keep_from:
            pages = swapped.needed_pages
        yield self._memory.slab_bytes_for(pages)

    def _promised(
        self,
        rule: AdmissionRule,
        request: Request,
        cached_tokens: int,
        staying: Sequence[Request],
    ) -> Counts:
        peaks = rule.peaks
        promised = rule.promised(request, staying, cached_tokens)
        if self._looks_ahead:
            promised = np.maximum(promised, self._ahead(request, staying, cached_tokens))
        for copy in copies_to_come([request, *staying]):
            promised = promised + rule.promised(copy, [], peaks.shared_tokens(copy))
        return promised

    def _ahead(self, request: Request, staying: Sequence[Request], cached_tokens: int) -> Counts:
        """Pages for `AHEAD_TOKENS` of all requests, so that none is preempted at once again."""
        tokens = min(request.num_tokens + AHEAD_TOKENS, request.final_tokens)
        new_request = self._rule.new_request(request, tokens, cached_tokens)
        then = [min(r.num_tokens + AHEAD_TOKENS, r.final_tokens) for r in staying]
        ahead: Counts = new_request + self._rule.peaks.further_pages(staying, then).sum(axis=0)
        return ahead

    def _leaves_enough(
        self, request: Request, cached_tokens: int, staying: Sequence[Request], promised: Counts
    ) -> bool:
        """Whether promised pages fit below the watermarks if only `staying` keep running."""
        needs = self._needs(request, cached_tokens, staying, promised)
        return all(needed <= free for needed, free in needs)

    def _needs(
        self, request: Request, cached_tokens: int, staying: Sequence[Request], promised: Counts
    ) -> Iterator[tuple[int, float]]:
        """Yield promised bytes and the bytes that are free for them below each watermark."""
        left_bytes = self._sequence_memory.available_bytes
        if len(staying) < len(self._running):
            left_bytes += bytes_of(self._running, self._memory) - bytes_of(staying, self._memory)
        if self._rule.promises_growth:
            reserved_bytes = self._reserved_at_peak * self._memory.total_bytes
            yield self._peaks.num_bytes(promised), left_bytes - reserved_bytes
            promised = self._promised(self._known, request, cached_tokens, staying)
        yield self._peaks.num_bytes(promised), left_bytes - self.reserved_bytes


class Admission:
    """Admits requests to the KV memory.

    Args:
        config: the scheduling options.
        sequence_memory: the requests' pages.
        rule: computes the pages promised to requests.
        lifecycle: starts and preempts requests.
        batcher: decides which requests may join the batch.

    Attributes:
        rule, batcher: see above.
        free: rows and pages.
    """

    def __init__(
        self,
        config: ScheduleConfig,
        sequence_memory: SequenceMemory,
        rule: AdmissionRule,
        lifecycle: Lifecycle,
        batcher: Batcher,
    ) -> None:
        self.rule, self.batcher = rule, batcher
        self.free = FreePages(config, sequence_memory, rule, lifecycle)
        self._config, self._sequence_memory, self._lifecycle = config, sequence_memory, lifecycle
        self._running, self._waiting = lifecycle.running, lifecycle.waiting
        self._fairness, self._preempter = lifecycle.fairness, lifecycle.preempter
        self._rejected: dict[Request, tuple[int, int]] = {}  # by memory state at the rejection
        self._last_resumed = False

    def admit(self, budget: int, *, resumes: bool = True) -> Request | None:
        """Admit the next request if one fits; return the member that is computed first, or None.

        No request is preempted, because running requests may be part of the step already.

        Args:
            budget: tokens that the step has left for prefill.
            resumes: whether preempted requests are admitted again.
        """
        above_share = []
        for request, is_head in self._candidates(budget):
            if not resumes and any(each.progress.num_admissions for each in together(request)):
                continue
            right = self.right(request)
            if right is Right.ABOVE_SHARE:
                above_share.append(request)
            elif right is not Right.REFUSED:
                admitted = self._try(request, may_preempt=False)
                if admitted is not None or is_head:
                    return admitted
        tried = (self._try(request, may_preempt=False) for request in above_share)
        return next((request for request in tried if request is not None), None)

    def admit_now(self, request: Request) -> bool:
        """Admit this request if it fits; return whether it was admitted."""
        return self._try(request, may_preempt=False) is not None

    def reclaim(self) -> None:
        """Admit one request of each tenant within its share, preempting requests of other tenants.

        Called before a step is planned. Only requests of tenants above their share are preempted,
        and none if preempting all of them would not be enough.
        """
        if self._fairness.has_several:
            for head in list(self._waiting.heads()):
                if self.is_turn_of(head) and self.right(head) >= Right.SHARE:
                    self._try(head, may_preempt=True)

    def is_turn_of(self, head: Request) -> bool:
        """Whether the batcher would admit this request before a step."""
        return self.batcher.candidate(head, self._config.max_num_batched_tokens) is head

    def lacks_free_pages(self) -> bool:
        """Whether memory use is above the low watermark, or the first waiting request lacks pages.

        A request that was rejected for lack of rows does not count.
        """
        above = self._sequence_memory.available_bytes < self.free.reserved_bytes
        if above or not self._running:
            return above
        head = next(self._waiting.heads(), None)
        if head is None or not self.has_rejected(head):
            return False
        return self.free.has_rows(head, self._running) and not self.free.fits(head, 0)

    def has_rejected(self, request: Request) -> bool:
        """Whether the request was rejected when it was last tried."""
        return request in self._rejected

    # ---- tenants -------------------------------------------------------------------------------

    def right(self, request: Request) -> Right:
        """The right by which a waiting request's tenant may take its bytes."""
        if self._fairness.has_limit(request):
            self._fairness.recount(self._running)  # the step has allocated pages since it began
        return self._fairness.right(request, self._promised_bytes(request))

    def _promised_bytes(self, request: Request) -> int:
        """Further bytes of the tenant: promised to this request and to its running requests."""
        if not self._fairness.has_several:
            return 0
        own = [other for other in self._running if other.tenant == request.tenant]
        peaks = self.rule.peaks
        promised = peaks.num_bytes(self.rule.promised(request, own, 0))
        known = peaks.further_pages(own, [other.num_tokens for other in own]).sum(axis=0)
        return max(promised, peaks.num_bytes(known) + self._known_bytes(request))

    def _known_bytes(self, request: Request, cached_tokens: int = 0) -> int:
        if not self._fairness.has_several:
            return 0
        missing = self.rule.new_request(request, request.num_tokens, cached_tokens)
        return self.rule.peaks.num_bytes(missing)

    # ---- order ---------------------------------------------------------------------------------

    def _candidates(self, budget: int) -> Iterator[tuple[Request, bool]]:
        """Yield (request, whether it is the tenant's first), best tenant first.

        After a resumed request, a tenant's first new request precedes a preempted one. The batcher
        may choose another request of the tenant, or none.
        """
        for head in list(self._waiting.heads()):
            new = (
                self._new_one(head) if self._last_resumed and head.progress.num_admissions else None
            )
            if new is not None and (found := self.batcher.candidate(new, budget)) is not None:
                yield found, False
            if (found := self.batcher.candidate(head, budget)) is not None:
                yield found, True

    def _new_one(self, head: Request) -> Request | None:
        """The tenant's first request of the same or better priority that was never admitted."""
        for request in self._waiting.of_tenant(head.tenant):
            if request.priority > head.priority:
                return None
            if not request.progress.num_admissions:
                return request
        return None

    # ---- memory --------------------------------------------------------------------------------

    def _try(self, request: Request, *, may_preempt: bool) -> Request | None:
        if self._rejected.get(request) == self._memory_state and not may_preempt:
            return None
        self._rejected.pop(request, None)
        if may_preempt or self.free.has_rows(request, self._running):
            admitted = self._allocate(request, may_preempt=may_preempt)
            if admitted is not None:
                return admitted
        if len(self._rejected) > len(self._waiting):  # some were cancelled or finished
            self._rejected = {r: s for r, s in self._rejected.items() if r in self._waiting}
        self._rejected[request] = self._memory_state
        return None

    @property
    def _memory_state(self) -> tuple[int, int]:
        """A rejected request is not tried again before this changes."""
        return self._sequence_memory.available_bytes, len(self._running)

    def _allocate(self, request: Request, *, may_preempt: bool) -> Request | None:
        # the member of a waiting group whose KV is swapped out is not always the first
        swapped = next((m for m in together(request) if m.memory.is_swapped_whole), request)
        if not (self._running or self._preempter.can_swap_in(swapped)):
            self._preempter.free_swapped_group(swapped)  # it never fits: recompute it instead
        whole = swapped.memory.is_swapped_whole
        first = swapped if whole else plan_prefill(request)
        head_tokens = first.memory.head_tokens
        lease = None if whole else self._sequence_memory.look_up(first, head_tokens)
        cached_tokens = 0 if lease is None else lease.tokens
        fits = self.free.fits(first, cached_tokens)
        if not (fits or (may_preempt and self._preempt_for(first, cached_tokens))):
            self._sequence_memory.release(lease)
            return None
        if not (whole or self._start(first, lease, head_tokens)):
            return None
        self._waiting.pop(request)
        if whole:
            # swap in a request and its group
            self._last_resumed = True
            resumed = self._preempter.swap_in(swapped)
            if not resumed:
                self._waiting.push(request)
                return self._allocate(request, may_preempt=False)
            for member in resumed:
                if self._sequence_memory.available_bytes < self.free.reserved_bytes:
                    # It has its own copy of its cached prefix. While it held the cached pages, they
                    # could not be evicted, and the request could be preempted again at once.
                    self._sequence_memory.stop_sharing(member)
                self._run(member)
            return swapped
        self._last_resumed = first.progress.num_admissions > 1
        self._run(first)
        return first

    def _start(self, request: Request, lease: PrefixLease | None, head_tokens: int | None) -> bool:
        """Allocate a row and pages for the statistics of the cached prefix; False without pages.

        For a request that runs alone, all cached prefixes are evicted first, its own included.
        """
        try:
            self._sequence_memory.allocate(request, lease)
        except OutOfPages:
            self._sequence_memory.release(lease)
            if self._running:
                return False
            self._sequence_memory.drop_cached()
            self._sequence_memory.allocate(
                request, self._sequence_memory.look_up(request, head_tokens)
            )
        return True

    # ---- preemption of tenants above their share -----------------------------------------------

    def _preempt_for(self, request: Request, cached_tokens: int) -> bool:
        """Preempt requests of tenants above their share until this one fits, if that is enough."""
        if not (self._fairness.has_several and self._preemptions_suffice(request, cached_tokens)):
            return False
        while not self.free.fits(request, cached_tokens):
            self._fairness.recount(self._running)
            victim = self._victim_over_share(request, cached_tokens, self._running)
            if victim is None:  # the freed pages were of another page class
                return False
            has_row = self.free.has_rows(request, self._running)
            why = "needs memory of its share" if has_row else "has fewer rows than its share"
            self._lifecycle.preempt(victim, f"tenant {request.tenant} {why}")
        return True

    def _preemptions_suffice(self, request: Request, cached_tokens: int) -> bool:
        """Whether a request would fit if requests of tenants above their share were preempted."""
        staying, leaving = list(self._running), list[Request]()
        while not self.free.would_fit(request, cached_tokens, staying):
            self._fairness.suppose(staying, leaving)
            victim = self._victim_over_share(request, cached_tokens, staying)
            if victim is None:
                break
            leaving += [member for member in together(victim) if member in staying]
            staying = [other for other in staying if other not in leaving]
        enough = self.free.would_fit(request, cached_tokens, staying)
        self._fairness.recount(self._running)
        return enough

    def _victim_over_share(
        self, request: Request, cached_tokens: int, running: Sequence[Request]
    ) -> Request | None:
        """A victim of a tenant above its share of rows or bytes; None if there is none."""
        if self.free.has_rows(request, running):
            missing_bytes = self._known_bytes(request, cached_tokens)
            tenants = self._fairness.tenants_to_reclaim(request, missing_bytes)
        else:
            tenants = self._fairness.tenants_over_rows(request, running, self._config.num_rows)
        theirs = ([r for r in running if r.tenant == tenant] for tenant in tenants)
        victims = map(self._preempter.victim_among, theirs)
        return next((victim for victim in victims if victim is not None), None)

    # ---- admitted ------------------------------------------------------------------------------

    def _run(self, request: Request) -> None:
        self._lifecycle.start(request)
        self.batcher.admitted(request)

    # ---- urgent requests -----------------------------------------------------------------------

    def admit_urgent(self) -> None:
        """Admit all urgent requests that the batcher accepts; call before a step is planned.

        Only requests of lower priority are preempted for them; with several tenants, only those of
        the same tenant. None is preempted if that would not free enough memory.
        """
        if self._config.urgent is None:
            return
        for head in list(self._waiting.heads()):
            request: Request | None = head
            while request is not None and self._admit_urgent(request, self._config.urgent):
                waits = head.tenant in self._waiting.tenants
                request = next(self._waiting.of_tenant(head.tenant), None) if waits else None

    def _admit_urgent(self, request: Request, urgent: int) -> bool:
        if request.priority > urgent or not self.is_turn_of(request):
            return False
        if self.admit_now(request):
            return True
        later = self._later_requests(request)
        staying = [other for other in self._running if other not in later]
        if not (later and self.free.would_fit(request, 0, staying)):
            return False
        return self._preempt_until_admitted(request)

    def _preempt_until_admitted(self, request: Request) -> bool:
        while later := self._later_requests(request):
            victim = self._preempter.victim_among(later)
            victim = victim or self._preempter.victim_among(later, even_resumed=True)
            assert victim is not None, "there are candidates"
            self._lifecycle.preempt(victim, URGENT_WAITING)
            if self.admit_now(request):
                return True
        return False

    def _later_requests(self, request: Request) -> list[Request]:
        several = self._fairness.has_several
        return [
            other
            for other in self._running
            if other.priority > request.priority and (not several or other.tenant == request.tenant)
        ]
