"""The scheduler: plans every step over one KV memory of a fixed number of bytes.

    a step's tokens | decoding rows, one token each | chunks of prompts (prefill) | new requests |
                    |<--------------------- at most max_num_batched_tokens --------------------->|

`Scheduler.schedule` plans a step from top to bottom. Torch-free: the scheduler uses only token
counts, pages and requests. The evictor selects the tokens to evict, because the selection depends
on tensors.
"""

from collections.abc import Callable, Collection, Sequence

from quire.errors import NeverFits
from quire.scheduler.admission import Admission, make_admission
from quire.scheduler.batchers.base import BatchState
from quire.scheduler.fairness import Fairness
from quire.scheduler.forks import NEVER, Forks
from quire.scheduler.lanes import (
    Evictor,
    LaneCapacities,
    LayerPrefill,
    due_scoring,
    free_tokens,
    has_atomic_chunk,
)
from quire.scheduler.lifecycle import Failure, Lifecycle
from quire.scheduler.peaks import Peaks, need_of, refuse_if_never
from quire.scheduler.preemption import Preempter, Swapper
from quire.scheduler.request import (
    PlannedFork,
    Request,
    RequestGroup,
    RequestState,
    dissolve,
    num_rows,
    prefillable_tokens,
    refuse_beams,
    same_group,
    together,
    whole_groups,
)
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.sequence_memory import FINISHED, SequenceMemory
from quire.scheduler.speculation import (
    DraftCounts,
    DraftLengths,
    Drafts,
    Proposals,
    parse_speculative,
)
from quire.scheduler.step import StepPlan, StepSize, refuse_nothing_shared
from quire.scheduler.waiting import WaitingCauses
from quire.tenancy.accounts import TenantAccounts
from quire.tenancy.fair_queue import FairQueue
from quire.tenancy.tenants import parse_tenants

SCALED_DOWN = "memory use above scale_down_at"
PROMISED = "its pages are promised to prompts that are computed layer by layer"
SCORED_TOKENS = 256  # maximum tokens of a step with prompt log-probabilities: bounds the logits
# Why a step is not planned ahead of the last step's tokens.
BEAMS, EVICTION, FAILURE = "beam search", "eviction", "failed request"
NO_PAGES, NO_ROWS, PREEMPTED = "too few free pages", "no rows", "preempted request"
TENANTS = "several tenants"


class Scheduler:
    """Queues requests for one KV memory and plans every step.

    `scheduler_of` creates it from a configuration.

    Args:
        config: the scheduling options.
        sequence_memory: the requests' pages in the KV memory.
        admission: decides when a waiting request starts.
        lifecycle: moves requests between waiting, running and finished.
        capacities: evicts from lanes that are at their capacity.
        forks: forks members of groups.
        step_size: maximum number of tokens in the next step.

    Attributes:
        running, waiting: the requests; only `lifecycle` and `admission` change them.
        batcher: decides which rows decode and which requests may join the batch.
        fairness: the tenants' accounts and the order of their requests.
        preempter: chooses victims and swaps their KV out and in.
        peaks: page arithmetic.
        drafts: counters of speculative decoding.
        proposes: whether there is speculative decoding.
    """

    def __init__(
        self,
        config: ScheduleConfig,
        sequence_memory: SequenceMemory,
        admission: Admission,
        lifecycle: Lifecycle,
        capacities: LaneCapacities,
        forks: Forks,
        step_size: StepSize,
    ) -> None:
        self.config, self.step_size, self._forks = config, step_size, forks
        self.sequence_memory, self.memory = sequence_memory, sequence_memory.memory
        self.admission, self.batcher, self.peaks = (
            admission,
            admission.batcher,
            admission.rule.peaks,
        )
        self.lifecycle, self.capacities = lifecycle, capacities
        self.running, self.waiting = lifecycle.running, lifecycle.waiting
        self.fairness, self.preempter = lifecycle.fairness, lifecycle.preempter
        self._evicts, self._longest_chunk = capacities.lanes is not None, config.longest_chunk
        self._last_plan, self._lengths = StepPlan(), DraftLengths()
        speculative = parse_speculative(config.speculative)
        self.proposes = speculative is not None
        self._proposals = None if speculative is None else Proposals(speculative)
        self.drafts = DraftCounts()

    # ---- a step --------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan a step and allocate its pages.

        Limits are enforced first, so that no preempted request is part of the step.
        """
        plan = StepPlan()
        self.fairness.recount(self.running)
        if self._evicts:
            if self.capacities.has_breaches():
                self.capacities.fail_breaches()
            self.capacities.evict_while(self.admission.lacks_free_pages, self.running)
        self._enforce_limits()
        self._admit_first()
        self._plan_decoding(plan)
        self._plan_prefill(plan)
        while plan.is_idle and self.batcher.stalled():
            self._plan_decoding(plan)
        if plan.is_idle and self.running:
            self._unblock(plan)
        return plan

    # ---- limits --------------------------------------------------------------------------------

    def _enforce_limits(self) -> None:
        """Preempt requests that exceed a watermark or would exceed the limit of their tenant."""
        if self.config.high_watermark < 1:
            self._enforce_watermark(self.config.high_watermark * self.memory.total_bytes)
        if self.config.scale_down_at is not None:
            self._scale_down(self.config.scale_down_at * self.memory.total_bytes)
        for spec in self.fairness.accounts.specs:
            if spec.limit_bytes is not None:
                self._enforce_tenant(spec.name, spec.limit_bytes)

    @property
    def _used_bytes(self) -> int:
        return self.memory.total_bytes - self.sequence_memory.available_bytes

    def _enforce_watermark(self, max_bytes: float) -> None:
        """Preempt requests while memory use is above the high watermark."""
        while len(self.running) > 1 and self._used_bytes > max_bytes:
            first = min(self.running, key=self.preempter.order)
            victim = self.preempter.victim(self.running, first)
            if victim is None:
                return
            self.lifecycle.preempt(victim, "memory use above the high watermark")

    def _scale_down(self, max_bytes: float) -> None:
        """Swap out requests, just resumed ones too, while memory use is above `scale_down_at`.

        The first request in scheduling order keeps running. A single request may use all memory.
        """
        while self.running and self._used_bytes > max_bytes:
            first = min(self.running, key=self.preempter.order)
            victim = self.preempter.victim(self.running, first)
            victim = victim or self.preempter.victim(self.running, first, even_resumed=True)
            if victim is None:
                return
            self.lifecycle.preempt(victim, SCALED_DOWN, swap_all=True)

    def _enforce_tenant(self, tenant: str, limit_bytes: int) -> None:
        """Preempt the last requests of a tenant while its known tokens would exceed its limit.

        Its first request fits alone: requests that do not are refused at submission.
        """
        while theirs := [request for request in self.running if request.tenant == tenant]:
            further = self.peaks.further_pages(theirs, [request.num_tokens for request in theirs])
            further_bytes = self.peaks.num_bytes(further.sum(axis=0))
            if self.fairness.accounts.held_bytes(tenant) + further_bytes <= limit_bytes:
                return
            first = min(theirs, key=self.preempter.order)
            others = [r for r in theirs if r is not first and not same_group(r, first)]
            victim = self.preempter.victim_among(others)
            victim = victim or self.preempter.victim_among(others, even_resumed=True)
            if victim is None:
                return
            self.lifecycle.preempt(victim, "its tenant would exceed its limit")

    def _admit_first(self) -> None:
        """Admit requests that may preempt others, then swap requests as the batcher requires."""
        if len(self.waiting):
            self.admission.reclaim()
            self.admission.admit_urgent()
        swaps = self.batcher.begin()
        if swaps is not None:
            for request in swaps.swap_out:
                self.lifecycle.swap_out(request)
            for request in swaps.swap_in:
                self.admission.admit_now(request)

    # ---- decoding rows -------------------------------------------------------------------------

    def _plan_decoding(self, plan: StepPlan) -> None:
        """Add the batch's decoding rows that have pages for their next token."""
        ready = [r for r in self.running if r.num_tokens - r.progress.num_computed == 1]
        if self._evicts:  # the last token of a prompt that is scored is a chunk
            ready = [r for r in ready if not due_scoring(r, 1)]
        self._decode(plan, self.batcher.decoding(ready))

    def _decode(self, plan: StepPlan, rows: list[Request]) -> None:
        """Add decoding rows; evict or preempt requests while the rows lack pages."""
        decoding = whole_groups(rows)
        if len(decoding) > self.step_size.tokens:
            first = sorted(decoding, key=self.preempter.order)[: self.step_size.tokens]
            decoding = whole_groups(first)
        if self._evicts:
            decoding = whole_groups(self.capacities.evict_to_capacity(decoding))
        if self.proposes and self._add_with_drafts(plan, decoding):
            return
        while decoding and not self.sequence_memory.try_grow(decoding, [1] * len(decoding)):
            if not self.capacities.free_for(decoding, self.running):
                best = min(decoding, key=self.preempter.order)
                victim = self.preempter.victim(self.running, best)
                if victim is None:  # later requests have just resumed: the last one skips a step
                    decoding.remove(max(decoding, key=self.preempter.order))
                else:
                    self.lifecycle.preempt(victim, "no page for the next token")
            decoding = whole_groups([r for r in decoding if r.is_running])
        if decoding:
            plan.requests.extend(decoding)
            plan.tokens.extend([1] * len(decoding))
            plan.num_decoding = len(plan.requests)

    def _add_with_drafts(self, plan: StepPlan, decoding: Sequence[Request]) -> bool:
        """Add decoding rows with proposed tokens; False if there are none, or no pages for them.

        No request is preempted for proposed tokens: rows from the last ones lose theirs instead.
        """
        counts = self._propose(plan, decoding)
        drafted = [index for index, count in enumerate(counts) if count]
        while drafted and not self.sequence_memory.try_grow(decoding, [1] * len(decoding), counts):
            for index in drafted[len(drafted) // 2 :]:
                counts[index] = 0
            _withdraw_drafts([decoding[index] for index in drafted[len(drafted) // 2 :]])
            del drafted[len(drafted) // 2 :]
        if not drafted:
            return False
        plan.requests.extend(decoding)
        plan.tokens.extend(1 + count for count in counts)
        plan.num_decoding = len(plan.requests)
        return True

    def _propose(self, plan: StepPlan, decoding: Sequence[Request]) -> list[int]:
        """Propose tokens of decoding rows; return their number for each, 0 without."""
        assert self._proposals is not None, "only called with speculative decoding"
        counts = [0] * len(decoding)
        found: list[tuple[int, Drafts, int]] = []
        for index, request in enumerate(decoding):
            most, spec = self._max_draft_tokens(request), request.spec.speculative
            if most > 0 and spec is not None:
                drafts = request.drafts or self._proposals.begin(spec, _owner(request))
                request.drafts = drafts
                found.append((index, drafts, most))
        if not found:
            return counts
        room = self._room_for_drafts(plan, decoding)
        lengths = self._lengths.choose(
            len(decoding), [(drafts, min(most, room)) for _, drafts, most in found]
        )
        for (index, drafts, _), length in zip(found, lengths, strict=True):
            if min(length, room) > 0:
                request, proposer = decoding[index], drafts.proposer
                new = request.token_ids(proposer.num_tokens, request.num_tokens)
                drafts.token_ids = proposer.propose(new, min(length, room))
                counts[index] = len(drafts.token_ids)
                room -= counts[index]
        return counts

    def _room_for_drafts(self, plan: StepPlan, decoding: Sequence[Request]) -> int:
        """Most proposed tokens of a step; a half of the step is for prompts, if there are any."""
        most, rows = self.step_size.tokens, len(plan.requests) + len(decoding)
        if len(self.running) > rows or len(self.waiting):
            most //= 2
        return max(0, most - rows)

    def _max_draft_tokens(self, request: Request) -> int:
        """Most tokens that may be proposed for a decoding row."""
        spec, done = request.spec.speculative, request.progress.num_computed
        if spec is None or done < len(request.prompt_token_ids) or request.progress.num_pending:
            return 0
        if request.group is not None and any(f.parent is request for f in request.group.forks):
            return 0  # a fork would begin with the KV of proposed tokens
        most = min(spec.tokens, request.params.max_tokens - request.num_output_tokens - 1)
        if self._evicts:  # no eviction becomes due between its tokens
            most = min(most, free_tokens(request, self.capacities.lanes) - 1)
        for to_end in (
            self.memory.layout.until_chunk_end(done),
            self.sequence_memory.until_checkpoint(request),
        ):
            most = most if to_end is None else min(most, to_end - 1)
        return most

    # ---- prefill -------------------------------------------------------------------------------

    def _plan_prefill(self, plan: StepPlan, budget: int | None = None) -> None:
        """Add chunks of prompts to the step, then admit new requests.

        Args:
            plan: the step's plan.
            budget: maximum prefill tokens; default: decided by the batcher.
        """
        if budget is None:
            budget = self.batcher.prefill_tokens(self.step_size.tokens - sum(plan.tokens))
        self._last_plan, loader = plan, self.sequence_memory.prefix_loader
        if loader is not None:
            loader.begin_plan()
        self._fill(plan, budget)
        if loader is not None and loader.waits and not plan.requests:
            if loader.wait():
                self._fill(plan, budget)
            plan.waits = not plan.requests

    def _fill(self, plan: StepPlan, budget: int) -> None:
        """Add chunks of prompts: of the tenant served least first, a fraction for each tenant.

        No request is admitted while a running prefill gets no tokens. Otherwise a chunk that must
        be computed as a whole could wait forever while new requests use the rest of every step.
        Exception: a request of the tenant served least is admitted before others' prompts.
        """
        planned = set(map(id, plan.requests))
        queue = [
            r
            for r in self.running
            if id(r) not in planned and prefillable_tokens(r) > 0 and self.batcher.may_compute(r)
        ]
        queue.sort(key=self.fairness.prefill_order, reverse=True)
        plan.unserved, plan.is_full = None, False
        while budget > 0:
            new_request = None
            admits = self._is_before(queue[-1]) if queue else plan.unserved is None
            if admits and len(self.waiting):
                new_request = self.admission.admit(budget, resumes=plan.by_layer is None)
                if new_request is not None and not self._keeps_promises(plan):
                    self.lifecycle.preempt(new_request, PROMISED, recompute=True)
                    return
            if new_request is None and not queue:
                return
            request = new_request or queue.pop()
            if not request.is_running:  # its group has failed
                continue
            if request is new_request and not self.batcher.may_compute(request):
                continue  # it was swapped in completely and waits for a batch row
            fraction = self.step_size.tokens
            if not self._is_atomic(request):
                fraction = self.fairness.step_part(request, queue, fraction)
            tokens = self._chunk(plan, request, min(budget, fraction))
            budget -= tokens + plan.scoring_tokens(request)
            if not (tokens or self._waits_for_prefix(request)):
                plan.unserved = request
        plan.is_full = True

    def _keeps_promises(self, plan: StepPlan) -> bool:
        """Whether the pages of prompts that are computed layer by layer are free.

        They are allocated while the step runs; an admission may have taken some for KV that is
        swapped in or loaded, or for statistics of a cached prefix.
        """
        promised = {} if plan.by_layer is None else plan.by_layer.promised_pages
        return not promised or self.sequence_memory.free_pages(promised)

    def _is_before(self, request: Request) -> bool:
        """Whether a request of a tenant that was served less than this one's is waiting."""
        if not self.fairness.has_several:
            return False
        head = next(self.waiting.heads(), None)
        if head is None or head.tenant == request.tenant:
            return False
        return self.waiting.virtual_time(head.tenant) < self.waiting.virtual_time(request.tenant)

    def _waits_for_prefix(self, request: Request) -> bool:
        """Whether a request gets no tokens because its prefix is being loaded."""
        loader = self.sequence_memory.prefix_loader
        return loader is not None and loader.is_waiting(request)

    def _is_atomic(self, request: Request) -> bool:
        """Whether its next chunk must be computed as a whole: after an eviction, or by layer."""
        return self._evicts and (has_atomic_chunk(request) or self._is_by_layer(request))

    # ---- one chunk -----------------------------------------------------------------------------

    def _chunk(self, plan: StepPlan, request: Request, budget: int) -> int:
        """Add a prompt's next chunk, as large as the budget and pages allow; return its tokens."""
        if plan.by_layer is not None or self._is_by_layer(request):
            return self._prefill_by_layer(plan, request, budget)
        head_tokens = request.memory.head_tokens
        if head_tokens is not None:  # then a tail follows that is swapped out
            left = head_tokens - request.progress.num_computed
            if left > 0:
                budget = min(budget, left)
            elif not self.preempter.swap_in_tail(request):
                budget = 0
        if self.sequence_memory.prefix_loader is not None:
            budget = self.sequence_memory.prefix_loader.may_read(request, budget)
        tokens, atomic = self._chunk_tokens(plan, request, budget), self._is_atomic(request)
        if not tokens or (self._evicts and not self.capacities.evict_to_capacity([request])):
            return 0
        scoring = due_scoring(request, tokens) if self._evicts else 0
        if scoring and not self._may_add_whole(plan, request, tokens, budget):
            return 0
        if not self._has_pages(
            plan, request, lambda: self.sequence_memory.can_grow([request], [tokens + scoring])
        ):
            smaller = not atomic and request.is_running
            tokens, scoring = self._largest_fitting(request, tokens) if smaller else 0, 0
        if tokens:
            self.sequence_memory.grow([request], [tokens], scoring)
            plan.scoring.update({request: scoring} if scoring else {})
            self._add_chunk(plan, request, tokens)
        return tokens

    def _may_add_whole(self, plan: StepPlan, request: Request, tokens: int, budget: int) -> bool:
        """Whether a prompt and its scoring pass, which are not divided, fit or are the first."""
        spec, prompt_tokens = request.eviction.spec, len(request.prompt_token_ids)
        fits = tokens + spec.scoring_tokens(prompt_tokens) <= budget
        return fits or len(plan.requests) == plan.num_decoding

    def _add_chunk(self, plan: StepPlan, request: Request, tokens: int) -> None:
        scoring_tokens = plan.scoring_tokens(request)
        self.fairness.charge_prefill(request, tokens, scoring_tokens=scoring_tokens)
        kv_bytes = self.memory.row_bytes(request.memory.row)
        self.sequence_memory.events.emit("chunk", request, tokens=tokens, kv_bytes=kv_bytes)
        plan.add(request, tokens)

    def _is_by_layer(self, request: Request) -> bool:
        """Whether the rest of a request's prompt is computed layer by layer, in one step."""
        left = len(request.prompt_token_ids) - request.progress.num_computed
        return (
            request.eviction.spec.cuts_by_layer
            and 0 < left <= prefillable_tokens(request)
            and request.memory.head_tokens is None
            and self.peaks.is_by_layer(need_of(request, request.num_tokens))
        )

    def _prefill_by_layer(self, plan: StepPlan, request: Request, budget: int) -> int:
        """Add the rest of a prompt, whose layers are computed and cut one by one.

        The first prompt of a step may exceed the budget, since a part of it would not be a step.
        """
        if not self._is_by_layer(request):
            return 0  # the free pages are promised to the prompts of the plan
        tokens = len(request.prompt_token_ids) - request.progress.num_computed
        prefill = plan.by_layer or LayerPrefill(
            self.capacities, self.sequence_memory, self._longest_chunk
        )
        if not self._may_add_whole(plan, request, tokens, budget):
            return 0
        if not prefill.accepts(request):
            return 0

        def has_free_pages(*, publishes: bool = False) -> bool:
            pages = prefill.needed_pages(request, tokens, publishes=publishes)
            num_bytes = sum(page_class.page_bytes * n for page_class, n in pages.items())
            is_possible = num_bytes <= self.sequence_memory.available_bytes
            return is_possible and self.sequence_memory.free_pages(pages)

        # blocks are published if all layers fit as a whole
        lease = request.memory.lease
        publishes = lease is not None and lease.publishes and has_free_pages(publishes=True)
        if not publishes and not self._has_pages(plan, request, has_free_pages):
            return 0
        prefill.add(request, tokens, publishes=publishes)
        plan.by_layer = prefill
        self._add_chunk(plan, request, tokens)
        return tokens

    def _chunk_tokens(self, plan: StepPlan, request: Request, budget: int) -> int:
        """Tokens of its next chunk within a budget.

        If its lanes have a cap, chunks fill the lanes up to the cap. Then each chunk has `every`
        tokens (or the rest of the prompt) after one eviction, as a whole or not at all. So the
        output does not depend on the rest of the batch. Chunks also end at the next snapshot of
        statistics for the prefix cache, and where a layer with chunked attention begins a chunk.
        """
        max_tokens = prefillable_tokens(request)
        if self.capacities.lanes is not None:
            max_tokens = min(max_tokens, free_tokens(request, self.capacities.lanes))
        to_chunk_end = self.memory.layout.until_chunk_end(request.progress.num_computed)
        max_tokens = max_tokens if to_chunk_end is None else min(max_tokens, to_chunk_end)
        if self._is_atomic(request):
            return max_tokens if max_tokens <= budget else 0
        budget = min(budget, self._longest_chunk)
        if request.params.prompt_logprobs is not None:
            budget = min(budget, max(0, SCORED_TOKENS - plan.num_scored))
        done = request.progress.num_computed
        to_snapshot = (end - done for end in request.memory.snapshot_ends if end > done)
        return min(max_tokens, budget, *to_snapshot)

    def _has_pages(
        self, plan: StepPlan, request: Request, has_free_pages: Callable[[], bool]
    ) -> bool:
        """Whether there are pages for a chunk; requests outside of the plan may evict for it."""
        while not has_free_pages():
            planned = set(map(id, plan.requests))
            others = [r for r in self.running if id(r) not in planned]
            freed = self.capacities.free_for([request], others)
            if not freed or not request.is_running:
                return False
        return True

    def _largest_fitting(self, request: Request, tokens: int) -> int:
        """The largest chunk below `tokens` that has pages, by bisection."""
        low, high = 0, tokens
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.sequence_memory.can_grow([request], [middle])
            low, high = (middle, high) if fits else (low, middle)
        return low

    # ---- no request could be planned -----------------------------------------------------------

    def _unblock(self, plan: StepPlan) -> None:
        """Plan a step in which only the first request runs, and free pages for it.

        1  the requests after it are preempted, one by one
        2  swapped requests free the offload memory that they occupy; they are recomputed later
        3  its cached prefix is unpinned, its pages are compacted, its staging slots are halved
        4  its swapped tail, which does not fit beside its head, is freed; it is recomputed
        5  its earlier evictions under pressure are not repeated, but decided again
        6  other members of its group are split off
        7  its cached prefix, which it holds in all layers at once or which keeps other pages in
           offload memory, is freed and computed again
        8  it fails; other requests are unaffected

        The first request is the first by `Request.order`, regardless of tenants' shares. Shares
        change with the running requests, so two requests could preempt each other forever.
        """
        first = min(self.running, key=lambda request: request.order)
        self._plan_first(plan, first)
        while not plan.requests:
            victim = self.preempter.victim(self.running, first, even_resumed=True)
            if victim is None:
                break
            self.lifecycle.preempt(victim, "no running request could be scheduled")
            self._plan_first(plan, first)
        if not plan.requests and self.preempter.free_offloaded():
            self._plan_first(plan, first)
        preempter, capacities = self.preempter, self.capacities
        steps: list[Callable[[Request], object]] = [
            *(preempter.stop_sharing, preempter.compact, preempter.halve_staging),
            *([] if first.memory.head_tokens is None else [preempter.free_swapped]),
            *([capacities.decide_again] if self._evicts else []),
        ]
        for free_pages in steps:
            if not plan.requests:
                free_pages(first)
                self._plan_first(plan, first)
        while not plan.requests and self._forks.split_off(first):
            self._plan_first(plan, first)
        offloader = self.sequence_memory.prefix_offloader
        frees = self._is_by_layer(first) or (
            offloader is not None and offloader.holds_unused(first)
        )
        if not plan.requests and frees and first.progress.num_computed:
            self.lifecycle.preempt(first, "its cached prefix leaves no pages", recompute=True)
            self.sequence_memory.drop_cached()
            self._plan_prefill(plan, self.config.max_num_batched_tokens)
        elif not plan.requests and first.is_running:
            self.lifecycle.fail(first, NeverFits(NEVER))

    def _plan_first(self, plan: StepPlan, first: Request) -> None:
        """Plan the tokens of a request, or of the first member of its group that has pages.

        Beams that are not in the batch decode too: a prefill chunk never computes the last token of
        a beam.
        """
        if first.group is not None:
            self._plan_decoding(plan)
            if not plan.requests:
                ready = [r for r in self.running if r.num_uncomputed == 1 and same_group(r, first)]
                self._decode(plan, [r for r in ready if not due_scoring(r, 1)])
        for request in together(first):
            if request.is_running and not plan.requests:
                self._chunk(plan, request, self.config.max_num_batched_tokens)

    # ---- ahead of the last step's tokens -------------------------------------------------------

    def plan_ahead(self, pending: Collection[Request]) -> StepPlan | str:
        """Plan a step while the output tokens of the last step are pending, and allocate its pages.

        These tokens are sampled and not read (asynchronous scheduling), so that their values are
        not known, nor which requests end with them. The plan must be right for all values. It
        contains decoding rows, chunks of prompts and new requests. It preempts and evicts nothing,
        because a request that ends would have freed its pages. If a step must preempt or evict, the
        engine reads the tokens first.

        Args:
            pending: requests of the last step, whose tokens are pending.

        Returns:
            The plan, with at least one request; or why the tokens must be read before. Then no
            running request has changed. Cached prefixes that no request uses may be evicted, and
            requests admitted without a chunk.
        """
        reason = self._why_not_ahead(pending)
        if reason is not None:
            return reason
        plan = StepPlan()
        self._plan_decoding(plan)
        self._plan_prefill(plan)
        return plan if plan.requests else NO_ROWS

    def _why_not_ahead(self, pending: Collection[Request]) -> str | None:
        self.fairness.recount(self.running)
        if self.lifecycle.failures or (self._evicts and self.capacities.has_breaches()):
            return FAILURE
        if self.fairness.has_several:  # requests may be preempted for another tenant
            return TENANTS
        if any(r.progress.state is RequestState.WAITING for r in pending):
            return PREEMPTED
        if any(r.group is not None and r.group.atomic for r in self.running):
            return BEAMS
        if self.capacities.may_wait(self.running):
            return EVICTION
        decoding = [r for r in self.running if r.num_uncomputed == 1]
        if decoding and not self.sequence_memory.can_grow(decoding, [1] * len(decoding)):
            return NO_PAGES  # requests are preempted, unless one of them ends
        return None

    # ---- a planned step ------------------------------------------------------------------------

    def commit(self, plan: StepPlan) -> list[PlannedFork]:
        """Record that the tokens of a step have been computed; return the new forks."""
        forks = self.note_launched(plan)
        self.note_inputs(plan)
        return forks

    def note_launched(self, plan: StepPlan) -> list[PlannedFork]:
        """Record that the tokens of a step are being computed; return the new forks.

        Operations on KV run in the order of their launches, so that the pages of the step may be
        shared, copied and freed at once.
        """
        for request, tokens in zip(plan.requests, plan.tokens, strict=True):
            progress = request.progress
            again = min(tokens, progress.furthest_tokens - progress.num_computed)
            progress.recomputed_tokens += max(0, again)
            progress.num_computed += tokens - len(request.draft_token_ids)
        for request in plan.scoring:
            self.memory.truncate(request.memory.row, request.progress.num_computed)
        if plan.by_layer is not None:
            plan.by_layer.end()
            plan.by_layer.record()
        self.sequence_memory.confirm(plan.requests)
        return self._forks.make_due(plan.requests)

    def note_inputs(self, plan: StepPlan) -> None:
        """Record that the values of a launched step's input tokens are known.

        Decoding rows are charged, unless their request has ended with its input token. Blocks with
        tokens that were pending are published.
        """
        decoding = plan.requests[: plan.num_decoding]
        ended = RequestState.FINISHED
        self.fairness.charge_decoding([r for r in decoding if r.progress.state is not ended])
        if plan.pending is not None:
            self.sequence_memory.publish_known(plan.requests)

    def settle(self, requests: Sequence[Request]) -> None:
        """Drop the KV of proposed tokens that were not sampled.

        Call it before any of these requests may be preempted: its KV would be saved with them.
        """
        for request in requests:
            assert request.drafts is not None, "its proposals were verified"
            count, right = request.drafts.settle()
            self.drafts.add(count, right)
            self.fairness.waiting.charge(request.tenant, output_tokens=right)
            if request.is_running:
                self.sequence_memory.settle(request, right, count - right)

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Update step size and prefill costs; prefill only from steps with a single chunk.

        Args:
            plan: the completed step.
            seconds: its duration.
        """
        self.step_size.learn(plan.computed_tokens)
        if self.proposes and plan.requests and plan.num_decoding == len(plan.requests):
            self._lengths.learn(len(plan.requests), sum(plan.tokens), seconds)
        swapper = self.preempter.swapper
        if (
            swapper is not None
            and len(plan.requests) == 1
            and not plan.num_decoding
            and plan.tokens[0] > 1 > len(plan.scored)
        ):
            swapper.costs.read(plan.tokens[0], plan.requests[0].progress.num_computed, seconds)

    def roll_back(self, plan: StepPlan) -> list[Request]:
        """Free and queue the requests of a failed step.

        Requests that share blocks which the step did not write are freed and queued too.

        Args:
            plan: the step's plan; if empty, planning failed and all running requests are queued.

        Returns:
            The requests of the step.
        """
        _withdraw_drafts(plan.requests or self.running)
        failed = [r for r in plan.requests or self.running if r.is_running]
        others = (r for r in self.running if r not in failed)
        sharing = [r for r in others if self.sequence_memory.shares_unwritten(r)]
        self.sequence_memory.withdraw()
        for request in failed + sharing:
            if request.is_running:  # otherwise it was queued with its group
                self.lifecycle.restart(request, "step failed")
        return failed

    def fail_by_layer(self, plan: StepPlan) -> bool:
        """End the request of a failed step whose policy broke its contract; False if none did."""
        failed = None if plan.by_layer is None else plan.by_layer.failed
        if failed is not None:
            self.roll_back(plan)
            self.lifecycle.fail(*failed)
        return failed is not None

    # ---- requests ------------------------------------------------------------------------------

    @property
    def waiting_causes(self) -> WaitingCauses:
        """Why requests wait, after the last step."""
        return WaitingCauses(self.admission, self.lifecycle, self._last_plan)

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests."""
        return len(self.waiting)

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions since the start."""
        return self.preempter.num_preemptions

    @property
    def has_work(self) -> bool:
        """Whether there are running or waiting requests, or failures to report."""
        return bool(self.running or len(self.waiting) or self.lifecycle.failures)

    def submit(self, request: Request) -> None:
        """Queue a request, or a group by its first member.

        Raises:
            NeverFits: the request does not fit even alone, or exceeds the limit of its tenant.
            RequestError: a beam search with too many beams, or an unknown tenant.
        """
        refuse_beams(request, self.config)
        sequences = [request] if self._can_run_whole(request) else dissolve(request)
        refuse_if_never(self.peaks, request)
        self.fairness.admit(request, self._peak_bytes(request))
        for sequence in sequences:
            self.lifecycle.wait(sequence)

    def _can_run_whole(self, request: Request) -> bool:
        """Whether a request and its group can run together, in the memory and its tenant's limit.

        Members of one group are not preempted for each other, so the limit is checked here.
        """
        if request.group is None:
            return True
        if num_rows(request) > self.config.max_num_seqs or not self.peaks.fit_whole(request):
            return False
        return self.fairness.may_hold(request, self._peak_bytes(request))

    def _peak_bytes(self, request: Request) -> int:
        """Bytes of a request and its group at their peak."""
        need = need_of(request, request.final_tokens)
        return self.peaks.num_bytes(self.peaks.whole_counts(need, num_rows(request)))

    def finish(self, request: Request, reason: str = FINISHED) -> None:
        """End a request in any state and free its pages."""
        ends = reason == FINISHED and request.is_running
        self.lifecycle.finish(request, reason)
        if self._proposals is not None and ends and request.spec.speculative is not None:
            self._proposals.end(_owner(request), request.output_token_ids)

    def take_failures(self) -> list[Failure]:
        """Return and clear the failures since the last call."""
        failures = list(self.lifecycle.failures)
        self.lifecycle.failures.clear()
        return failures

    def preempt_one(self) -> bool:
        """Free memory for another engine of a shared pool.

        Evicts cached prefixes that no request uses; if there are none, preempts the last request in
        scheduling order.

        Returns:
            False if there was no memory to free.
        """
        if self.sequence_memory.idle_bytes:
            self.sequence_memory.drop_cached()
            return True
        if self.running:
            last = max(self.running, key=self.preempter.order)
            self.lifecycle.preempt(last, "another engine needs its guaranteed memory")
            return True
        return False

    def branch(self, group: RequestGroup, parents: Sequence[int]) -> None:
        """Replace the members of a running group; see `Forks.branch`.

        Call it after the tokens of all other requests of the step are sampled, because some of them
        may be preempted.
        """
        self._forks.branch(group, parents)


def _owner(request: Request) -> object:
    """Whose outputs a request may reveal by what it proposes."""
    return request.tenant, request.spec.cache_salt


def _withdraw_drafts(requests: Sequence[Request]) -> None:
    for request in requests:
        if request.drafts is not None:
            request.drafts.withdraw()


def scheduler_of(
    config: ScheduleConfig,
    sequence_memory: SequenceMemory,
    evictor: Evictor | None = None,
    swapper: Swapper | None = None,
    *,
    step_size: StepSize | None = None,
    running: list[Request] | None = None,
    by_layer: bool = True,
) -> Scheduler:
    """Create the scheduler of a configuration.

    Args:
        config: the scheduling options.
        sequence_memory: the requests' pages in the KV memory.
        evictor: evicts tokens of lanes at their capacity; None if no request evicts.
        swapper: copies KV to the swap space and back; None if preempted requests are recomputed.
        step_size: maximum number of tokens in a step; default: one batch.
        running: the list of running requests, if other components read it; default: a new one.
        by_layer: whether prompts can be computed layer by layer.

    Raises:
        ConfigError: an unknown rule, or tenants' guarantees exceed the KV memory.
    """
    if step_size is None:
        refuse_nothing_shared(config.objective, offloaded_weights=False)
        step_size = StepSize(config.max_num_batched_tokens)
    running = [] if running is None else running
    tenants, arena = parse_tenants(config.tenants), sequence_memory.memory.arena
    fairness = Fairness(
        TenantAccounts(tenants, arena.num_slabs * arena.slab_bytes),
        sequence_memory,
        FairQueue({spec.name: spec.weight for spec in tenants}),
    )
    offloader, loader = sequence_memory.prefix_offloader, sequence_memory.prefix_loader
    peaks = Peaks(
        sequence_memory.memory,
        config.longest_chunk,
        by_layer=by_layer,
        offloaded_tokens=0 if offloader is None else offloader.offloaded_tokens,
        offload_bytes=0 if offloader is None else offloader.offload_bytes,
        pages_in_flight=None if loader is None else loader.pages_in_flight,
    )
    can_swap = swapper is not None and swapper.has_pool
    rule = make_admission(config.admission, peaks, can_swap=can_swap)
    preempter = Preempter(sequence_memory, fairness, swapper)
    lifecycle = Lifecycle(running, sequence_memory, fairness, preempter, rule.learn)
    batcher = config.batching.make(
        BatchState(
            running=running,
            waiting=fairness.waiting,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            chunk_tokens=config.chunk_tokens,
            urgent=config.urgent,
        )
    )
    capacities = LaneCapacities(sequence_memory, evictor, lifecycle)
    return Scheduler(
        config,
        sequence_memory,
        Admission(config, sequence_memory, rule, lifecycle, batcher),
        lifecycle,
        capacities,
        Forks(sequence_memory, capacities, lifecycle),
        step_size,
    )
