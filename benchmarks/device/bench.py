"""What all parts of one run share: the configuration, the device, and one pool of host memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from benchmarks.common.host_bytes import HostBytes
from benchmarks.common.link_codecs import LinkCodecs
from benchmarks.common.offloaded_model import distinct_layers
from benchmarks.common.target import Target
from benchmarks.device.config import DeviceBenchConfig
from benchmarks.device.shapes import DecodeCase
from benchmarks.device.step_harness import StepHarness
from quire.errors import ConfigError
from quire.models.device_memory import free_device_bytes


@dataclass(slots=True)
class DeviceBench:
    """A run.

    Attributes:
        config: of all parts.
        target: the device.
    """

    config: DeviceBenchConfig
    target: Target
    _pool: list[HostBytes] = field(default_factory=list)

    @classmethod
    def of(cls, config: DeviceBenchConfig) -> "DeviceBench":
        """A run on the configuration's device."""
        return cls(config, Target.named(config.device))

    @property
    def pool(self) -> HostBytes:
        """The pinned pool, allocated at the first use because pinning takes seconds."""
        if not self._pool:
            self._pool.append(HostBytes(self.config.pinned_bytes, self.target))
        return self._pool[0]

    def drop_pool(self) -> None:
        """Free the pinned pool for a part whose engine pins its own; the next part allocates it."""
        self._pool.clear()

    def fitting(self, case: DecodeCase, link_codecs: LinkCodecs | None = None) -> DecodeCase:
        """The batch, with rows halved until it fits the pool and the device.

        Raises:
            ConfigError: a single row does not.
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
        self, case: DecodeCase, link_codecs: LinkCodecs | None = None, *, host: bool = False
    ) -> StepHarness:
        """A model of this batch, as large as fits."""
        fits = self.fitting(case, link_codecs)
        return StepHarness(fits, self.target, self.pool, link_codecs, host=host)

    def facts(self) -> Mapping[str, object]:
        """The device's, for whoever reads the result."""
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
        """For captions; a CPU has no link, and its numbers say so."""
        if self.target.on_gpu:
            return f"On {self.target.name}."
        return "On a CPU, where copies cross no link: only tries the bench out."
