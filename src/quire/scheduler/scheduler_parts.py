"""What a scheduler is made of."""

from dataclasses import dataclass

from quire.scheduler.admission.base import AdmissionRule
from quire.scheduler.admission.peaks import Peaks
from quire.scheduler.admission.registry import make_admission
from quire.scheduler.batchers.base import Batcher, BatchState
from quire.scheduler.chunks import ChunkSizes
from quire.scheduler.fairness import Fairness
from quire.scheduler.preemption.preempter import Preempter
from quire.scheduler.preemption.swapper import Swapper
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.sequence_memory import SequenceMemory
from quire.scheduler.state import SchedulerState
from quire.scheduler.step_size import StepSize, refuse_nothing_shared
from quire.tenancy.accounts import TenantAccounts
from quire.tenancy.tenants import parse_tenants


@dataclass(frozen=True, slots=True)
class SchedulerParts:
    """Rules and books that the steps of a schedule ask.

    Attributes:
        config: steps and queues.
        state: which requests run and which wait.
        sequence_memory: requests' rows in the memory.
        chunks: how much of a prompt a step reads.
        admission: when a waiting request may start.
        fairness: the queue, and what tenants hold and have had.
        preempter: who gives way, and how it comes back.
        step: how many tokens a step has.
    """

    config: ScheduleConfig
    state: SchedulerState
    sequence_memory: SequenceMemory
    chunks: ChunkSizes
    admission: AdmissionRule
    fairness: Fairness
    preempter: Preempter
    step: StepSize


def make_parts(
    config: ScheduleConfig,
    sequence_memory: SequenceMemory,
    swapper: Swapper | None = None,
    step: StepSize | None = None,
    state: SchedulerState | None = None,
) -> SchedulerParts:
    """Make what the config asks for.

    Args:
        config: steps and queues.
        sequence_memory: requests' rows in the memory.
        swapper: copies KV to the host.
        step: sizes of steps; by default those of weights that are all on the device.
        state: which requests run and which wait; by default none.

    Raises:
        ConfigError: an unknown rule, or guarantees of tenants beyond the memory.
    """
    if step is None:
        refuse_nothing_shared(config.objective, brought=False)
    chunks = ChunkSizes(config, sequence_memory.memory)
    prefix_offloader, prefix_loader = (
        sequence_memory.prefix_offloader,
        sequence_memory.prefix_loader,
    )
    peaks = Peaks(
        sequence_memory.memory,
        config.longest_chunk,
        offloaded_tokens=0 if prefix_offloader is None else prefix_offloader.offloaded_tokens,
        offload_bytes=0 if prefix_offloader is None else prefix_offloader.offload_bytes,
        arriving=None if prefix_loader is None else prefix_loader.pages_in_flight,
    )
    arena = sequence_memory.memory.arena
    tenants = parse_tenants(config.tenants)
    state = state or SchedulerState.empty(tenants)
    book = TenantAccounts(tenants, arena.num_slabs * arena.slab_bytes)
    fairness = Fairness(book, sequence_memory.sharing, state.waiting)
    return SchedulerParts(
        config=config,
        state=state,
        sequence_memory=sequence_memory,
        chunks=chunks,
        admission=make_admission(config.admission, peaks),
        fairness=fairness,
        preempter=Preempter(sequence_memory, swapper, fairness.owes),
        step=step or StepSize(config.max_num_batched_tokens),
    )


def make_batcher(config: ScheduleConfig, state: SchedulerState) -> Batcher:
    """The batcher of one scheduler.

    Args:
        config: which one, and how large its batch is.
        state: which requests run and which wait.
    """
    batch = BatchState(
        running=state.running,
        waiting=state.waiting,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        chunk_tokens=config.chunk_tokens,
        urgent=config.urgent,
    )
    return config.batching.make(batch)
