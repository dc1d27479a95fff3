"""The components of a scheduler, and the function that makes them from a configuration.

Every planner (admission, prefill, decode, preemption limits, forks, unblocking) takes this one
object: rules, accounts and the state that they share.
"""

from dataclasses import dataclass

from quire.scheduler.admission.peaks import Peaks
from quire.scheduler.admission.rules import AdmissionRule, make_admission
from quire.scheduler.batchers.base import Batcher, BatchState
from quire.scheduler.fairness import Fairness
from quire.scheduler.lane_capacities import Evictor, LaneCapacities
from quire.scheduler.lifecycle import Lifecycle
from quire.scheduler.preemption.preempter import Preempter
from quire.scheduler.preemption.swapper import Swapper
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.sequence_memory import SequenceMemory
from quire.scheduler.state import SchedulerState
from quire.scheduler.step_size import StepSize, refuse_nothing_shared
from quire.tenancy.accounts import TenantAccounts
from quire.tenancy.tenants import parse_tenants


@dataclass(frozen=True, slots=True)
class SchedulerComponents:
    """Rules, accounts and state of one scheduler.

    Attributes:
        config: sizes of steps and queues.
        state: the running and the waiting requests.
        sequence_memory: the requests' pages in the KV memory.
        admission_rule: decides when a waiting request may start.
        fairness: the tenants' accounts and the fair queue.
        preempter: chooses victims, swaps their KV out and in.
        lifecycle: moves requests between waiting, running and finished.
        capacities: evicts from lanes that are at their capacity.
        batcher: decides which rows decode and which requests may enter the batch.
        step_size: tokens of the next step.
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
    """Make the components that a configuration asks for.

    Args:
        config: sizes of steps and queues.
        sequence_memory: the requests' pages in the KV memory.
        evictor: evicts tokens of lanes at their capacity; None where no request evicts.
        swapper: copies KV to the swap space and back; None where all is recomputed.
        step_size: tokens of a step; default: steps of one batch.
        state: the running and the waiting requests; default: none.

    Raises:
        ConfigError: an unknown rule, or guarantees of tenants beyond the memory.
    """
    if step_size is None:
        refuse_nothing_shared(config.objective, offloaded_weights=False)
    tenants = parse_tenants(config.tenants)
    state = state or SchedulerState.empty(tenants)
    arena = sequence_memory.memory.arena
    accounts = TenantAccounts(tenants, arena.num_slabs * arena.slab_bytes)
    fairness = Fairness(accounts, sequence_memory.sharing, state.waiting)
    admission_rule = make_admission(config.admission, _make_peaks(config, sequence_memory))
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
        arriving=None if loader is None else loader.pages_in_flight,
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
