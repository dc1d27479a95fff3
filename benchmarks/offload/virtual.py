"""Steps of whole models on the virtual clock: what a step takes, and what a generation takes."""

from dataclasses import dataclass, replace

from benchmarks.offload.arms import BY_NAME, Arm, Layout, lay_out, step_work
from benchmarks.offload.machines import MACHINES, MODELS, sizes_of, speeds_of
from benchmarks.offload_schedule.executor import VirtualClock
from benchmarks.offload_schedule.planner import fastest
from quire.offload.profiler import Sizes, Speeds


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Rows that generate together.

    Attributes:
        rows: of a batch.
        prompt: tokens of each.
        generated: tokens of each; the first is the prompt's.
        batches: that share a layer.
    """

    rows: int
    prompt: int
    generated: int
    batches: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on a machine, with what crosses its link.

    Attributes:
        sizes: bytes.
        speeds: of the machine.
        layers: of the model.
    """

    sizes: Sizes
    speeds: Speeds
    layers: int

    def layout(self, arm: Arm, rows: int, tokens: int, batches: int = 1) -> Layout:
        """How an arm does a layer."""
        return lay_out(arm, self.speeds, self.sizes, rows=rows, tokens=tokens, batches=batches)

    def step_seconds(self, arm: Arm, rows: int, tokens: int, batches: int = 1) -> int | float:
        """A step of equal batches; where X has a ring, the fastest of that and plainer layouts."""
        layout = self.layout(arm, rows, tokens, batches)
        ways = [(layout.batch, layout.rules)]
        if arm.ring:
            plain = self.layout(BY_NAME["lA"], rows, tokens, batches)
            ways += [(layout.batch, replace(layout.rules, x_ring=0)), (plain.batch, plain.rules)]
        works = [
            (step_work(batch, self.layers, self.sizes, self.speeds, batches=batches), rules)
            for batch, rules in ways
        ]
        return VirtualClock().run(fastest(works)[1]).seconds

    def tokens_per_s(self, arm: Arm, load: Load) -> float:
        """Of the decode steps of a generation, all batches.

        A step's time is a straight line between a few positions but for whole tokens, so it is
        taken at the first, the middle and the last (Simpson's rule).
        """
        first, last = load.prompt, load.prompt + load.generated - 1
        times = [
            self.step_seconds(arm, load.rows, load.rows * length, load.batches)
            for length in (first, (first + last) // 2, last)
        ]
        mean_s = (times[0] + 4 * times[1] + times[2]) / 6
        return load.rows * load.batches / mean_s


def case_of(
    model: str,
    machine: str,
    *,
    layers: int = 0,
    weights_here: bool = True,
    kv_value_bytes: int | float = 2,
    x_value_bytes: int | float = 2,
) -> Case:
    """A case.

    Args:
        model: of `MODELS`.
        machine: of `MACHINES`.
        layers: to run; 0: the model's.
        weights_here: on the device.
        kv_value_bytes: of a number of KV on the link.
        x_value_bytes: of an activation's.
    """
    spec = MODELS[model]
    sizes = sizes_of(
        spec,
        kv_value_bytes=kv_value_bytes,
        x_value_bytes=x_value_bytes,
        weights_here=weights_here,
    )
    speeds = speeds_of(MACHINES[machine], spec, sizes)
    return Case(sizes=sizes, speeds=speeds, layers=layers or spec.num_layers)


def one_by_one(arm: Arm, *, fine: bool) -> Arm:
    """A variant that transfers layers one by one, with coarse or fine weight copies."""
    return replace(arm, rules=replace(arm.rules, prefetch=False, fine_weights=fine))
