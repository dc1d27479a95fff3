"""Puts a scheduler together over a pool: prefixes, rows, eviction, preemption."""

from quire.engine.events import EventLog
from quire.engine.eviction import Evictor
from quire.engine.pool import KVPool
from quire.engine.prefix_identities import PrefixIdentities
from quire.engine.request import Request
from quire.engine.residency import Residency
from quire.engine.schedule_config import ScheduleConfig
from quire.engine.scheduler import Scheduler
from quire.errors import InvariantError
from quire.kv.config import KVConfig
from quire.kv.prefix import PrefixIndex
from quire.kv.prefix_events import PrefixListener


def make_scheduler(
    pool: KVPool,
    kv: KVConfig,
    schedule: ScheduleConfig,
    *,
    model_name: str,
    events: EventLog,
    listener: PrefixListener,
) -> Scheduler:
    """A scheduler over a pool.

    Args:
        pool: memory, policy and codec.
        kv: what the user said about the memory.
        schedule: and about steps and queues.
        model_name: its KV is shared with no other model's.
        events: told what happens to requests.
        listener: told which prefixes come and go.
    """
    memory, eviction = pool.kv.memory, pool.eviction
    # a store whose pages have one holder each can share nothing
    shares = kv.prefix_cache and memory.placement.shares
    residency = Residency(
        memory,
        PrefixIndex(memory, listener) if shares else None,
        identities=PrefixIdentities((model_name, pool.codec, kv.evict, str(kv.page_tokens))),
        events=events,
    )
    evictor = Evictor(pool.kv, eviction.policy) if eviction.policy else _never
    return Scheduler(memory, schedule, eviction.spec, evictor, residency=residency)


def _never(request: Request, keep: int) -> None:
    raise InvariantError(f"request {request.request_id}: eviction to {keep} without a policy")
