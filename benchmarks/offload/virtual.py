"""Machines, variants and cases of the parts on the virtual clock: full-size steps by data sheets.

Rates are those that large copies and products reach, not peaks: 25 of 32 GB/s, 220 of 312 TFLOP/s.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.common.kvpr import paper_split
from benchmarks.offload.schedule import (
    BatchTokens,
    Rules,
    Schedule,
    Sizes,
    Speeds,
    StepWork,
    even_layers,
    fastest,
    ring_rules,
    run_clock,
)
from quire.layout.model import ModelSpec
from quire.offload.split import OffloadRates, pipelined_split
from quire.plan.rates import CopyRate


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpeeds:
    """Speeds of an accelerator and its host.

    Attributes:
        name: display name.
        link_bytes_per_s: link rate in each direction.
        flops_per_s: compute rate of products in half precision.
        memory_bytes_per_s: memory bandwidth of the device.
    """

    name: str
    link_bytes_per_s: float
    flops_per_s: float
    memory_bytes_per_s: float


MACHINES = {
    "a100": MachineSpeeds(
        name="A100, PCIe 4 x16",
        link_bytes_per_s=25e9,
        flops_per_s=220e12,
        memory_bytes_per_s=1.4e12,
    ),
    "rtx5000": MachineSpeeds(
        name="Quadro RTX 5000, PCIe 4 x8",
        link_bytes_per_s=12.5e9,
        flops_per_s=60e12,
        memory_bytes_per_s=0.4e12,
    ),
    "h200": MachineSpeeds(
        name="H200, PCIe 5 x16",
        link_bytes_per_s=55e9,
        flops_per_s=650e12,
        memory_bytes_per_s=4.3e12,
    ),
}


def _opt(hidden: int, layers: int, heads: int) -> ModelSpec:
    config = {
        "model_type": "opt",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "ffn_dim": 4 * hidden,
        "vocab_size": 50_272,
        "max_position_embeddings": 2048,
    }
    return ModelSpec.from_config(config)


def _llama_3_8b() -> ModelSpec:
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14_336,
        "vocab_size": 128_256,
        "max_position_embeddings": 8192,
    }
    return ModelSpec.from_config(config)


MODELS = {
    "OPT-6.7B": _opt(4096, 32, 32),
    "OPT-13B": _opt(5120, 40, 40),
    "OPT-30B": _opt(7168, 48, 56),
    "Llama-3-8B": _llama_3_8b(),
}


def sizes_of(
    model: ModelSpec,
    *,
    kv_value_bytes: int | float = 2,
    x_value_bytes: int | float = 2,
    weights_on_device: bool = True,
) -> Sizes:
    """Bytes of a model's layer in half precision.

    Args:
        model: shape of the model.
        kv_value_bytes: bytes of a KV element on the link, with the codec's metadata.
        x_value_bytes: bytes of an activation element on the link, with the codec's metadata.
        weights_on_device: whether weights are on the device; otherwise they cross the link.
    """
    hidden, kv_values = model.hidden_size, model.kv_values_per_layer_token
    matrices = 3 if model.gated_mlp else 2
    loaded = 0 if weights_on_device else 2
    return Sizes(
        kv_bytes=kv_values * kv_value_bytes,
        x_bytes=hidden * x_value_bytes,
        new_kv_bytes=kv_values * kv_value_bytes,
        new_x_bytes=hidden * x_value_bytes,
        hidden_bytes=hidden * loaded,
        kv_weight_bytes=hidden * kv_values * loaded,
        qo_weight_bytes=2 * hidden * model.num_heads * model.head_dim * loaded,
        mlp_weight_bytes=matrices * hidden * model.intermediate_size * loaded,
    )


def speeds_of(machine: MachineSpeeds, model: ModelSpec) -> Speeds:
    """Durations of a layer's operations: products by FLOPs, attention and weights by bytes.

    Args:
        machine: speeds of the machine.
        model: shape of the model.
    """
    kv_bytes = 2 * model.kv_values_per_layer_token
    matrices = 3 if model.gated_mlp else 2
    attention = 2 * model.hidden_size * model.head_dim * (model.num_heads + model.num_kv_heads)
    weights = attention + matrices * model.hidden_size * model.intermediate_size
    link = CopyRate(bytes_per_s=machine.link_bytes_per_s, call_s=1e-5)
    return Speeds(
        inward=link,
        outward=link,
        project_token_s=2
        * model.hidden_size
        * model.kv_values_per_layer_token
        / machine.flops_per_s,
        project_call_s=1e-5,
        attend_token_s=kv_bytes / machine.memory_bytes_per_s,
        layer_s=2 * weights / machine.memory_bytes_per_s,
        row_s=2 * weights / machine.flops_per_s,
    )


Division = Callable[[OffloadRates, int], int]
"""Maps (rates, tokens) to the number of recomputed tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One variant of a decode step.

    Attributes:
        name: name of the variant.
        label: display name.
        rules: rules of the layout.
        divide: division of the tokens.
        ring: whether X is staged in a ring of the smallest sufficient size.
    """

    name: str
    label: str
    rules: Rules
    divide: Division
    ring: bool = False


def _none(_rates: OffloadRates, _tokens: int) -> int:
    return 0


ARMS = (
    Arm(name="prefetch", label="prefetch only", rules=Rules(), divide=_none),
    Arm(name="lA", label="the paper's split", rules=Rules(x_chunks=1), divide=paper_split),
    Arm(name="lB", label="pipelined split", rules=Rules(), ring=True, divide=pipelined_split),
)
BY_NAME = {arm.name: arm for arm in ARMS}


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a layer for one arm.

    Attributes:
        batch: division of the tokens.
        rules: rules of the schedule.
        rates: rates of the layer, with the fixed times of its chunks.
    """

    batch: BatchTokens
    rules: Rules
    rates: OffloadRates


def lay_out(
    arm: Arm, speeds: Speeds, sizes: Sizes, *, rows: int, tokens: int, batches: int = 1
) -> Layout:
    """Divide a batch's tokens for an arm; the rates include the fixed time of each chunk.

    Args:
        arm: the arm.
        speeds: speeds of the machine.
        sizes: bytes on the link; all batches share the transfer of weights.
        rows: rows of the batch.
        tokens: tokens of all rows.
        batches: number of batches that share a layer.
    """
    plain = speeds.rates(sizes, rows=rows, tokens=tokens, batches=batches)
    rules = arm.rules
    if arm.ring:
        x = arm.divide(plain, tokens)
        ring = ring_rules(plain, tokens, x, call_s=speeds.inward.call_s)
        rules = replace(rules, x_chunks=ring.x_chunks, x_ring=ring.x_ring)
    rates = _with_calls(plain, speeds, rules)
    x = arm.divide(rates, tokens)
    batch = BatchTokens(rows=rows, x=x, kv=tokens - x)
    return Layout(batch, rules, rates)


def _with_calls(rates: OffloadRates, speeds: Speeds, rules: Rules) -> OffloadRates:
    copies = rules.x_chunks * (1 + bool(rules.x_ring))
    return replace(
        rates,
        other_s=rates.other_s + rules.x_chunks * speeds.project_call_s,
        link_s=rates.link_s + copies * speeds.inward.call_s,
    )


def step_work(
    batch: BatchTokens, num_layers: int, sizes: Sizes, speeds: Speeds, *, batches: int = 1
) -> StepWork:
    """A step of equal batches through all layers."""
    layers = even_layers((batch,) * batches, num_layers)
    return StepWork(layers=layers, sizes=sizes, speeds=speeds)


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
