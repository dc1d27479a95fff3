"""The components of a scheduler, and the function that creates them from a configuration.

Every planner (admission, prefill, decode, preemption limits, forks, unblocking) takes this one
object with the shared rules, accounts and state.
"""

from dataclasses import dataclass

from quire.scheduler.admission_rules import AdmissionRule, make_admission
from quire.scheduler.batchers.base import Batcher, BatchState
from quire.scheduler.fairness import Fairness
from quire.scheduler.lanes import Evictor, LaneCapacities
from quire.scheduler.lifecycle import Lifecycle
from quire.scheduler.peaks import Peaks
from quire.scheduler.preemption import Preempter, Swapper
from quire.scheduler.request import SchedulerState
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.sequence_memory import SequenceMemory
from quire.scheduler.step import StepSize, refuse_nothing_shared
from quire.tenancy.accounts import TenantAccounts
from quire.tenancy.tenants import parse_tenants


@dataclass(frozen=True, slots=True)
class SchedulerComponents:
    """Rules, accounts and state of one scheduler.

    Attributes:
        config: the scheduling options.
        state: the running and the waiting requests.
        sequence_memory: the requests' pages in the KV memory.
        admission_rule: decides when a waiting request may start.
        fairness: the tenants' accounts and the fair queue.
        preempter: chooses victims and swaps their KV out and in.
        lifecycle: moves requests between waiting, running and finished.
        capacities: evicts from lanes that are at their capacity.
        batcher: decides which rows decode and which requests may join the batch.
        step_size: maximum number of tokens in the next step.
    """

    config: ScheduleConfig
    state: SchedulerState
    sequence_memory: SequenceMemory
    admission_rule: AdmissionRule
    fairness: Fairness
    preempter: Preempter
    lifecycle: Lifecycle
    capacities: LaneCapacities
    batcher: Batcher
    step_size: StepSize


def make_components(
    config: ScheduleConfig,
    sequence_memory: SequenceMemory,
    evictor: Evictor | None = None,
    swapper: Swapper | None = None,
    *,
    step_size: StepSize | None = None,
    state: SchedulerState | None = None,
) -> SchedulerComponents:
    """Create the components for a configuration.

    Args:
        config: the scheduling options.
        sequence_memory: the requests' pages in the KV memory.
        evictor: evicts tokens of lanes at their capacity; None if no request evicts.
        swapper: copies KV to the swap space and back; None if preempted requests are recomputed.
        step_size: maximum number of tokens in a step; default: one batch.
        state: the running and the waiting requests; default: empty.

    Raises:
        ConfigError: an unknown rule, or tenants' guarantees exceed the KV memory.
    """
    if step_size is None:
        refuse_nothing_shared(config.objective, offloaded_weights=False)
    tenants = parse_tenants(config.tenants)
    state = state or SchedulerState.empty(tenants)
    arena = sequence_memory.memory.arena
    accounts = TenantAccounts(tenants, arena.num_slabs * arena.slab_bytes)
    fairness = Fairness(accounts, sequence_memory, state.waiting)
    peaks = _make_peaks(config, sequence_memory)
    can_swap = swapper is not None and swapper.has_pool
    admission_rule = make_admission(config.admission, peaks, can_swap=can_swap)
    preempter = Preempter(sequence_memory, fairness, swapper)
    lifecycle = Lifecycle(state, sequence_memory, admission_rule, fairness, preempter)
    return SchedulerComponents(
        config=config,
        state=state,
        sequence_memory=sequence_memory,
        admission_rule=admission_rule,
        fairness=fairness,
        preempter=preempter,
        lifecycle=lifecycle,
        capacities=LaneCapacities(sequence_memory, evictor, lifecycle),
        batcher=_make_batcher(config, state),
        step_size=step_size or StepSize(config.max_num_batched_tokens),
    )


def _make_peaks(config: ScheduleConfig, sequence_memory: SequenceMemory) -> Peaks:
    offloader, loader = sequence_memory.prefix_offloader, sequence_memory.prefix_loader
    return Peaks(
        sequence_memory.memory,
        config.longest_chunk,
        offloaded_tokens=0 if offloader is None else offloader.offloaded_tokens,
        offload_bytes=0 if offloader is None else offloader.offload_bytes,
        pages_in_flight=None if loader is None else loader.pages_in_flight,
    )


def _make_batcher(config: ScheduleConfig, state: SchedulerState) -> Batcher:
    batch = BatchState(
        running=state.running,
        waiting=state.waiting,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        chunk_tokens=config.chunk_tokens,
        urgent=config.urgent,
    )
    return config.batching.make(batch)
