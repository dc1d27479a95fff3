"""A request: what was asked, what has been answered, where it stands. Ids only, no text."""

import enum
import math
from dataclasses import dataclass, field

from quire.config.generation_request import DEFAULT_TENANT
from quire.config.sampling_params import SamplingParams
from quire.kv.prefix_blocks import PrefixLease
from quire.kv.prefix_key import BlockChain
from quire.kv.stored_sequences import Swapped
from quire.layout.eviction import KEEP_ALL, EvictionSpec
from quire.scheduler.eviction_trace import EvictionEntry
from quire.tenancy.fair_queue import Order


class RequestState(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class PlannedFork:
    """A member without KV that will begin as a copy of another one.

    Attributes:
        child, parent: of one group.
        tokens: tokens both have in common; the parent stops there until it has been copied.
    """

    child: "Request"
    parent: "Request"
    tokens: int


@dataclass(slots=True, eq=False)
class RequestGroup:
    """Sequences that answer one prompt and share what they have in common.

    It waits, enters and gives way as one; `quire.scheduler.group` has the rules.

    Attributes:
        request_id: what the whole was submitted as.
        atomic: whether its members decode in the same step or not at all, as beams must.
        members: the sequences that go on, in the order of their choices.
        spare: sequences that do not, or not yet, and have a place kept: beams to come.
        forks: members that have no KV yet while others are being read.
        kv_peak_bytes: most bytes of distinct pages its members referred to.
    """

    request_id: str
    atomic: bool = False
    members: "list[Request]" = field(default_factory=list)
    spare: "list[Request]" = field(default_factory=list)
    forks: list[PlannedFork] = field(default_factory=list)
    kv_peak_bytes: int = 0

    @property
    def num_rows(self) -> int:
        """Rows it holds at most."""
        return len(self.members) + len(self.spare)


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to be continued. Changed by the scheduler and the engine only.

    Attributes:
        request_id: unique among the engine's requests.
        prompt_token_ids: at least one.
        params: resolved sampling options.
        sampling_seed: what its draws are made from; `params.seed` or drawn once at submit.
        priority: lower goes first.
        deadline_s: clock reading by which its answer is wanted; infinity where it does not matter.
        arrival: order of submission.
        rope_variant: which rotary frequencies it uses, for all its life.
        tenant: on whose account it runs.
        cache_salt: what its caller adds to the identity of its cached prefixes.
        evict: what its eviction policy was written as.
        eviction: what that comes to for it, in numbers.
        group: the sequences it was forked with; None for one alone.
        apart: the sequences that answer the same prompt, where each runs alone; only the most
            bytes of all are kept there.
        output_token_ids: the answer so far.
        row: its row of the KV memory while it runs.
        num_computed: tokens whose KV has been computed in this run (logical).
        cached_tokens: tokens of its prompt whose KV came from a prefix cache, in memory or outside,
            before the request had computed them itself.
        charged_cached_tokens: of these its tenant has been charged for.
        furthest_tokens: most that had KV in any of its earlier runs.
        evict: the eviction policy as text.
        eviction: how many of its tokens stay, and when; resolved for its prompt.
        selection: what chooses them, a `quire.policies.eviction.Eviction`; who plans never looks.
        pending: caps of its lanes are divided when its prompt has been read.
        statistics: names of the lane groups in which things about its tokens are remembered.
        trace: what has left it so far, over all its runs; read again, the same leaves again.
        replayed: entries of the trace that have been carried out in this run.
        records_evictions: whether its caller wants the trace.
        num_evictions: times tokens left, those of a repeated run not counted.
        evicted_tokens: tokens that left, the mean over its lanes.
        exact: whether no token of its KV has been evicted in this run.
        swapped: its KV outside the arena, while it waits with it.
        streams: whether its first pages may be on the host while it runs, in engines that have room
            for them there; not once they could not return for an eviction.
        snapshot_ends: tokens behind which what is remembered of its prompt is kept for others.
        lease: the cached prefix it uses and adds to, while it runs.
        chain: what its prefix is looked up by, while it waits and has been looked up.
        entries: times it has entered the KV memory.
        entered_tokens: tokens it had when it last did; it moves on before it gives way again.
        charged_tokens: tokens its tenant has been charged for.
        queued_s: clock reading when it began to wait.
        preemptions: times it was thrown out and begun again.
        kv_peak_bytes: most KV bytes it referred to, over all its runs.
        arrival_s, first_token_s, finish_s: clock readings, seconds.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    sampling_seed: int = 0
    priority: int = 0
    deadline_s: float = math.inf
    arrival: int = 0
    rope_variant: int = 0
    tenant: str = DEFAULT_TENANT
    cache_salt: str = ""
    evict: str = "full"
    eviction: EvictionSpec = KEEP_ALL
    selection: object | None = None
    pending: bool = False
    statistics: frozenset[str] = frozenset()
    records_evictions: bool = False
    group: RequestGroup | None = None
    apart: RequestGroup | None = None
    output_token_ids: list[int] = field(default_factory=list)
    trace: list[EvictionEntry] = field(default_factory=list)
    replayed: int = 0
    num_evictions: int = 0
    evicted_tokens: float = 0.0
    state: RequestState = RequestState.WAITING
    row: int = -1
    num_computed: int = 0
    cached_tokens: int = 0
    charged_cached_tokens: int = 0
    furthest_tokens: int = 0
    exact: bool = True
    swapped: Swapped | None = None
    streams: bool = True
    snapshot_ends: tuple[int, ...] = ()
    lease: PrefixLease | None = None
    chain: BlockChain | None = None
    entries: int = 0
    entered_tokens: int = 0
    charged_tokens: int = 0
    queued_s: float = 0.0
    preemptions: int = 0
    kv_peak_bytes: int = 0
    arrival_s: float = 0.0
    first_token_s: float = 0.0
    finish_s: float = 0.0

    def count_cached(self, first: int, end: int) -> None:
        """Count tokens from `first` up to `end`, whose KV has come from a prefix cache.

        Tokens of earlier runs do not count: the request has computed or counted them already.
        """
        end = min(end, len(self.prompt_token_ids))
        self.cached_tokens += max(0, end - max(first, self.furthest_tokens))

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and answer so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose KV is missing; 1 while decoding."""
        return self.num_tokens - self.num_computed

    @property
    def scores_prompt(self) -> bool:
        """Whether it wants its prompt scored and has not read all of it."""
        wanted = self.params.prompt_logprobs is not None
        return wanted and self.num_computed < len(self.prompt_token_ids)

    @property
    def final_tokens(self) -> int:
        """Tokens whose KV it can come to need: the last one generated is never processed."""
        return len(self.prompt_token_ids) + max(0, self.params.max_tokens - 1)

    @property
    def exact_tokens(self) -> int:
        """Tokens it holds before the first of them leaves: so far it can be as any other is."""
        exact = self.eviction.exact_tokens(len(self.prompt_token_ids))
        if self.pending:
            exact = min(exact, len(self.prompt_token_ids))
        return min(exact, self.trace[0].num_computed) if self.trace else exact

    @property
    def next_replay(self) -> EvictionEntry | None:
        """The eviction to be repeated next; None where none is left."""
        return self.trace[self.replayed] if self.replayed < len(self.trace) else None

    @property
    def order(self) -> Order:
        """Who goes first: priority, then the earliest deadline, then arrival."""
        return self.priority, self.deadline_s, self.arrival

    def token_ids(self, start: int, end: int) -> list[int]:
        """Known tokens by logical position."""
        prompt = len(self.prompt_token_ids)
        if start >= prompt:
            return self.output_token_ids[start - prompt : end - prompt]
        ids = self.prompt_token_ids[start:end]
        return ids + self.output_token_ids[: end - prompt] if end > prompt else ids
