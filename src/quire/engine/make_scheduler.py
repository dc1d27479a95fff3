"""Puts a scheduler together over a pool: prefixes, rows, eviction, preemption."""

import logging
import os
from functools import cache

import torch

from quire.config.kv_config import KVConfig
from quire.engine.pool import KVPool
from quire.eviction.eviction import PolicyEvictor
from quire.kv.prefix import PrefixIndex
from quire.kv.prefix_events import PrefixBroadcast
from quire.models.loader import LoadedModel
from quire.offload.kv.evicting_fronts import FrontEvictor
from quire.offload.kv.front_room import FrontRoom
from quire.offload.prefix_store.open_tier import open_tier
from quire.offload.prefix_store.prefix_identities import PrefixIdentities
from quire.offload.prefix_store.restoring import Restoring
from quire.offload.swap.host_store import device_name
from quire.plan.ceilings import default_path, read_ceilings
from quire.plan.known_costs import known_costs
from quire.plan.learned_costs import LearnedCosts
from quire.plan.machine import this_machine
from quire.plan.sizes import parse_size
from quire.scheduler.events import EventLog, PrefixEvents
from quire.scheduler.lane_caps import Evictor
from quire.scheduler.preemption.swapper import Swapper
from quire.scheduler.residency import Residency
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.scheduler_parts import make_parts
from quire.scheduler.step_size import StepSize

logger = logging.getLogger(__name__)


def make_scheduler(
    pool: KVPool,
    kv: KVConfig,
    schedule: ScheduleConfig,
    *,
    model: LoadedModel,
    events: EventLog,
    listener: PrefixBroadcast,
) -> Scheduler:
    """A scheduler over a pool.

    Args:
        pool: memory, policy and codec.
        kv: what the user said about the memory.
        schedule: and about steps and queues.
        model: its KV is shared with no other's.
        events: told what happens to requests.
        listener: told which prefixes come and go.
    """
    memory = pool.kv.memory
    opened = open_tier(kv, pool, model)
    shares = kv.prefix_cache and pool.why_no_prefix is None
    if kv.prefix_cache and not shares:
        logger.info("the prefix cache is off: %s", pool.why_no_prefix)
    prefix = PrefixIndex(memory, listener) if shares else None
    if prefix is not None:
        listener.subscribe(PrefixEvents(events, prefix.block_bytes))
    front_room = None
    if pool.fronts is not None:
        front_room = FrontRoom(memory, pool.fronts.fronts, events, cached=prefix is not None)
        front_room.rows = pool.fronts.rows
        front_room.offload_bytes = pool.fronts.offload_bytes
    swapper = _swapper(pool, schedule, model)
    made_by = (model.name, pool.stored_as.fingerprint, str(kv.page_tokens))
    identities, restoring = PrefixIdentities(made_by), None
    if opened is not None and prefix is not None:
        tier = opened.attach(prefix)
        identities = PrefixIdentities((*made_by, opened.nature), secret=opened.secret)
        restoring = Restoring(tier, swapper.costs, prefix.block_tokens, events)
    residency = Residency(
        memory,
        prefix,
        front_room=front_room,
        restoring=restoring,
        identities=identities,
        events=events,
    )
    brought = model.weights if pool.fronts is None else None
    step = StepSize(schedule.step_tokens, schedule.objective, brought)
    parts = make_parts(schedule, residency, swapper, step)
    evictor = _evictor(pool, kv, model)
    if evictor is not None and front_room is not None:
        evictor = FrontEvictor(evictor, front_room)
    return Scheduler(memory, schedule, evictor, parts=parts)


def _evictor(pool: KVPool, kv: KVConfig, model: LoadedModel) -> Evictor | None:
    if not pool.rules.evicts:
        return None
    rotations = cache(model.decoder.rotations)
    return PolicyEvictor(pool.kv, pool.rules, parse_size(kv.scratch), rotations)


def _swapper(pool: KVPool, schedule: ScheduleConfig, model: LoadedModel) -> Swapper:
    device = model.decoder.device
    known = known_costs(
        read_ceilings(default_path(os.environ), this_machine(torch.get_num_threads())),
        model.spec,
        dtype=str(model.decoder.dtype).removeprefix("torch."),
        device=device_name(device),
        chunk_tokens=schedule.longest_chunk,
    )
    if known.notice and pool.host is not None and schedule.preempt == "auto":
        logger.info("%s", known.notice)
    costs = LearnedCosts(known.costs)
    return Swapper(pool.kv.memory, pool.host, costs, schedule.preempt)
