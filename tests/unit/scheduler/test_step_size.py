"""Sizes of steps: by objective, and by what copies and the device have taken."""

from dataclasses import dataclass, field

import pytest

from quire.errors import ConfigError
from quire.plan.offload.resident import MOST_BATCHES, WeightsPlacement
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.step_size import StepSize, most_batches


@dataclass
class Bringing:
    """Something that brings layers: what it has taken so far."""

    device_s: float = 0.0
    copied_s: float = 0.0
    num_bytes: int = 0
    place: WeightsPlacement = field(
        default_factory=lambda: WeightsPlacement(
            other_bytes=0, layer_bytes=(100,) * 4, offloaded_layers=(0, 1, 2, 3)
        )
    )

    def step(self, size: StepSize, *, device_s: float, copy_s: float, tokens: int) -> None:
        """One pass."""
        self.device_s += device_s
        self.copied_s += copy_s
        self.num_bytes += self.place.host_bytes
        size.learn(tokens)


def test_a_step_is_one_batch_where_nothing_is_brought_and_for_latency():
    assert StepSize(64).tokens == 64
    assert StepSize(64, "throughput").tokens == 64
    size, bringing = StepSize(64, "latency", offloaded_layers := Bringing()), offloaded_layers
    bringing.step(size, device_s=1.0, copy_s=5.0, tokens=64)

    assert size.tokens == 64
    assert most_batches("latency", bringing) == most_batches("auto", None) == 1


def test_throughput_shares_as_much_as_can_be():
    assert StepSize(64, "throughput", Bringing()).tokens == 64 * MOST_BATCHES


def test_auto_takes_so_many_batches_as_hide_the_copies_and_follows_them():
    bringing = Bringing()
    size = StepSize(64, "auto", bringing)
    assert size.num_batches == 1

    bringing.step(size, device_s=1.0, copy_s=2.5, tokens=64)
    assert size.num_batches == 3
    bringing.step(size, device_s=3.0, copy_s=2.5, tokens=3 * 64)  # still one second a batch
    assert size.num_batches == 3
    for _ in range(40):  # the device has become slow: one batch hides the copies
        bringing.step(size, device_s=4.0, copy_s=2.5, tokens=64)
    assert size.num_batches == 1


def test_small_steps_say_nothing_of_a_full_batch():
    """A step of few rows takes nearly as long as a full one would."""
    bringing = Bringing()
    size = StepSize(64, "auto", bringing)
    bringing.step(size, device_s=1.0, copy_s=2.5, tokens=4)
    assert size.num_batches == 1
    bringing.step(size, device_s=1.0, copy_s=2.5, tokens=64)
    bringing.step(size, device_s=1.0, copy_s=2.5, tokens=4)
    assert size.num_batches == 3


def test_what_was_run_before_the_engine_began_is_not_counted():
    bringing = Bringing(device_s=100.0)
    size = StepSize(64, "auto", bringing)
    bringing.step(size, device_s=1.0, copy_s=2.5, tokens=64)

    assert size.num_batches == 3


def test_an_unknown_objective_is_refused():
    with pytest.raises(ConfigError, match="auto, latency, throughput, got 'speed'"):
        ScheduleConfig(objective="speed")
