"""Traces and machine of the simulated parts of the memory benchmark."""

from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from quire.config.kv_config import KVConfig
from quire.sim.machine import MachineConfig, MachineName
from quire.sim.models import model_shape
from quire.sim.run import SimConfig
from quire.sim.traces.base import Trace, TraceOptions
from quire.sim.traces.loading import load_trace

AZURE, MOONCAKE = "azure_conversation.csv.gz", "mooncake_conversation.jsonl.gz"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedConfig:
    """Configuration of simulated traces.

    Attributes:
        trace: file with lengths and times of conversations; "": the Azure trace shipped with Quire.
        prefix_trace: file with the shared prefixes of prompts; "": the start of Mooncake's
            conversation trace, shipped with Quire.
        requests: number of first requests of each trace; None: all.
        model: a model shape of `quire simulate`.
        machine: machine whose rates time the steps.
        memory: KV memory.
    """

    trace: str = ""
    prefix_trace: str = ""
    requests: int | None = None
    model: str = "llama-3.1-8b"
    machine: MachineName = "a100"
    memory: int | str = "16GiB"

    def conversations(self, options: TraceOptions | None = None) -> Trace:
        """The trace of lengths and times.

        Raises:
            TraceError: the file cannot be read.
        """
        return self._load(self.trace, AZURE, options)

    def prefixes(self) -> Trace:
        """The trace of shared prefixes.

        Raises:
            TraceError: the file cannot be read.
        """
        return self._load(self.prefix_trace, MOONCAKE, None)

    def _load(self, named: str, packaged: str, options: TraceOptions | None) -> Trace:
        path = Path(named) if named else Path(str(resources.files("quire") / "assets" / packaged))
        return load_trace(path, replace(options or TraceOptions(), requests=self.requests))

    def run_config(self) -> SimConfig:
        """Simulation config with the engine's defaults."""
        return SimConfig(
            model=model_shape(self.model),
            rates=MachineConfig(name=self.machine).rates(),
            kv=KVConfig(memory=self.memory),
        )
