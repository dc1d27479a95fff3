"""A trace and a configuration in, a result out."""

from dataclasses import dataclass, field

from quire.engine.schedule_config import ScheduleConfig
from quire.kv.config import KVConfig
from quire.plan.sizes import parse_size
from quire.sim.forgetting import OldestLeave
from quire.sim.memory import bytes_for_all, folded_layout, make_memory
from quire.sim.rates import Rates
from quire.sim.simulator import Progress, SimResult, Simulator
from quire.sim.timing import StepTimer
from quire.sim.traces.base import Trace
from quire.spec.dtypes import dtype_bytes
from quire.spec.eviction import EvictionSpec
from quire.spec.model import ModelSpec

AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """What a trace is run on.

    Attributes:
        model: its shape.
        rates: of the machine.
        kv: the memory; `auto` is one that never runs full.
        schedule: steps and queues.
        dtype: of weights, and of KV where `kv.codec` says nothing else.
        eviction: how many tokens a lane may hold; which ones leave is not simulated.
    """

    model: ModelSpec
    rates: Rates
    kv: KVConfig = field(default_factory=KVConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    dtype: str = "bfloat16"
    eviction: EvictionSpec = field(default_factory=EvictionSpec)


def simulate(trace: Trace, config: SimConfig, progress: Progress | None = None) -> SimResult:
    """Run a trace through scheduler and memory.

    Args:
        trace: what comes when.
        config: on what.
        progress: called now and then.

    Raises:
        ConfigError: an option that cannot be, before the run starts.
    """
    return make_simulator(trace, config).run(progress)


def make_simulator(trace: Trace, config: SimConfig, *, page_tokens: int | None = None) -> Simulator:
    """A simulator ready to run.

    Args:
        trace: what comes when.
        config: on what.
        page_tokens: slots in a page where it is not `config.kv.page_tokens`.

    Raises:
        ConfigError: an option that cannot be.
    """
    layout = folded_layout(
        config.model,
        codec=config.dtype if config.kv.codec == "none" else config.kv.codec,
        page_tokens=page_tokens or config.kv.page_tokens,
        evicting=config.eviction.cap is not None,
    )
    size = config.kv.memory
    total_bytes = bytes_for_all(layout, trace) if size == AUTO else parse_size(size)
    memory = make_memory(layout, total_bytes, config.schedule.max_running)
    timer = StepTimer(config.model, config.rates, bytes_per_value=dtype_bytes(config.dtype))
    return Simulator(
        trace,
        memory,
        config.schedule,
        timer,
        eviction=config.eviction,
        evict=OldestLeave(memory),
    )
