"""Joint weights of a Transformers model on a GPU: one product for queries, keys and values.

The parameters of the modules become views of the joint weights, so that the modules still run and
nothing is stored twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from quire.kernels.triton.hardware import RowShape
from quire.models.native.layers import Norm, architecture_refusal, rotary_dim


@dataclass(frozen=True, slots=True, eq=False)
class JointLinear:
    """A linear layer."""

    weight: Float[Tensor, "outer inner"]
    bias: Float[Tensor, " outer"] | None

    def __call__(self, rows: Float[Tensor, "row inner"]) -> Float[Tensor, "row outer"]:
        return nn.functional.linear(rows, self.weight, self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class GpuLayer:
    """One layer."""

    attention_norm: Norm  # before attention
    mlp_norm: Norm  # before the MLP
    qkv: JointLinear
    heads: tuple[int, int]  # numbers of query and KV heads
    head_dim: int
    head_norms: tuple[Norm, Norm] | None  # of query and key heads
    output: JointLinear  # attention's output projection
    gate_up: JointLinear  # both inputs of the gated activation
    down: JointLinear
    scale: float  # factor on query-key products


@dataclass(frozen=True, slots=True, eq=False)
class GpuModel:
    """All layers, and what is before and after them."""

    embedding: nn.Module  # returns a row for each token
    layers: tuple[GpuLayer, ...]
    norm: Norm  # before the output head
    head: JointLinear
    rotary: nn.Module  # cosines and sines of positions


def gpu_refusal(model: PreTrainedModel) -> str | None:
    """Return the reason why the layers of a model cannot be fused on a GPU; None if they can."""
    reason = architecture_refusal(model)
    if reason is not None:
        return reason
    if model.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its weights are {model.dtype}; fused layers take float32, bfloat16 and float16"
    decoder: Any = model.model
    fused = [*decoder.layers.named_modules(), ("norm", decoder.norm), ("lm_head", model.lm_head)]
    for path, module in fused:
        if hasattr(module, "in_features") and type(module) is not nn.Linear:
            return f"{path} is a {type(module).__name__}, not a plain linear layer"
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{path} has hooks, which fused layers do not run"
    types = {parameter.dtype for parameter in model.parameters()}
    if types != {model.dtype}:
        return f"its weights have several types: {', '.join(sorted(map(str, types)))}"
    return None


def row_shape(model: PreTrainedModel) -> RowShape:
    """Return the sizes that the row-wise kernels of a model depend on."""
    decoder: Any = model.model
    return RowShape(
        width=int(model.config.hidden_size),
        head_dim=int(decoder.layers[0].self_attn.head_dim),
        rotary_dim=rotary_dim(decoder.rotary_emb),
    )


def join(model: PreTrainedModel) -> GpuModel:
    """Join the weights of a model with no `gpu_refusal`, one layer at a time."""
    decoder: Any = model.model
    return GpuModel(
        embedding=decoder.embed_tokens,
        layers=tuple(_layer(layer, model.config) for layer in decoder.layers),
        norm=_norm(decoder.norm),
        head=_own(model.lm_head),
        rotary=decoder.rotary_emb,
    )


def _layer(layer: Any, config: Any) -> GpuLayer:
    attention, mlp = layer.self_attn, layer.mlp
    num_heads = config.num_attention_heads
    norms = None
    if hasattr(attention, "q_norm"):
        norms = _norm(attention.q_norm), _norm(attention.k_norm)
    joined = GpuLayer(
        attention_norm=_norm(layer.input_layernorm),
        mlp_norm=_norm(layer.post_attention_layernorm),
        qkv=_joined(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj")),
        heads=(num_heads, config.num_key_value_heads or num_heads),
        head_dim=attention.head_dim,
        head_norms=norms,
        output=_own(attention.o_proj),
        gate_up=_joined(mlp, "gate_up_proj", ("gate_proj", "up_proj")),
        down=_own(mlp.down_proj),
        scale=float(attention.scaling),
    )
    if joined.qkv.weight.is_cuda:  # weights of other sizes do not fit the memory just freed
        torch.cuda.empty_cache()
    return joined


def _norm(module: Any) -> Norm:
    return Norm(module.weight.detach(), float(module.variance_epsilon))


def _own(linear: Any) -> JointLinear:
    bias = None if linear.bias is None else linear.bias.detach()
    return JointLinear(linear.weight.detach(), bias)


def _joined(parent: Any, joint_name: str, names: Sequence[str]) -> JointLinear:
    """Join linear layers of equal inputs; their parameters become views of the joint ones."""
    if hasattr(parent, joint_name):
        return _own(getattr(parent, joint_name))
    linears = [getattr(parent, name) for name in names]
    sizes = [linear.out_features for linear in linears]
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases = [linear.bias for linear in linears]
    bias = None
    if any(own is not None for own in biases):
        pairs = zip(biases, sizes, strict=True)
        bias = torch.cat([weight.new_zeros(n) if own is None else own.detach() for own, n in pairs])
    parts = [None] * len(sizes) if bias is None else torch.split(bias, sizes)
    for linear, own, part in zip(linears, torch.split(weight, sizes), parts, strict=True):
        linear.weight = nn.Parameter(own, requires_grad=False)
        if linear.bias is not None and part is not None:
            linear.bias = nn.Parameter(part, requires_grad=False)
    return JointLinear(weight, bias)
