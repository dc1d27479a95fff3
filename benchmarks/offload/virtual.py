"""Steps of whole models on the virtual clock: step time and generation throughput."""

from dataclasses import dataclass, replace

from benchmarks.offload.arms import BY_NAME, Arm, Layout, lay_out, step_work
from benchmarks.offload.machines import MACHINES, MODELS, sizes_of, speeds_of
from benchmarks.offload.schedule import Schedule, Sizes, Speeds, fastest, run_clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Rows that generate together.

    Attributes:
        rows: rows of a batch.
        prompt: prompt tokens of each row.
        generated: output tokens of each row; prefill generates the first.
        batches: number of batches that share a layer.
    """

    rows: int
    prompt: int
    generated: int
    batches: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on a machine.

    Attributes:
        sizes: bytes on the link.
        speeds: speeds of the machine.
        layers: number of layers.
    """

    sizes: Sizes
    speeds: Speeds
    layers: int

    def layout(self, arm: Arm, rows: int, tokens: int, batches: int = 1) -> Layout:
        """Layout of an arm's layer."""
        return lay_out(arm, self.speeds, self.sizes, rows=rows, tokens=tokens, batches=batches)

    def step_seconds(self, arm: Arm, rows: int, tokens: int, batches: int = 1) -> int | float:
        """Duration of a step of equal batches; see `schedule`."""
        return run_clock(self.schedule(arm, rows, tokens, batches)).seconds

    def schedule(self, arm: Arm, rows: int, tokens: int, batches: int = 1) -> Schedule:
        """Schedule of a step of equal batches; with a ring, the fastest of three layouts."""
        layout = self.layout(arm, rows, tokens, batches)
        variants = [(layout.batch, layout.rules)]
        if arm.ring:
            plain = self.layout(BY_NAME["lA"], rows, tokens, batches)
            variants += [
                (layout.batch, replace(layout.rules, x_ring=0)),
                (plain.batch, plain.rules),
            ]
        works = [
            (step_work(batch, self.layers, self.sizes, self.speeds, batches=batches), rules)
            for batch, rules in variants
        ]
        return fastest(works)[1]

    def tokens_per_s(self, arm: Arm, load: Load) -> float:
        """Throughput of a generation's decode steps over all batches.

        The step time is piecewise linear in the position, except for rounding to whole tokens, so
        Simpson's rule averages the first, middle and last step.

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
    weights_on_device: bool = True,
    kv_value_bytes: int | float = 2,
    x_value_bytes: int | float = 2,
) -> Case:
    """Return the case of a model on a machine.

    Args:
        model: a name in `MODELS`.
        machine: a name in `MACHINES`.
        layers: layers to run; 0: all layers of the model.
        weights_on_device: whether weights are on the device.
        kv_value_bytes: bytes of a KV element on the link.
        x_value_bytes: bytes of an activation element on the link.
    """
    spec = MODELS[model]
    sizes = sizes_of(
        spec,
        kv_value_bytes=kv_value_bytes,
        x_value_bytes=x_value_bytes,
        weights_on_device=weights_on_device,
    )
    return Case(
        sizes=sizes,
        speeds=speeds_of(MACHINES[machine], spec),
        layers=layers or spec.num_layers,
    )


def one_by_one(arm: Arm, *, fine: bool) -> Arm:
    """A variant that transfers layers one by one, with coarse or fine weight copies."""
    return replace(arm, rules=replace(arm.rules, prefetch=False, fine_weights=fine))
