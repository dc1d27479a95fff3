"""Numbers an engine shows about itself."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from quire.engine.pool import KVPool
from quire.kv.memory import KVMemory
from quire.models.loader import LoadedModel
from quire.offload.prefix_store.prefix_tier import TierStats
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.step import StepTimes
from quire.tenancy.meter import TenantStats


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBytes:
    """What one running request holds.

    Attributes:
        request_id: whose.
        tokens: logical length, the tokens processed so far.
        kv_bytes: bytes of all pages it refers to.
    """

    request_id: str
    tokens: int
    kv_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantBytes:
    """What the requests of one tenant hold.

    Attributes:
        tenant: whose.
        num_requests: running and waiting.
        kv_bytes: bytes of all pages its requests refer to; shared pages count in full for each.
    """

    tenant: str
    num_requests: int
    kv_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The ledger of an engine.

    Attributes:
        kv_total_bytes: the arena; used + free is always equal to it.
        kv_used_bytes: pages in use, with what slab borders waste.
        kv_free_bytes: the rest.
        kv_peak_bytes: most bytes of pages in use at once so far, cached prefixes not counted.
        scratch_peak_bytes: most gathered bytes held at once, outside the arena.
        weight_bytes: parameters and buffers on the device, slots for brought layers included.
        host_weight_bytes: of layers that are brought in every pass; 0 where all are on the device.
        offloaded_weight_bytes: over the link so far.
        num_running, num_waiting: requests with and without KV.
        num_preemptions, num_steps: since the start.
        num_evictions: times tokens of a request left since the start, repeated ones not counted.
        evicted_tokens: that left then; of each request the mean over its lanes.
        num_processed_tokens: tokens that went through the model, repeated reading included.
        num_generated_tokens: tokens of answers.
        times: where the steps' time went.
        requests: who holds what.
        tenants: the same, by tenant.
        cached_bytes: pages of prefixes that no request uses: used, but given up when room is short.
        host_bytes: KV of requests that wait with it in the host pool.
        offloaded_bytes: KV of the first pages of running requests, on the host.
        input_bytes: on the host beside it, what such KV can be made of again.
        recomputed_tokens, cpu_attended_tokens: of first pages, whose KV was made again, and that
            were attended to on the host, so far; each layer counted.
        num_swaps: sequences moved to the host so far, tails included.
        queried_tokens, cached_tokens: of all requests that entered: known then, and found in the
            prefix cache.
        served: what each tenant has had since the start.
        tier: prefixes on disk or in a store; None without one.
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
    host_bytes: int
    offloaded_bytes: int
    input_bytes: int
    recomputed_tokens: int
    cpu_attended_tokens: int
    num_swaps: int
    queried_tokens: int
    cached_tokens: int
    served: tuple[TenantStats, ...]
    tier: TierStats | None = None

    @property
    def kv_held_bytes(self) -> int:
        """Bytes in use without cached prefixes that nobody uses."""
        return self.kv_used_bytes - self.cached_bytes

    def as_dict(self) -> dict[str, object]:
        """Plain numbers and lists, ready for JSON."""
        return asdict(self)


NO_OFFLOAD = {
    "offloaded_bytes": 0,
    "input_bytes": 0,
    "recomputed_tokens": 0,
    "cpu_attended_tokens": 0,
}


def request_bytes(requests: Iterable[Request], memory: KVMemory) -> tuple[RequestBytes, ...]:
    """What each running request holds."""
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
    """What the requests of each tenant hold, those that wait included."""
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
    """What a KV memory and weights take, under the names of `EngineStats`."""
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
    """What a scheduler has done, under the names of `EngineStats`."""
    swapper, prefix = scheduler.preempter.swapper, scheduler.sequence_memory.sharing.prefix
    return {
        "num_running": len(scheduler.running),
        "num_waiting": scheduler.num_waiting,
        "num_preemptions": scheduler.num_preemptions,
        "num_evictions": scheduler.capacities.num_evictions,
        "evicted_tokens": round(scheduler.capacities.evicted_tokens),
        "num_swaps": 0 if swapper is None else swapper.num_swaps,
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
) -> EngineStats:
    """All numbers of an engine; see `EngineStats`."""
    memory = pool.kv.memory
    held = request_bytes(scheduler.running, memory)
    return EngineStats(
        **memory_numbers(memory, model),
        **scheduler_numbers(scheduler),
        **(NO_OFFLOAD if pool.offload is None else pool.offload.totals()),
        scratch_peak_bytes=pool.kv.peak_scratch_bytes,
        num_steps=num_steps,
        num_processed_tokens=num_processed_tokens,
        num_generated_tokens=num_generated_tokens,
        times=times,
        requests=held,
        tenants=tenant_bytes(unfinished, held),
        host_bytes=pool.host.used_bytes if pool.host else 0,
        served=scheduler.fairness.report(scheduler.running),
        tier=tier,
    )
