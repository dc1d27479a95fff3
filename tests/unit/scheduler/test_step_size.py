"""Step sizes by objective and by measured times of weight copies and the device."""

from dataclasses import dataclass, field

import pytest

from quire.errors import ConfigError
from quire.plan.weights import MAX_BATCHES, WeightsPlacement
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.step import StepSize, max_batches


@dataclass
class OffloadedLayers:
    """Totals of a stand-in for the layer prefetch."""

    device_s: float = 0.0
    copied_s: float = 0.0
    num_bytes: int = 0
    place: WeightsPlacement = field(
        default_factory=lambda: WeightsPlacement(
            other_bytes=0, layer_bytes=(100,) * 4, offloaded_layers=(0, 1, 2, 3)
        )
    )

    def step(self, size: StepSize, *, device_s: float, copy_s: float, tokens: int) -> None:
        """Add one forward pass."""
        self.device_s += device_s
        self.copied_s += copy_s
        self.num_bytes += self.place.host_bytes
        size.learn(tokens)


def test_step_is_one_batch_without_offloaded_layers_or_for_latency():
    assert StepSize(64).tokens == 64
    assert StepSize(64, "throughput").tokens == 64
    layers = OffloadedLayers()
    size = StepSize(64, "latency", layers)
    layers.step(size, device_s=1.0, copy_s=5.0, tokens=64)

    assert size.tokens == 64
    assert max_batches("latency", layers) == max_batches("auto", None) == 1


def test_throughput_objective_uses_the_maximum_number_of_batches():
    assert StepSize(64, "throughput", OffloadedLayers()).tokens == 64 * MAX_BATCHES


def test_auto_objective_uses_as_many_batches_as_hide_the_copies():
    layers = OffloadedLayers()
    size = StepSize(64, "auto", layers)
    assert size.num_batches == 1

    layers.step(size, device_s=1.0, copy_s=2.5, tokens=64)
    assert size.num_batches == 3
    layers.step(size, device_s=3.0, copy_s=2.5, tokens=3 * 64)  # still one second per batch
    assert size.num_batches == 3
    for _ in range(40):  # a slower device: one batch hides the copies
        layers.step(size, device_s=4.0, copy_s=2.5, tokens=64)
    assert size.num_batches == 1


def test_small_steps_do_not_change_the_estimate_for_a_full_batch():
    """A step of few rows takes nearly as long as a full step."""
    layers = OffloadedLayers()
    size = StepSize(64, "auto", layers)
    layers.step(size, device_s=1.0, copy_s=2.5, tokens=4)
    assert size.num_batches == 1
    layers.step(size, device_s=1.0, copy_s=2.5, tokens=64)
    layers.step(size, device_s=1.0, copy_s=2.5, tokens=4)
    assert size.num_batches == 3


def test_times_from_before_the_engine_started_are_not_counted():
    layers = OffloadedLayers(device_s=100.0)
    size = StepSize(64, "auto", layers)
    layers.step(size, device_s=1.0, copy_s=2.5, tokens=64)

    assert size.num_batches == 3


def test_unknown_objective_is_rejected():
    with pytest.raises(ConfigError, match="auto, latency, throughput, got 'speed'"):
        ScheduleConfig(objective="speed")
