"""Run the simulation of a trace with a configuration."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from quire.config.kv_config import KVConfig, OffloadConfig, PrefixCacheConfig
from quire.errors import ConfigError, InvariantError
from quire.kv.memory import KVMemory
from quire.kv.prefix import PrefixListener
from quire.kv.tables import refuse_too_many_rows
from quire.layout.config import dtype_bytes
from quire.layout.eviction import KEEP_ALL, EvictionSpec
from quire.layout.kv_format import stored_codec
from quire.layout.model import ModelSpec
from quire.offload.swap.host_pool import HostPool, auto_swap_bytes, refuse_too_small
from quire.plan.preemption_costs import LearnedCosts, assumed_prefill
from quire.plan.rates import CopyRate, CopyRates, Costs
from quire.scheduler.events import EventLog
from quire.scheduler.preemption import (
    Swapper,
    refuse_unused_swap_space,
    uses_swap_space,
)
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.scheduler import Scheduler, scheduler_of
from quire.scheduler.sequence_memory import PrefixIdentities, sequence_memory_of
from quire.sim.engine import (
    OldestFirstEvictor,
    SimResult,
    SimulatedEngine,
    StepTimer,
    TimedCopies,
    VirtualClock,
    folded_layout,
    make_memory,
)
from quire.sim.machine import Rates
from quire.sim.traces.base import Trace

Progress = Callable[[float, int], None]  # (virtual seconds, arrived requests)
_PROGRESS_STEPS = 1000


class Simulator:
    """Simulation of one trace with one KV memory."""

    def __init__(self, trace: Trace, engine: SimulatedEngine) -> None:
        self.engine, self.result = engine, engine.result
        self._arrivals = trace.requests
        self._num_arrived = 0

    def run(self, progress: Progress | None = None) -> SimResult:
        while True:
            self._deliver_arrived()
            if self.engine.begin_step():
                self.engine.end_step()
            elif self._num_arrived < len(self._arrivals):
                self.engine.wait(self._arrivals[self._num_arrived].arrival_s)
            elif self.engine.has_work:
                raise InvariantError("requests are waiting, but no step can be planned")
            else:
                break
            if progress is not None and self.result.num_steps % _PROGRESS_STEPS == 0:
                progress(self.engine.clock.now_s, self._num_arrived)
        check_finished([self.engine])
        return self.result

    def _deliver_arrived(self) -> None:
        while self._num_arrived < len(self._arrivals):
            arrived = self._arrivals[self._num_arrived]
            if arrived.arrival_s > self.engine.clock.now_s:
                return
            self._num_arrived += 1
            self.engine.deliver(self.engine.open_job(arrived, self._num_arrived))


def check_finished(engines: Sequence[SimulatedEngine]) -> None:
    """Check that all requests ended and all their pages were freed."""
    for engine in engines:
        engine.memory.check()
        records = engine.result.records
        lost = [r for r in records if r.refused is None and math.isnan(r.finish_s)]
        if lost or len(engine.memory.live_rows):
            raise InvariantError(f"{len(lost)} requests were neither finished nor refused")


_SECRET = bytes(32)  # a simulation needs no secret salts; a constant makes runs reproducible


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """Configuration of a simulation."""

    model: ModelSpec
    rates: Rates
    kv: KVConfig = field(default_factory=KVConfig)  # an `auto` memory never runs full
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    dtype: str = "bfloat16"  # of weights, and of KV unless `kv.codec` sets another one
    # for the longest prompt; which tokens are evicted is not simulated
    eviction: EvictionSpec = KEEP_ALL
    # by prompt length, if the cap depends on it
    eviction_of: Callable[[int], EvictionSpec] | None = None


def simulate(trace: Trace, config: SimConfig, progress: Progress | None = None) -> SimResult:
    """Run a trace through scheduler and memory."""
    return make_simulator(trace, config).run(progress)


def make_simulator(trace: Trace, config: SimConfig) -> Simulator:
    """A simulator ready to run."""
    return Simulator(trace, make_engine(trace, config))


def make_engine(
    trace: Trace, config: SimConfig, listener: PrefixListener | None = None
) -> SimulatedEngine:
    """A simulated engine at 0 s."""
    refuse_unsimulated(config.kv)
    layout = folded_layout(
        config.model,
        codec=stored_codec(config.kv.codec, config.dtype, latent=config.model.latent is not None),
        page_tokens=config.kv.page_tokens,
        evicting=config.eviction.cap is not None,
    )
    refuse_too_many_rows(layout.groups, config.schedule.num_rows)
    evict = cache(config.eviction_of) if config.eviction_of else lambda tokens: config.eviction
    most = config.model.max_positions
    lengths = [
        min(r.tokens, most) + evict(r.prompt_tokens).scoring_slots(r.prompt_tokens)
        for r in trace.requests
    ]
    memory = make_memory(layout, config.kv, lengths, config.schedule.num_rows)
    clock, copies = VirtualClock(), TimedCopies(config.rates.copy_bytes_per_s)
    scheduler = make_scheduler(memory, config, clock, copies, listener)
    return SimulatedEngine(trace, scheduler, make_timer(config), clock, copies, evict)


def make_timer(config: SimConfig) -> StepTimer:
    """The step timer of a configuration."""
    return StepTimer(config.model, config.rates, bytes_per_value=dtype_bytes(config.dtype))


def make_scheduler(
    memory: KVMemory,
    config: SimConfig,
    clock: VirtualClock,
    copies: TimedCopies,
    listener: PrefixListener | None = None,
) -> Scheduler:
    """The engine's scheduler over a memory without bytes."""
    identities, events = PrefixIdentities(secret=_SECRET), EventLog(clock, kept=1)
    sequence_memory = sequence_memory_of(memory, config.kv, identities, events, listener=listener)
    swapper = _make_swapper(memory, config, copies)
    evictor = OldestFirstEvictor(memory)
    return scheduler_of(config.schedule, sequence_memory, evictor, swapper)


def _make_swapper(memory: KVMemory, config: SimConfig, copies: TimedCopies) -> Swapper:
    """Build a swapper to a host pool without bytes; the machine's rates determine the costs."""
    host_bytes = config.kv.swap_space
    if host_bytes is None:  # a machine with ample CPU memory is assumed
        host_bytes = 0
        if uses_swap_space(config.schedule):
            host_bytes = auto_swap_bytes(memory.total_bytes, sys.maxsize, memory.layout)
    refuse_too_small(host_bytes, memory.layout)
    refuse_unused_swap_space(host_bytes, config.schedule)
    rate = CopyRate(bytes_per_s=config.rates.copy_bytes_per_s)
    costs = Costs(
        copies=CopyRates(out=rate, back=rate),
        prefill=assumed_prefill(config.model, config.rates.flops_per_s),
        chunk_tokens=config.schedule.longest_chunk,
    )
    pool = HostPool(host_bytes, copies) if host_bytes else None
    return Swapper(memory, pool, LearnedCosts(costs), config.schedule.preempt, clock=copies)


# KV options that a simulation does not support.


def refuse_unsimulated(kv: KVConfig) -> None:
    """Reject options that have no effect in a simulation."""
    _refuse_changes(kv.offload, OffloadConfig(), "KV offload")
    cache = kv.prefix_cache
    simulated = PrefixCacheConfig(
        enabled=cache.enabled,
        state_checkpoint_interval=cache.state_checkpoint_interval,
        state_checkpoint_memory=cache.state_checkpoint_memory,
    )
    _refuse_changes(kv.prefix_cache, simulated, "prefixes on disk or in a store")


def _refuse_changes(options: Any, simulated: Any, what: str) -> None:
    for each in fields(options):
        value = getattr(options, each.name)
        if value not in (getattr(simulated, each.name), 0):
            raise ConfigError(
                f"--{each.metadata['option'].flag} has no effect: a simulation has no {what}; "
                "remove it"
            )
