"""What a scheduler is made of."""

from dataclasses import dataclass

from quire.scheduler.admission.base import AdmissionRule
from quire.scheduler.admission.peaks import Peaks
from quire.scheduler.admission.registry import make_admission
from quire.scheduler.batchers.base import Batcher, BatchState
from quire.scheduler.chunks import ChunkSizes
from quire.scheduler.preemption.preempter import Preempter
from quire.scheduler.preemption.swapper import Swapper
from quire.scheduler.residency import Residency
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.state import SchedulerState
from quire.scheduler.step_size import StepSize, refuse_nothing_shared
from quire.tenancy.fairness import Fairness
from quire.tenancy.tenant_book import TenantBook
from quire.tenancy.tenants import parse_tenants


@dataclass(frozen=True, slots=True)
class SchedulerParts:
    """Rules and books that the steps of a schedule ask.

    Attributes:
        config: steps and queues.
        state: which requests run and which wait.
        residency: requests' rows in the memory.
        chunks: how much of a prompt a step reads.
        admission: when a waiting request may start.
        fairness: the queue, and what tenants hold and have had.
        preempter: who gives way, and how it comes back.
        step: how many tokens a step has.
    """

    config: ScheduleConfig
    state: SchedulerState
    residency: Residency
    chunks: ChunkSizes
    admission: AdmissionRule
    fairness: Fairness
    preempter: Preempter
    step: StepSize


def make_parts(
    config: ScheduleConfig,
    residency: Residency,
    swapper: Swapper | None = None,
    step: StepSize | None = None,
    state: SchedulerState | None = None,
) -> SchedulerParts:
    """Make what the config asks for.

    Args:
        config: steps and queues.
        residency: requests' rows in the memory.
        swapper: copies KV to the host.
        step: sizes of steps; by default those of weights that are all on the device.
        state: which requests run and which wait; by default none.

    Raises:
        ConfigError: an unknown rule, or guarantees of tenants beyond the memory.
    """
    if step is None:
        refuse_nothing_shared(config.objective, brought=False)
    chunks = ChunkSizes(config, residency.memory)
    front_room, restoring = residency.front_room, residency.restoring
    peaks = Peaks(
        residency.memory,
        config.longest_chunk,
        front_tokens=0 if front_room is None else front_room.front_tokens,
        offload_bytes=0 if front_room is None else front_room.offload_bytes,
        arriving=None if restoring is None else restoring.pages_arriving,
    )
    arena = residency.memory.arena
    tenants = parse_tenants(config.tenants)
    state = state or SchedulerState.empty(tenants)
    book = TenantBook(tenants, arena.num_slabs * arena.slab_bytes)
    fairness = Fairness(book, residency.sharing, state.waiting)
    return SchedulerParts(
        config=config,
        state=state,
        residency=residency,
        chunks=chunks,
        admission=make_admission(config.admission, peaks),
        fairness=fairness,
        preempter=Preempter(residency, swapper, fairness.owes),
        step=step or StepSize(config.step_tokens),
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
        max_running=config.max_running,
        step_tokens=config.step_tokens,
        chunk_tokens=config.chunk_tokens,
        urgent=config.urgent,
    )
    return config.batching.make(batch)
