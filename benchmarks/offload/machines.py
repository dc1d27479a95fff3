"""Machines and models by data sheets, for full-size steps on the virtual clock.

Rates are those that large copies and products reach, not peaks: 25 of 32 GB/s, 220 of 312 TFLOP/s.
"""

from dataclasses import dataclass

from benchmarks.offload.schedule import Sizes, Speeds
from quire.layout.model import ModelSpec
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
