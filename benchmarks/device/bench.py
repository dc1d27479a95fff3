"""State shared by all parts of a run: configuration, device, pool of pinned host memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from benchmarks.common.decode_batch import DecodeBatch
from benchmarks.common.host_bytes import HostBytes
from benchmarks.common.link_codecs import LinkCodecs
from benchmarks.common.offloaded_model import distinct_layers
from benchmarks.common.target import Target
from benchmarks.device.config import DeviceBenchConfig
from benchmarks.device.step_harness import StepHarness
from quire.errors import ConfigError
from quire.models.device_memory import free_device_bytes

Batch = TypeVar("Batch", bound=DecodeBatch)


@dataclass(slots=True)
class DeviceBench:
    """A run of the benchmark.

    Attributes:
        config: configuration of all parts.
        target: the device.
    """

    config: DeviceBenchConfig
    target: Target
    _pool: list[HostBytes] = field(default_factory=list)

    @classmethod
    def of(cls, config: DeviceBenchConfig) -> "DeviceBench":
        """Create a run on the configured device."""
        return cls(config, Target.named(config.device))

    @property
    def pool(self) -> HostBytes:
        """The pinned pool, allocated at the first use because pinning takes seconds."""
        if not self._pool:
            self._pool.append(HostBytes(self.config.pinned_bytes, self.target))
        return self._pool[0]

    def drop_pool(self) -> None:
        """Free the pinned pool, for a part whose engine pins its own memory."""
        self._pool.clear()

    def fitting(self, case: Batch, link_codecs: LinkCodecs | None = None) -> Batch:
        """The batch, with its rows halved until it fits the pool and the device.

        Raises:
            ConfigError: a single row does not fit.
        """
        while True:
            try:
                distinct_layers(case, self.target, self.pool, link_codecs or LinkCodecs())
            except ConfigError:
                if case.rows == 1:
                    raise
                case = replace(case, rows=case.rows // 2)
            else:
                return case

    def harness(
        self, case: DecodeBatch, link_codecs: LinkCodecs | None = None, *, host: bool = False
    ) -> StepHarness:
        """Create a harness for the largest batch of this case that fits."""
        fits = self.fitting(case, link_codecs)
        return StepHarness(fits, self.target, self.pool, link_codecs, host=host)

    def facts(self) -> Mapping[str, object]:
        """Facts about the device and the pool, for the result."""
        return {
            "device": self.target.name,
            "on_gpu": self.target.on_gpu,
            "free_device_bytes": free_device_bytes(self.target.device),
            "pinned_bytes": self.pool.num_bytes if self._pool else 0,
            "touch_s": self.pool.touch_s if self._pool else 0.0,
            "pin_s": self.pool.pin_s if self._pool else 0.0,
        }

    @property
    def where(self) -> str:
        """First words of captions; on a CPU they state that no link is measured."""
        if self.target.on_gpu:
            return f"On {self.target.name}."
        return "On a CPU, where copies use no link: a trial run only."
