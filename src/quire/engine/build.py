"""The composition root: builds the memory, offload, scheduler and runner of an engine, in order.

Every component gets its dependencies in its constructor; none is assigned afterwards.
"""

import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache

import torch

from quire.config.kv_config import KVConfig
from quire.engine.async_steps import is_async, refuse_async
from quire.engine.decode_graphs import DecodeGraphs, make_graphs, refuse_graphs
from quire.engine.open_tier import OpenedTiers, open_tiers
from quire.engine.pool import KVPool, build_pool
from quire.engine.rank_decisions import RankCosts
from quire.engine.runner import Runner
from quire.engine.shared_pool import PoolMember, joining
from quire.eviction.eviction import PolicyEvictor
from quire.kv.prefix import PrefixBroadcast
from quire.models.base import LayerByLayer, attention_math
from quire.models.loader import LoadedModel
from quire.offload.kv.offloader import PrefixOffloader
from quire.offload.prefix_store.prefix_loader import PrefixLoader
from quire.offload.swap.host_store import device_name
from quire.parallel.lockstep import Lockstep
from quire.plan.ceilings import default_path, read_ceilings
from quire.plan.machine import this_machine
from quire.plan.preemption_costs import known_costs
from quire.scheduler.events import EventLog, PrefixEvents
from quire.scheduler.lanes import Evictor
from quire.scheduler.preemption import Swapper
from quire.scheduler.request import Request
from quire.scheduler.schedule_config import INVARIANT_ROWS, ScheduleConfig
from quire.scheduler.scheduler import Scheduler, scheduler_of
from quire.scheduler.sequence_memory import PrefixIdentities, SequenceMemory, sequence_memory_of
from quire.scheduler.step import StepSize, StepTimes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The components of an engine."""

    pool: KVPool
    scheduler: Scheduler
    runner: Runner
    graphs: DecodeGraphs | None  # None: all steps run without
    prefix_loader: PrefixLoader | None  # None without tiers
    times: StepTimes
    is_async: bool


def build(
    model: LoadedModel,
    kv: KVConfig,
    schedule: ScheduleConfig,
    *,
    member: PoolMember | None,
    events: EventLog,
    listener: PrefixBroadcast,
    lockstep: Lockstep,
) -> EngineParts:
    """Build the components of an engine."""
    refuse_graphs(model, schedule)
    refuse_async(model, schedule, member)
    with joining(member) as attach, ExitStack() as undo:
        running = list[Request]()
        pool = build_pool(model, kv, schedule, member, running)
        opened = open_tiers(kv, pool, model)
        if opened is not None:
            undo.callback(opened.close)
        swapper = _swapper(pool, schedule, model, lockstep)
        sequence_memory = _make_memory(pool, kv, model, opened, events, listener)
        prefix = sequence_memory.prefix
        if prefix is not None:
            listener.subscribe(PrefixEvents(events, prefix.block_bytes))
        prefix_loader = None
        if opened is not None and prefix is not None:
            tier = opened.attach(prefix)
            undo.pop_all()
            undo.callback(tier.close)  # closes the opened tiers too
            whole = kv.prefix_cache.load == "whole"
            prefix_loader = PrefixLoader(
                tier, swapper.costs, sequence_memory, events, loads_whole=whole
            )
        sequence_memory.attach(
            prefix_offloader=_make_offloader(pool, sequence_memory, running, events),
            prefix_loader=prefix_loader,
        )
        ahead = is_async(model, pool, schedule, member, has_tiers=prefix_loader is not None)
        scheduler = _make_scheduler(pool, kv, schedule, model, running, sequence_memory, swapper)
        attach(scheduler)
        undo.pop_all()
    times = StepTimes()
    rows = INVARIANT_ROWS if schedule.batch_invariant else None
    graphs = make_graphs(model, pool.kv, schedule)
    runner = Runner(
        model.decoder, pool.kv, times, scheduler.step_size, fixed_rows=rows, graphs=graphs
    )
    return EngineParts(pool, scheduler, runner, graphs, prefix_loader, times, ahead)


def _make_offloader(
    pool: KVPool, sequence_memory: SequenceMemory, running: list[Request], events: EventLog
) -> PrefixOffloader | None:
    if pool.offload is None:
        return None
    return PrefixOffloader(
        pool.kv.memory,
        pool.offload.prefixes,
        events,
        sequence_memory=sequence_memory,
        running=running,
        offload_bytes=pool.offload.offload_bytes,
    )


def _make_scheduler(
    pool: KVPool,
    kv: KVConfig,
    schedule: ScheduleConfig,
    model: LoadedModel,
    running: list[Request],
    sequence_memory: SequenceMemory,
    swapper: Swapper,
) -> Scheduler:
    step_size = StepSize(schedule.max_num_batched_tokens, schedule.objective, model.weights)
    evictor = _evictor(pool, kv, model)
    decoder, by_layer = model.decoder, False
    if evictor is not None and pool.offload is None and sequence_memory.prefix_loader is None:
        by_layer = isinstance(decoder, LayerByLayer) and decoder.prepare_by_layer() is None
    return scheduler_of(
        schedule,
        sequence_memory,
        evictor,
        swapper,
        step_size=step_size,
        running=running,
        by_layer=by_layer and not schedule.batch_invariant,
    )


def _make_memory(
    pool: KVPool,
    kv: KVConfig,
    model: LoadedModel,
    opened: OpenedTiers | None,
    events: EventLog,
    listener: PrefixBroadcast,
) -> SequenceMemory:
    identities = PrefixIdentities((model.name, pool.stored_as.fingerprint, str(kv.page_tokens)))
    if opened is not None and kv.prefix_cache.enabled:  # engines may know the model by other names
        identities = PrefixIdentities((opened.nature,), secret=opened.secret)
    return sequence_memory_of(pool.kv.memory, kv, identities, events, listener=listener)


def _evictor(pool: KVPool, kv: KVConfig, model: LoadedModel) -> Evictor | None:
    if not pool.rules.evicts:
        return None
    rotations = cache(model.decoder.rotations)
    rotations(0)  # may run the model, which is not possible inside of a step
    math = attention_math(model.decoder)
    return PolicyEvictor(pool.kv, pool.rules, kv.scratch, math, rotations, model.group)


def _swapper(
    pool: KVPool, schedule: ScheduleConfig, model: LoadedModel, lockstep: Lockstep
) -> Swapper:
    device = model.decoder.device
    known = known_costs(
        read_ceilings(default_path(os.environ), this_machine(torch.get_num_threads())),
        model.spec,
        dtype=str(model.decoder.dtype).removeprefix("torch."),
        device=device_name(device),
        chunk_tokens=schedule.longest_chunk,
        weight_codec=model.weight_codec,
    )
    if known.notice and pool.host is not None and schedule.preempt == "auto":
        logger.info("%s", known.notice)
    costs = RankCosts(lockstep.same(lambda: known.costs), lockstep)
    return Swapper(pool.kv.memory, pool.host, costs, schedule.preempt)
