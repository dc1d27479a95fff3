"""The parts of a request: what was asked, how far it has come, where its KV is, what is evicted."""

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


class RequestState(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """What was requested, resolved for the model. It does not change.

    Attributes:
        request_id: unique among the engine's requests.
        prompt_token_ids: at least one.
        params: resolved sampling options.
        sampling_seed: seed of its draws; `params.seed`, or drawn once at submit.
        priority: lower goes first.
        deadline_s: clock reading by which the output is wanted; infinity without a deadline.
        arrival: order of submission.
        arrival_s: clock reading of the submission.
        rope_variant: which rotary frequencies it uses.
        tenant: on whose account it runs.
        cache_salt: what its caller adds to the identity of its cached prefixes.
        evict: its eviction policy as text.
        records_evictions: whether its caller wants the eviction trace.
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
    tenant: str = DEFAULT_TENANT
    cache_salt: str = ""
    evict: str = "full"
    records_evictions: bool = False


@dataclass(slots=True, kw_only=True)
class RequestProgress:
    """How far a request has come.

    Attributes:
        state: waiting, running or finished.
        output_token_ids: the output so far.
        num_computed: tokens whose KV has been computed in this run (logical).
        furthest_tokens: most tokens whose KV was computed in any earlier run.
        cached_tokens: tokens of its prompt whose KV came from a prefix cache, in memory or outside,
            before the request had computed them itself.
        charged_tokens, charged_cached_tokens: tokens its tenant has been charged for.
        num_admissions: times it was admitted.
        admitted_tokens: tokens it had at its last admission; it computes more before it can be
            preempted again.
        num_preemptions: times it was preempted.
        queued_s: clock reading when it began to wait.
        first_token_s, finish_s: clock readings.
    """

    state: RequestState = RequestState.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    furthest_tokens: int = 0
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
    """Where the KV of a request is.

    Attributes:
        row: its row of the KV memory while it runs; -1 while it does not.
        statistics: names of the lane groups that hold statistics of its tokens.
        lease: the cached prefix it uses and adds to, while it runs.
        chain: block hashes of its prefix, while it waits and has been looked up.
        snapshot_ends: tokens behind which statistics of its prompt are kept for other requests.
        swapped: its KV in the swap space, while it waits with it.
        may_offload: whether its oldest pages may be offloaded while it runs; False once they could
            not return for an eviction.
        kv_peak_bytes: most KV bytes it referred to, over all its runs.
    """

    row: int = -1
    statistics: frozenset[str] = frozenset()
    lease: PrefixLease | None = None
    chain: BlockChain | None = None
    snapshot_ends: tuple[int, ...] = ()
    swapped: Swapped | None = None
    may_offload: bool = True
    kv_peak_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class RequestEviction:
    """Which tokens of a request are evicted, and which have been.

    Attributes:
        spec: how many of its tokens are retained, and when; resolved for its prompt.
        selection: chooses them, a `quire.policies.eviction.Eviction`; the scheduler never reads it.
        pending: the caps of its lanes are divided when its prompt has been computed.
        trace: what has been evicted over all its runs; a recomputation evicts the same again.
        replayed: entries of the trace that have been carried out in this run.
        num_evictions: evictions, those of a recomputation not counted.
        evicted_tokens: evicted tokens, the mean over its lanes.
        exact: whether no token of its KV has been evicted in this run.
    """

    spec: EvictionSpec = KEEP_ALL
    selection: object | None = None
    pending: bool = False
    trace: list[EvictionEntry] = field(default_factory=list)
    replayed: int = 0
    num_evictions: int = 0
    evicted_tokens: float = 0.0
    exact: bool = True

    @property
    def next_replay(self) -> EvictionEntry | None:
        """The eviction to be repeated next; None where none is left."""
        return self.trace[self.replayed] if self.replayed < len(self.trace) else None
