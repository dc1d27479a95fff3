"""Models and machines of paper 003 (KVPR) on the virtual clock.

The paper's baselines transfer all KV one layer ahead: the arm `prefetch`. KVPR is the arm `lA`, the
paper's split. Quire's own split is the arm `lB`.

The schedules of whole models run with the rates of `benchmarks.offload.machines`. On a GPU
`python -m benchmarks gpu --parts kvpr` measures the engine.
"""

from dataclasses import dataclass

from benchmarks.offload.arms import BY_NAME
from benchmarks.offload.machines import MACHINES
from benchmarks.offload.virtual import Case, Load, case_for
from benchmarks.paper.material import Material
from benchmarks.paper.shapes import shape

BASELINE, KVPR, PIPELINED = BY_NAME["prefetch"], BY_NAME["lA"], BY_NAME["lB"]
ARMS = (BASELINE, KVPR, PIPELINED)
A100 = MACHINES["a100"]
LATENCY_ROWS = 64
THROUGHPUT_ROWS, THROUGHPUT_BATCHES = 32, 8
MODELS = {
    "OPT-6.7B": "opt-6.7b",
    "OPT-13B": "opt-13b",
    "OPT-30B": "opt-30b",
    "LLaMa2-7B": "llama-2-7b",
    "LLaMa2-13B": "llama-2-13b",
}

_QUICK_LAYERS = 6


def layers_of(material: Material) -> int:
    """Layers on the virtual clock; 0: all."""
    return _QUICK_LAYERS if material.quick else 0


def case(
    material: Material,
    model: str,
    *,
    weights_on_device: bool = True,
    kv_value_bytes: float = 2,
    x_value_bytes: float = 2,
    machine: str = "a100",
) -> Case:
    """A model of the paper on the virtual clock.

    Args:
        material: whether the run is a small one.
        model: a name in MODELS.
        weights_on_device: whether weights stay on the device.
        kv_value_bytes: bytes of a KV element on the link.
        x_value_bytes: bytes of an activation element on the link.
        machine: name in `benchmarks.offload.machines`.
    """
    return case_for(
        shape(MODELS[model]),
        MACHINES[machine],
        layers=layers_of(material),
        weights_on_device=weights_on_device,
        kv_value_bytes=kv_value_bytes,
        x_value_bytes=x_value_bytes,
    )


def virtual_differences(material: Material, machine: str = "a100") -> tuple[str, ...]:
    """Differences of a step on the virtual clock."""
    speeds = MACHINES[machine]
    rates = (
        f"virtual clock: {speeds.name} at {speeds.link_bytes_per_s / 1e9:g} GB/s, "
        f"{speeds.flops_per_s / 1e12:g} TFLOP/s and {speeds.memory_bytes_per_s / 1e12:g} TB/s"
    )
    return (rates, f"{_QUICK_LAYERS} layers") if material.quick else (rates,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Decode steps of one generation with every arm of ARMS.

    Attributes:
        seconds: time of all decode steps, by arm.
        rows: rows that decode together.
        differences: differences from the paper's setting.
    """

    seconds: tuple[float, float, float]
    rows: int
    differences: tuple[str, ...]

    def tokens_per_s(self, arm: int, steps: int) -> float:
        """Tokens per second of the arm with a number in ARMS."""
        return self.rows * steps / self.seconds[arm]


def latency(material: Material, model: str, load: Load) -> Latency:
    """Latency of a generation with weights on the device."""
    found = case(material, model)
    steps = load.generated - 1
    base, kvpr, own = (load.rows * steps / found.tokens_per_s(arm, load) for arm in ARMS)
    return Latency(
        seconds=(base, kvpr, own), rows=load.rows, differences=virtual_differences(material)
    )
