"""Configuration of the cluster benchmark."""

import math
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from quire.config.kv_config import KVConfig
from quire.errors import ConfigError
from quire.layout.sizes import parse_size
from quire.sim.machine import MachineConfig, MachineName
from quire.sim.models import model_shape
from quire.sim.run import SimConfig
from quire.sim.traces.base import Trace, TraceOptions
from quire.sim.traces.loading import load_trace

PACKAGED = "mooncake_conversation.jsonl.gz"
BLOCK_TOKENS = 512  # of Mooncake's traces
MODERATE, SATURATED = "moderate", "saturated"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterBenchConfig:
    """Configuration of the benchmark.

    Attributes:
        trace: file in Mooncake's format; "": the first 2,000 requests of Mooncake's conversation
            trace, shipped with Quire.
        requests: number of first requests; None: all.
        model: a model shape of `quire simulate`.
        machine: machine of each replica.
        length_scale: factor on the lengths of prompts and outputs. The KV memory, the blocks and
            the times between arrivals are scaled too, so a cache holds as many conversations.
        memory: KV memory of each replica for unscaled lengths.
        replicas: replicas that serve the trace as it was recorded.
        loads: factors on the arrival rate by name.
        sizes: numbers of replicas; the load grows with them.
        scale_requests: number of first requests in the runs with these sizes; None: all.
        intervals_s: times between load reports.
        price_per_hour: price of a replica's machine.
        processes: simulations that run at the same time.
    """

    trace: str = ""
    requests: int | None = None
    model: str = "llama-3.1-8b"
    machine: MachineName = "a100"
    length_scale: float = 0.125
    memory: str = "40GiB"
    replicas: int = 8
    loads: tuple[tuple[str, float], ...] = ((MODERATE, 1.2), (SATURATED, 2.2))
    sizes: tuple[int, ...] = (1, 4, 16, 64, 256)
    scale_requests: int | None = 300
    intervals_s: tuple[float, ...] = (0.0, 0.1, 1.0, 5.0)
    price_per_hour: float = 2.0
    processes: int = 1

    def load(self, tenants: str = "") -> Trace:
        """The scaled trace.

        Args:
            tenants: see `TraceOptions.tenants`.

        Raises:
            TraceError: the file cannot be read.
        """
        packaged = Path(str(resources.files("quire") / "assets" / PACKAGED))
        options = TraceOptions(
            requests=self.requests,
            length_scale=self.length_scale,
            time_scale=self.length_scale,
            tenants=tenants,
        )
        return load_trace(Path(self.trace) if self.trace else packaged, options)

    def engine(self) -> SimConfig:
        """Configuration of one replica, with the engine's defaults."""
        return SimConfig(
            model=model_shape(self.model),
            rates=MachineConfig(name=self.machine).rates(),
            kv=KVConfig(memory=self.memory_bytes, page_tokens=self.block_tokens),
        )

    @property
    def memory_bytes(self) -> int:
        """KV memory of a replica for scaled lengths."""
        return int(parse_size(self.memory) * self.length_scale)

    @property
    def block_tokens(self) -> int:
        """Tokens of a scaled block."""
        return max(1, round(BLOCK_TOKENS * self.length_scale))


def loads_of(text: str) -> tuple[tuple[str, float], ...]:
    """Parse the moderate and the high load.

    Raises:
        ConfigError: not two numbers above 0.
    """
    try:
        factors = [float(part) for part in text.split(",")]
    except ValueError:
        factors = []
    if len(factors) != 2 or not all(0 < factor < math.inf for factor in factors):
        raise ConfigError(f"expected two loads above 0, such as 1.2,2.2; got {text!r} (--loads)")
    return tuple(zip((MODERATE, SATURATED), factors, strict=True))


def sizes_of(text: str) -> tuple[int, ...]:
    """Parse numbers of replicas.

    Raises:
        ConfigError: one of them is not a power of two.
    """
    sizes = tuple(int(part) if part.strip().isdigit() else 0 for part in text.split(","))
    if not all(size and not size & (size - 1) for size in sizes):
        raise ConfigError(f"expected powers of two, such as 1,8,64; got {text!r} (--replicas)")
    return sizes


QUICK_CLUSTER = ClusterBenchConfig(
    requests=60, replicas=2, sizes=(1, 2, 4), scale_requests=None, intervals_s=(0.0, 1.0)
)
