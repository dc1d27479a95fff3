"""Configuration of the cluster benchmark."""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from quire.config.kv_config import KVConfig
from quire.sim.machine import MachineConfig, MachineName
from quire.sim.models import model_shape
from quire.sim.run import SimConfig
from quire.sim.traces.base import Trace, TraceOptions
from quire.sim.traces.loading import load_trace

PACKAGED = "mooncake_conversation.jsonl.gz"
BLOCK_TOKENS = 512  # of Mooncake's traces


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterBenchConfig:
    """Configuration of the benchmark.

    Attributes:
        trace: file in Mooncake's format; "": the first 2,000 requests of Mooncake's conversation
            trace, shipped with Quire.
        requests: number of first requests; None: all.
        model: a model shape of `quire simulate`.
        machine: machine of each replica.
        memory: KV memory of each replica.
        replicas: replicas of the trace as it was recorded.
        loads: factors on the arrival rate by name.
        sizes: numbers of replicas; the load grows with them.
        intervals_s: times between load reports.
        price_per_hour: price of a replica's machine.
    """

    trace: str = ""
    requests: int | None = None
    model: str = "llama-3.1-8b"
    machine: MachineName = "a100"
    memory: str = "40GiB"
    replicas: int = 8
    loads: tuple[tuple[str, float], ...] = (("moderate", 0.7), ("saturated", 1.0))
    sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    intervals_s: tuple[float, ...] = (0.0, 0.1, 1.0, 5.0)
    price_per_hour: float = 2.0

    def load(self, options: TraceOptions | None = None) -> Trace:
        """The trace.

        Raises:
            TraceError: the file cannot be read.
        """
        options = options or TraceOptions(requests=self.requests)
        packaged = Path(str(resources.files("quire") / "assets" / PACKAGED))
        return load_trace(Path(self.trace) if self.trace else packaged, options)

    def engine(self) -> SimConfig:
        """Configuration of one replica, with the engine's defaults."""
        return SimConfig(
            model=model_shape(self.model),
            rates=MachineConfig(name=self.machine).rates(),
            kv=KVConfig(memory=self.memory, page_tokens=BLOCK_TOKENS),
        )


QUICK_CLUSTER = ClusterBenchConfig(requests=60, replicas=2, sizes=(1, 2, 4), intervals_s=(0.0, 1.0))
