"""A request: its specification, progress, memory and evictions, in token ids; and its group.

A group is the sequences of one prompt (parallel samples or beams), which are prefilled once and
forked:

    tokens      prompt ........ a b c d     member 0 is prefilled from the start
                                | └ x y     member 2 is forked after b and computes x y itself
                                └ k l m     member 1 is forked after the prompt

The first member is prefilled alone. Each other member starts as a fork of a member that has
computed their common tokens. So no token is computed twice, and a recomputation after a preemption
restores page sharing.
"""

import enum
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile
from typing import Any, Protocol, runtime_checkable

import numpy as np

from quire.config.generation_request import DEFAULT_TENANT
from quire.config.sampling_params import SamplingParams
from quire.errors import RequestError
from quire.kv.memory import KVMemory
from quire.kv.prefix import BlockChain, PrefixLease, PrefixNode
from quire.kv.swap import Swapped
from quire.layout.eviction import KEEP_ALL, PRESSURE, UNLIMITED, EvictionSpec
from quire.layout.sparse import SparseSpec
from quire.scheduler.eviction_trace import EvictionEntry
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.speculation import Drafts, SpeculativeSpec
from quire.tenancy.fair_queue import Order

CONTEXT, KV_MEMORY, TENANT = "context", "kv_memory", "tenant_kv_memory"
"""Limits of an output."""


@runtime_checkable
class TokenMatcher(Protocol):
    """The state of a sequence in the grammar of its structured outputs.

    `quire.sampling.grammar_matcher` implements it. It is a function of the output tokens.
    """

    error: str | None

    def fork(self) -> "TokenMatcher":
        """Return a matcher of the same grammar at its start."""

    def close(self) -> None:
        """Free the state of a sequence that has ended."""

    def mask(self, output_token_ids: Sequence[int]) -> Any:
        """Return the mask of the next token, packed into a numpy array of bytes."""

    def must_end(self, output_token_ids: Sequence[int]) -> bool:
        """Whether no further text matches."""


Division = tuple[EvictionSpec, object | None, bool, int]
"""The caps of a request's lanes, and from which tokens they were set: see `EvictionState`."""


class RequestState(enum.Enum):
    """State of a request."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """Immutable specification of a request, resolved for the model.

    Attributes:
        request_id: unique among the engine's requests.
        prompt_token_ids: the prompt; at least one token.
        params: resolved sampling options.
        sampling_seed: seed of its sampling: `params.seed`, or drawn once at submission.
        priority: lower values are scheduled first.
        deadline_s: deadline of the output on the engine's clock, in seconds; infinity for none.
        arrival: order of submission.
        arrival_s: time of submission on the engine's clock, in seconds.
        rope_variant: RoPE scaling variant (rotary frequencies) that it uses.
        pre_rope: whether its keys are stored before RoPE, in an engine whose other requests store
            them after it.
        tenant: the tenant that is charged.
        cache_salt: client's salt in the identity of its cached prefixes.
        evict: its eviction policy as text.
        sparse: pages that its decode steps read; None: all.
        speculative: how tokens are proposed that its steps verify; None: not at all.
        records_evictions: whether the eviction trace is requested.
        max_tokens_limit: why `params.max_tokens` is less than requested: `CONTEXT`, `KV_MEMORY` or
            `TENANT`; "": it is not.
        scoring_token_ids: the chunks of the scoring pass that its eviction rule needs.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    sampling_seed: int = 0
    priority: int = 0
    deadline_s: float = math.inf
    arrival: int = 0
    arrival_s: float = 0.0
    rope_variant: int = 0
    pre_rope: bool = False
    tenant: str = DEFAULT_TENANT
    cache_salt: str = ""
    evict: str = "full"
    sparse: SparseSpec | None = None
    speculative: SpeculativeSpec | None = None
    records_evictions: bool = False
    max_tokens_limit: str = ""
    scoring_token_ids: tuple[list[int], ...] = ()


@dataclass(slots=True, kw_only=True)
class RequestProgress:
    """Progress of a request. A run lasts from an admission to a preemption or the end.

    Attributes:
        state: waiting, running or finished.
        output_token_ids: the output so far.
        num_pending: further output tokens, which are sampled and not read from the device yet, and
            are inputs of a later step; see `Scheduler.plan_ahead`.
        num_computed: computed tokens of this run, evicted ones included.
        furthest_tokens: most computed tokens of any earlier run.
        again_until: tokens up to which outputs were sampled before their KV was dropped with wrong
            proposed tokens; nothing is evicted before their KV is as it was.
        recomputed_tokens: tokens computed that an earlier run had computed already.
        cached_tokens: prompt tokens whose KV was found in a prefix cache of any tier, without
            tokens that the request had computed itself before.
        charged_tokens, charged_cached_tokens: tokens charged to its tenant.
        num_admissions: number of admissions.
        admitted_tokens: its tokens at the last admission; it is not preempted again before it has
            computed another token.
        num_preemptions: number of preemptions.
        queued_s: time when it was queued last, on the engine's clock.
        first_token_s, finish_s: times of its first token and of its end, on the engine's clock.
    """

    state: RequestState = RequestState.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_pending: int = 0
    num_computed: int = 0
    furthest_tokens: int = 0
    again_until: int = 0
    recomputed_tokens: int = 0
    cached_tokens: int = 0
    charged_tokens: int = 0
    charged_cached_tokens: int = 0
    num_admissions: int = 0
    admitted_tokens: int = 0
    num_preemptions: int = 0
    queued_s: float = 0.0
    first_token_s: float = 0.0
    finish_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class RequestMemory:
    """Location of a request's KV.

    Attributes:
        row: its row of the KV memory while it runs, else -1.
        before_drafts: a fork of that row, from before the proposed tokens of a step; else -1.
        statistics: names of the lane groups that hold statistics of its tokens.
        lease: the cached prefix that it shares and extends, while it runs.
        chain: block hashes of its prefix, while it waits, after its first lookup.
        snapshot_ends: token counts after which statistics of its prompt are saved in the cache.
        checkpoint: block after which its recurrent states were last saved while it decoded.
        swapped: its KV in the swap space, while it waits.
        kv_peak_bytes: most KV bytes that it referred to, over all its runs.
    """

    row: int = -1
    before_drafts: int = -1
    statistics: frozenset[str] = frozenset()
    lease: PrefixLease | None = None
    chain: BlockChain | None = None
    snapshot_ends: tuple[int, ...] = ()
    checkpoint: PrefixNode | None = None
    swapped: Swapped | None = None
    kv_peak_bytes: int = 0

    @property
    def is_swapped_whole(self) -> bool:
        """Whether all its KV is in the swap space."""
        return self.swapped is not None and not self.swapped.keep_from

    @property
    def head_tokens(self) -> int | None:
        """Tokens to recompute before its swapped tail is appended; None without a tail."""
        return None if self.swapped is None else self.swapped.keep_from or None


@dataclass(slots=True, kw_only=True)
class RequestEviction:
    """Evictions of a request.

    Attributes:
        spec: how many tokens are retained, and when evictions happen; resolved for its prompt.
        selection: the policy that selects tokens, a `quire.policies.eviction.Eviction`; not used by
            the scheduler.
        pending: whether the caps of its lanes are still to be set, until its prompt is computed.
        divided_tokens: number of computed tokens when the caps of its lanes were set last.
        trace: the evictions of all its runs; a recomputation replays them.
        replayed: number of trace entries that were replayed or recorded in this run.
        num_evictions: number of evictions, without replays.
        evicted_tokens: number of evicted tokens, mean over its lanes.
        exact: whether no token was evicted in this run.
        free_until: number of computed tokens below which no lane reaches its cap in this run.
    """

    spec: EvictionSpec = KEEP_ALL
    selection: object | None = None
    pending: bool = False
    divided_tokens: int = 0
    trace: list[EvictionEntry] = field(default_factory=list)
    replayed: int = 0
    num_evictions: int = 0
    evicted_tokens: float = 0.0
    exact: bool = True
    free_until: int = 0

    @property
    def division(self) -> Division:
        """The caps of its lanes, and from which tokens they were set."""
        return self.spec, self.selection, self.pending, self.divided_tokens

    @division.setter
    def division(self, found: Division) -> None:
        self.spec, self.selection, self.pending, self.divided_tokens = found

    @property
    def next_replay(self) -> EvictionEntry | None:
        """The next eviction to replay; None if none is left."""
        return self.trace[self.replayed] if self.replayed < len(self.trace) else None


# ---- requests and groups -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlannedFork:
    """A group member without KV that will be forked from another member.

    Attributes:
        child, parent: members of one group.
        tokens: number of their common tokens; the parent computes no further before the fork.
    """

    child: "Request"
    parent: "Request"
    tokens: int


@dataclass(slots=True, eq=False)
class RequestGroup:
    """Sequences of one prompt (parallel samples or beams), which share pages.

    A group is queued, admitted and preempted as a whole.

    Attributes:
        request_id: id of the submitted request.
        atomic: whether all members must decode in the same step, as beams do.
        members: the active sequences, in the order of the choices.
        spare: inactive sequences for later beams; their rows are reserved.
        forks: forks that are planned for members without KV.
        kv_peak_bytes: most bytes of distinct pages that its members referred to.
    """

    request_id: str
    atomic: bool = False
    members: "list[Request]" = field(default_factory=list)
    spare: "list[Request]" = field(default_factory=list)
    forks: list[PlannedFork] = field(default_factory=list)
    kv_peak_bytes: int = 0

    @property
    def num_rows(self) -> int:
        """Maximum number of rows that it holds."""
        return len(self.members) + len(self.spare)


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. Only the scheduler and the engine change it.

    Attributes:
        spec: the specification; frequently used fields are also properties of the request.
        progress: state and token counts.
        memory: location of its KV.
        eviction: its evictions.
        group: its group; None for a single sequence.
        split_from: the group that it was split off; used only for the group's peak bytes.
        matcher: its state in the grammar of its structured outputs; None without one. Not used by
            the scheduler.
        drafts: its proposed tokens; None before the first, and without speculative decoding.
    """

    spec: RequestSpec
    progress: RequestProgress = field(default_factory=RequestProgress)
    memory: RequestMemory = field(default_factory=RequestMemory)
    eviction: RequestEviction = field(default_factory=RequestEviction)
    group: RequestGroup | None = None
    split_from: RequestGroup | None = None
    matcher: TokenMatcher | None = None
    drafts: Drafts | None = None

    # ---- specification -------------------------------------------------------------------------

    @property
    def request_id(self) -> str:
        return self.spec.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.spec.prompt_token_ids

    @property
    def params(self) -> SamplingParams:
        return self.spec.params

    @property
    def priority(self) -> int:
        return self.spec.priority

    @property
    def deadline_s(self) -> float:
        return self.spec.deadline_s

    @property
    def tenant(self) -> str:
        return self.spec.tenant

    @property
    def sampling_seed(self) -> int:
        return self.spec.sampling_seed

    @property
    def order(self) -> Order:
        """Sort key of the queue: priority, deadline, arrival; lowest first."""
        return self.spec.priority, self.spec.deadline_s, self.spec.arrival

    @property
    def is_running(self) -> bool:
        """Whether it is in state RUNNING, so that it holds KV."""
        return self.progress.state is RequestState.RUNNING

    # ---- tokens --------------------------------------------------------------------------------

    @property
    def output_token_ids(self) -> list[int]:
        return self.progress.output_token_ids

    def count_cached(self, first: int, end: int) -> None:
        """Count the tokens from `first` up to `end`, whose KV was found in a prefix cache.

        Tokens of earlier runs do not count again: they were computed or counted then.
        """
        end = min(end, len(self.prompt_token_ids))
        self.progress.cached_tokens += max(0, end - max(first, self.progress.furthest_tokens))

    @property
    def num_tokens(self) -> int:
        """Number of tokens: prompt and output so far, pending tokens included."""
        return len(self.prompt_token_ids) + self.num_output_tokens

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens so far, pending ones included."""
        return len(self.progress.output_token_ids) + self.progress.num_pending

    @property
    def num_uncomputed(self) -> int:
        """Number of tokens whose KV is not computed; 1 in decoding."""
        return self.num_tokens - self.progress.num_computed

    @property
    def scores_prompt(self) -> bool:
        """Whether prompt log-probabilities are requested and its prompt is not computed yet."""
        wanted = self.params.prompt_logprobs is not None
        return wanted and self.progress.num_computed < len(self.prompt_token_ids)

    @property
    def computes_whole_prompt(self) -> bool:
        """Whether every token of its prompt must be computed, so that no cached prefix is used."""
        return self.scores_prompt or self.params.pooling == "mean"

    @property
    def final_tokens(self) -> int:
        """Maximum number of tokens whose KV is computed: all but the last output token."""
        return len(self.prompt_token_ids) + max(0, self.params.max_tokens - 1)

    @property
    def exact_tokens(self) -> int:
        """Tokens computed by attention to all tokens before them; these it can share.

        Sparse attention computes the output tokens only.
        """
        exact = self.eviction.spec.exact_tokens(len(self.prompt_token_ids))
        if self.eviction.pending or self.spec.sparse is not None:
            exact = min(exact, len(self.prompt_token_ids))
        return min(exact, self.eviction.trace[0].num_computed) if self.eviction.trace else exact

    @property
    def draft_token_ids(self) -> list[int]:
        """The proposed tokens after the output that the current step verifies."""
        return [] if self.drafts is None else self.drafts.token_ids

    def token_ids(self, start: int, end: int) -> list[int]:
        """Return the known tokens from position `start` up to `end`, without pending ones.

        Proposed tokens follow the output.
        """
        prompt = len(self.prompt_token_ids)
        if end > self.num_tokens:
            return (
                self.token_ids(start, self.num_tokens)
                + self.draft_token_ids[max(0, start - self.num_tokens) : end - self.num_tokens]
            )
        if start >= prompt:
            return self.output_token_ids[start - prompt : end - prompt]
        ids = self.prompt_token_ids[start:end]
        return ids + self.output_token_ids[: end - prompt] if end > prompt else ids


# ---- members of a group --------------------------------------------------------------------------


def refuse_beams(request: Request, config: ScheduleConfig) -> None:
    """Refuse a beam search whose beams can never decode in one step.

    Raises:
        RequestError: states the number of beams and the option that limits them.
    """
    if request.group is None or not request.group.atomic:
        return
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if num_rows(request) > getattr(config, name):
            raise RequestError(
                f"expected at most {name}={getattr(config, name)} beams, got {num_rows(request)}: "
                f"use fewer beams or raise --{name.replace('_', '-')}",
                param="beam_width",
            )


def dissolve(request: Request) -> list[Request]:
    """Split a group that cannot run as a whole into single requests; return them.

    Beams stay a group, because they must decode in the same step.
    """
    sequences, group = together(request), request.group
    if group is None or group.atomic:
        return [request]
    for sequence in sequences:
        sequence.group, sequence.split_from = None, group
    return sequences


def num_rows(request: Request) -> int:
    """Number of rows of a request, or of its whole group."""
    return 1 if request.group is None else request.group.num_rows


def may_evict(request: Request) -> bool:
    """Whether tokens of a request may be evicted now.

    Sequences of a group do not evict under pressure: they share the pages of their prompt, and the
    last one may have pages in offload memory that only full KV can have there.
    """
    spec = request.eviction.spec
    return spec.cap is not None and (spec.when != PRESSURE or request.group is None)


def reserved_rows(running: Iterable[Request]) -> int:
    """Rows that running groups will take but have not taken yet."""
    groups = {id(r.group): r.group for r in running if r.group is not None}.values()
    return sum(len(group.spare) + sum(not m.is_running for m in group.members) for group in groups)


def together(request: Request) -> list[Request]:
    """Return the request with all members of its group: they are preempted together."""
    return [request] if request.group is None else list(request.group.members)


def copies_to_come(requests: Iterable[Request]) -> list[Request]:
    """Return the members that are planned as forks in the groups of these requests."""
    groups = {id(r.group): r.group for r in requests if r.group is not None}.values()
    return [planned.child for group in groups for planned in group.forks]


def have_moved_on(request: Request) -> bool:
    """Whether a request and its group are new, or computed tokens since their last admission."""
    return all(
        member.progress.num_admissions <= 1
        or (member.is_running and member.num_tokens > member.progress.admitted_tokens)
        for member in together(request)
    )


def same_group(one: Request, other: Request) -> bool:
    """Whether two requests are of one group, so that neither is preempted for the other."""
    return one.group is not None and one.group is other.group


def plan_prefill(request: Request) -> Request:
    """Plan which member of a group is prefilled first, and where the others are forked; return it.

    Members share tokens only up to the first eviction that differs between them: after it, their
    retained tokens and their chunks differ.

    Args:
        request: any member, or a request without a group, which is returned itself.
    """
    group = request.group
    if group is None:
        return request
    ordered = sorted(group.members, key=lambda member: member.output_token_ids)
    origin: dict[int, PlannedFork] = {}
    for parent, child in pairwise(ordered):
        pairs = zip(parent.output_token_ids, child.output_token_ids, strict=False)
        equal = takewhile(lambda pair: pair[0] == pair[1], pairs)
        tokens = len(parent.prompt_token_ids) + sum(1 for _ in equal)
        if tokens < child.num_tokens:
            tokens = min(tokens, _equal_eviction_tokens(parent, child))
        while id(parent) in origin and origin[id(parent)].tokens >= tokens:
            parent = origin[id(parent)].parent  # an earlier member has computed these tokens too
        origin[id(child)] = PlannedFork(child, parent, tokens)
    group.forks = list(origin.values())
    return ordered[0]


def _equal_eviction_tokens(one: Request, other: Request) -> int:
    """Tokens up to which two members have evicted the same tokens."""
    pairs = zip(one.eviction.trace, other.eviction.trace, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], pairs))
    if not same:
        return min(one.exact_tokens, other.exact_tokens)
    own = [entry.num_computed for r in (one, other) for entry in r.eviction.trace[same : same + 1]]
    last = one.eviction.trace[same - 1].num_computed + 1  # one token computed after the eviction
    return max(last, min(own, default=UNLIMITED if one.eviction.spec.when == PRESSURE else last))


def prefillable_tokens(request: Request) -> int:
    """Tokens that a request may compute in one chunk: up to its next fork.

    The last token of a beam is computed in the step in which all beams decode.
    """
    group, tokens = request.group, request.num_uncomputed
    if group is None:
        return tokens
    if group.atomic and len(group.members) > 1:
        tokens -= 1
    stops = (f.tokens - request.progress.num_computed for f in group.forks if f.parent is request)
    return min(tokens, min(stops, default=tokens))


def whole_groups(decoding: list[Request]) -> list[Request]:
    """Remove members of atomic groups whose members are not all in the list."""
    present: dict[int, int] = {}
    for request in decoding:
        if request.group is not None and request.group.atomic:
            present[id(request.group)] = present.get(id(request.group), 0) + 1
    if not present:
        return decoding
    return [
        r
        for r in decoding
        if r.group is None or not r.group.atomic or present[id(r.group)] == len(r.group.members)
    ]


def due_forks(request: Request) -> list[PlannedFork]:
    """Remove and return the planned forks for which a request has computed enough tokens."""
    group = request.group
    if group is None or not group.forks:
        return []
    due = [
        f for f in group.forks if f.parent is request and f.tokens <= request.progress.num_computed
    ]
    for planned in due:
        group.forks.remove(planned)
    return due


def not_continued(group: RequestGroup, parents: Sequence[int]) -> list[Request]:
    """Members that no new member continues; see `branch`."""
    return [member for i, member in enumerate(group.members) if i not in parents]


def branch(
    group: RequestGroup, parents: Sequence[int], copy: Callable[[Request, Request], None]
) -> None:
    """Replace the members of a group: new member i continues old member `parents[i]`.

    The first new member that continues an old one takes its row; further ones are forks. An old
    member without continuation becomes spare; its KV must have been freed before.

    Args:
        group: a group of running members.
        parents: for each new member, the index of the member that it continues.
        copy: called with (parent, child); forks the KV of the parent for a member without KV.
    """
    old = group.members
    spare = group.spare + not_continued(group, parents)
    group.members, seen = [], set()
    for number in parents:
        member = old[number]
        if number in seen:
            member = spare.pop()
            copy(old[number], member)
            member.progress.output_token_ids = list(old[number].output_token_ids)
            member.progress.num_preemptions = old[number].progress.num_preemptions
        seen.add(number)
        group.members.append(member)
    group.spare = spare


def leave(request: Request) -> bool:
    """Remove an ended request from its group; return whether forks were planned from it.

    If so, the prefill of the others must be planned again.
    """
    group = request.group
    if group is None or request not in group.members:
        return False
    group.members.remove(request)
    group.forks = [f for f in group.forks if f.child is not request]
    return any(f.parent is request for f in group.forks)


def note_peak(memory: KVMemory, group: RequestGroup) -> None:
    """Update the peak bytes of a group; call before any of its rows frees pages."""
    held = bytes_of([member for member in group.members if member.memory.row >= 0], memory)
    group.kv_peak_bytes = max(group.kv_peak_bytes, held)


def bytes_of(requests: Sequence[Request], memory: KVMemory) -> int:
    """Bytes of all pages of running requests; a shared page counts once."""
    return distinct_bytes(memory, [request.memory.row for request in requests])


def distinct_bytes(memory: KVMemory, rows: Sequence[int], *, staging: bool = True) -> int:
    """Bytes of all pages that any of these rows refers to, each counted once.

    Args:
        memory: the KV memory.
        rows: rows in use.
        staging: whether staging pages of offloaded KV count.
    """
    total, index = 0, np.asarray(rows, dtype=np.int64)
    for table in memory.tables.values():
        pages = table.pages[index]
        counted = pages >= 0
        if not staging:
            counted &= np.arange(table.capacity) >= table.staged[index][:, None, None]
        total += len(np.unique(pages[counted])) * table.group.page_class.page_bytes
    return total


def sequence_id(request_id: str, index: int) -> str:
    """The id of one of the sequences of a request; the first has the request's own."""
    return f"{request_id}#{index}" if index else request_id


def make_sequences(request: Request) -> list[Request]:
    """Create the sequences of a request (n, best_of or beams); the request is the first.

    Sequence i samples with the request's seed + i, so the first samples as it would alone. Prompt
    log-probabilities are computed for the first only. In a beam search only the first is a member
    of the group at the start; the others are spare.
    """
    params = request.params
    if params.num_sequences == 1 and not params.use_beam_search:
        return [request]
    group = RequestGroup(request.request_id, atomic=params.use_beam_search)
    request.group = group
    sequences = [_sibling(request, index) for index in range(params.num_sequences)]
    last = 1 if group.atomic else len(sequences)
    group.members, group.spare = sequences[:last], sequences[last:]
    return sequences


def _sibling(request: Request, index: int) -> Request:
    params = request.params
    scored = not index or not params.max_tokens  # required if no tokens are generated
    spec = replace(
        request.spec,
        request_id=sequence_id(request.request_id, index),
        sampling_seed=request.sampling_seed + index,
        arrival=request.spec.arrival + index,
        params=replace(
            params,
            seed=None,  # it would take precedence over `sampling_seed`
            prompt_logprobs=params.prompt_logprobs if scored else None,
            logprobs=0 if params.ranked and params.logprobs is None else params.logprobs,
        ),
    )
    return Request(
        spec,
        memory=replace(request.memory),
        eviction=replace(request.eviction, trace=[]),
        group=request.group,
        matcher=None if request.matcher is None else request.matcher.fork(),
    )
