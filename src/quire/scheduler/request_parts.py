"""The parts of a request: specification, progress, memory, evictions."""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from quire.config.generation_request import DEFAULT_TENANT
from quire.config.sampling_params import SamplingParams
from quire.kv.prefix_blocks import PrefixLease
from quire.kv.prefix_key import BlockChain
from quire.kv.stored_sequences import Swapped
from quire.layout.eviction import KEEP_ALL, EvictionSpec
from quire.scheduler.eviction_trace import EvictionEntry


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


class RequestState(enum.Enum):
    """State of a request."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


CONTEXT, KV_MEMORY, TENANT = "context", "kv_memory", "tenant_kv_memory"
"""Limits of an output."""


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
        records_evictions: whether the eviction trace is requested.
        max_tokens_limit: why `params.max_tokens` is less than requested: `CONTEXT`, `KV_MEMORY` or
            `TENANT`; "": it is not.
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
    records_evictions: bool = False
    max_tokens_limit: str = ""


@dataclass(slots=True, kw_only=True)
class RequestProgress:
    """Progress of a request. A run lasts from an admission to a preemption or the end.

    Attributes:
        state: waiting, running or finished.
        output_token_ids: the output so far.
        num_pending: further output tokens, which are sampled and not read from the device yet, and
            are inputs of a later step; see `quire.scheduler.ahead`.
        num_computed: computed tokens of this run, evicted ones included.
        furthest_tokens: most computed tokens of any earlier run.
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
        statistics: names of the lane groups that hold statistics of its tokens.
        lease: the cached prefix that it shares and extends, while it runs.
        chain: block hashes of its prefix, while it waits, after its first lookup.
        snapshot_ends: token counts after which statistics of its prompt are saved in the cache.
        swapped: its KV in the swap space, while it waits.
        may_offload: whether its oldest pages may be offloaded; False after they could not be loaded
            back for an eviction.
        may_offload_replays: whether they may then be offloaded until its recorded evictions are
            replayed; False after they could not be loaded back for one of these.
        kv_peak_bytes: most KV bytes that it referred to, over all its runs.
    """

    row: int = -1
    statistics: frozenset[str] = frozenset()
    lease: PrefixLease | None = None
    chain: BlockChain | None = None
    snapshot_ends: tuple[int, ...] = ()
    swapped: Swapped | None = None
    may_offload: bool = True
    may_offload_replays: bool = True
    kv_peak_bytes: int = 0


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

    @property
    def division(self) -> tuple[EvictionSpec, object | None, bool, int]:
        """The caps of its lanes, and from which tokens they were set."""
        return self.spec, self.selection, self.pending, self.divided_tokens

    @division.setter
    def division(self, found: tuple[EvictionSpec, object | None, bool, int]) -> None:
        self.spec, self.selection, self.pending, self.divided_tokens = found

    @property
    def next_replay(self) -> EvictionEntry | None:
        """The next eviction to replay; None if none is left."""
        return self.trace[self.replayed] if self.replayed < len(self.trace) else None
