"""Statistics of an engine: memory use and counters."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from quire.engine.async_steps import AsyncStats
from quire.engine.decode_graphs import GraphStats
from quire.engine.pool import KVPool
from quire.kv.memory import KVMemory
from quire.models.loader import LoadedModel
from quire.offload.prefix_store.prefix_tier import TierStats
from quire.scheduler.fairness import TenantStats
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.step import StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBytes:
    """KV memory of one running request."""

    request_id: str
    tokens: int  # computed so far
    kv_bytes: int  # of all pages in its page table


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantBytes:
    """KV memory of the requests of one tenant."""

    tenant: str
    num_requests: int  # running and waiting
    kv_bytes: int  # each request counts shared pages in full


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Statistics of an engine; counters count from its start.

    Attributes:
        kv_total_bytes: size of the arena; always used + free.
        kv_used_bytes: bytes of pages in use, including the waste at slab boundaries.
        kv_peak_bytes: peak bytes of pages in use, without cached prefixes.
        scratch_peak_bytes: peak bytes of gathered KV, outside the arena.
        weight_bytes: parameters and buffers on the device, including slots for prefetched layers.
        host_weight_bytes: weights of offloaded layers in CPU memory; 0 without weight offload.
        offloaded_weight_bytes: weight bytes transferred to the device.
        num_running, num_waiting: requests with and without KV.
        num_evictions: evictions of tokens, without those repeated by a recompute.
        evicted_tokens: evicted tokens; for each request the mean over its lanes.
        num_processed_tokens: tokens run through the model, including recomputed tokens.
        times: time per phase of the steps.
        requests: KV memory of each running request.
        tenants: KV memory of each tenant.
        cached_bytes: cached pages that no request uses; in use, but evicted when pages run out.
        checkpoint_bytes: recurrent states and statistics stored with cached prefixes, those that
            a request is about to start from included; evicted when pages run out.
        host_bytes: KV of preempted requests in the swap space.
        offloaded_bytes: KV of running requests offloaded to CPU memory.
        activation_bytes: activation checkpoints in CPU memory, to recompute offloaded KV from.
        recomputed_tokens, cpu_attended_tokens: offloaded tokens whose KV was recomputed, and
            offloaded tokens attended to on the CPU; each layer counts separately.
        sparse_pages_read, sparse_pages_held: pages of KV heads that decode steps of requests with
            sparse attention have read, and those that dense attention would have read.
        sparse_pages_fetched, sparse_page_hits: such pages of offloaded KV that were fetched, and
            those that were still on the device.
        num_drafts, draft_tokens, accepted_draft_tokens: proposals of speculative decoding that
            steps have verified, their tokens, and those of them that were sampled.
        num_swaps: sequences swapped out, including partial swaps.
        queried_tokens, cached_tokens: tokens of admitted requests looked up in the prefix cache,
            and those found there.
        served: work done for each tenant.
        tier: statistics of the disk or network tier; None without one.
        graphs: counters of CUDA graphs; None if the engine runs without.
        async_scheduling: counters of asynchronous scheduling; None if the engine runs without.
        model_impl, model_impl_reason: implementation of the model's layers (native or
            transformers), and why it was selected; "" if the model was built in memory.
    """

    kv_total_bytes: int
    kv_used_bytes: int
    kv_free_bytes: int
    kv_peak_bytes: int
    scratch_peak_bytes: int
    weight_bytes: int
    host_weight_bytes: int
    offloaded_weight_bytes: int
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_evictions: int
    evicted_tokens: int
    num_steps: int
    num_processed_tokens: int
    num_generated_tokens: int
    times: StepTimes
    requests: tuple[RequestBytes, ...]
    tenants: tuple[TenantBytes, ...]
    cached_bytes: int
    checkpoint_bytes: int
    host_bytes: int
    offloaded_bytes: int
    activation_bytes: int
    recomputed_tokens: int
    cpu_attended_tokens: int
    sparse_pages_read: int
    sparse_pages_held: int
    sparse_pages_fetched: int
    sparse_page_hits: int
    num_drafts: int
    draft_tokens: int
    accepted_draft_tokens: int
    num_swaps: int
    queried_tokens: int
    cached_tokens: int
    served: tuple[TenantStats, ...]
    tier: TierStats | None = None
    graphs: GraphStats | None = None
    async_scheduling: AsyncStats | None = None
    model_impl: str = ""
    model_impl_reason: str = ""

    @property
    def kv_held_bytes(self) -> int:
        """Bytes in use without cached prefixes that no request uses."""
        return self.kv_used_bytes - self.cached_bytes

    def as_dict(self) -> dict[str, object]:
        """Plain numbers and lists, ready for JSON."""
        return asdict(self)


NO_OFFLOAD = {
    "offloaded_bytes": 0,
    "activation_bytes": 0,
    "recomputed_tokens": 0,
    "cpu_attended_tokens": 0,
    "sparse_pages_fetched": 0,
    "sparse_page_hits": 0,
}


def request_bytes(requests: Iterable[Request], memory: KVMemory) -> tuple[RequestBytes, ...]:
    """KV memory of each running request."""
    return tuple(
        RequestBytes(
            request_id=r.request_id,
            tokens=r.progress.num_computed,
            kv_bytes=memory.row_bytes(r.memory.row),
        )
        for r in requests
    )


def tenant_bytes(
    requests: Iterable[Request], held: Iterable[RequestBytes]
) -> tuple[TenantBytes, ...]:
    """KV memory of each tenant's running and waiting requests."""
    of_request = {found.request_id: found.kv_bytes for found in held}
    num_requests: Counter[str] = Counter()
    kv_bytes: Counter[str] = Counter()
    for r in requests:
        num_requests[r.tenant] += 1
        kv_bytes[r.tenant] += of_request.get(r.request_id, 0)
    return tuple(
        TenantBytes(tenant=tenant, num_requests=count, kv_bytes=kv_bytes[tenant])
        for tenant, count in sorted(num_requests.items())
    )


def memory_numbers(memory: KVMemory, model: LoadedModel) -> dict[str, int]:
    """Sizes of KV memory and weights, with the names of `EngineStats`."""
    weights = model.weights
    return {
        "weight_bytes": model.weight_bytes,
        "host_weight_bytes": 0 if weights is None else weights.place.host_bytes,
        "offloaded_weight_bytes": 0 if weights is None else weights.num_bytes,
        "kv_total_bytes": memory.total_bytes,
        "kv_used_bytes": memory.used_bytes,
        "kv_free_bytes": memory.free_bytes,
        "kv_peak_bytes": memory.arena_peak_bytes,
        "cached_bytes": memory.listeners.idle_bytes(),
    }


def scheduler_numbers(scheduler: Scheduler) -> dict[str, int]:
    """Counters of a scheduler, with the names of `EngineStats`."""
    swapper, prefix = scheduler.preempter.swapper, scheduler.sequence_memory.prefix
    return {
        "num_running": len(scheduler.running),
        "num_waiting": scheduler.num_waiting,
        "num_preemptions": scheduler.num_preemptions,
        "num_evictions": scheduler.capacities.num_evictions,
        "evicted_tokens": round(scheduler.capacities.evicted_tokens),
        "num_swaps": 0 if swapper is None else swapper.num_swaps,
        "checkpoint_bytes": 0 if prefix is None else prefix.snapshots.num_bytes,
        "queried_tokens": 0 if prefix is None else prefix.queried_tokens,
        "cached_tokens": 0 if prefix is None else prefix.hit_tokens,
    }


def stats_of(  # noqa: PLR0913 - one parameter per count
    pool: KVPool,
    scheduler: Scheduler,
    unfinished: Iterable[Request],
    *,
    model: LoadedModel,
    num_steps: int,
    num_processed_tokens: int,
    num_generated_tokens: int,
    times: StepTimes,
    tier: TierStats | None,
    graphs: GraphStats | None,
    async_scheduling: AsyncStats | None,
) -> EngineStats:
    """Collect the statistics of an engine; see `EngineStats`."""
    memory = pool.kv.memory
    held = request_bytes(scheduler.running, memory)
    impl = model.implementation
    return EngineStats(
        model_impl="" if impl is None else impl.name,
        model_impl_reason="" if impl is None else impl.reason,
        **memory_numbers(memory, model),
        **scheduler_numbers(scheduler),
        **(NO_OFFLOAD if pool.offload is None else pool.offload.totals()),
        scratch_peak_bytes=pool.kv.peak_scratch_bytes,
        sparse_pages_read=pool.kv.page_reads.read,
        sparse_pages_held=pool.kv.page_reads.held,
        num_drafts=scheduler.drafts.count,
        draft_tokens=scheduler.drafts.tokens,
        accepted_draft_tokens=scheduler.drafts.accepted,
        num_steps=num_steps,
        num_processed_tokens=num_processed_tokens,
        num_generated_tokens=num_generated_tokens,
        times=times,
        requests=held,
        tenants=tenant_bytes(unfinished, held),
        host_bytes=pool.host.used_bytes if pool.host else 0,
        served=scheduler.fairness.report(scheduler.running),
        tier=tier,
        graphs=graphs,
        async_scheduling=async_scheduling,
    )
