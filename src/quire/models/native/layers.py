"""Fused layers of a Transformers model: joint packed weights, and modules that share them.

The joint products (queries, keys and values; gate and up) own the weights. The modules of the
Transformers model read the same weights, so paths that run modules (the comparison at load,
recomputation of keys and values) work and nothing is stored twice. On a GPU the parameters of the
modules become views of the joint weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from quire.kernels.native.arguments import ADD, GATE_COLUMNS, GATE_SILU, PANEL_COLUMNS, STORE
from quire.kernels.native.chain import NARROW_LANES, HeadShape
from quire.kernels.native.linear import (
    PackedWeight,
    Products,
    can_pack,
    pack,
    pack_bias,
    pack_gated,
    pack_parts,
)
from quire.kernels.triton.hardware import RowShape
from quire.layout.model import ModelSpec
from quire.models.native_linear import PackedEmbedding, PackedLinear
from quire.models.packing import MappedFiles, head_codec, trim_free_memory

FAMILIES = frozenset(
    {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
    }
)
KINDS = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """An RMSNorm: weight (float32 in C layers), and the number added to the mean square."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class FusedProduct:
    """A product with a packed weight."""

    weight: PackedWeight
    bias: Tensor | None = None  # float32 [columns of all panels]
    finish: int = STORE  # STORE, ADD to the output, or GATE_SILU


@dataclass(frozen=True, slots=True, eq=False)
class FusedLayer:
    """One layer."""

    attention_norm: Norm  # before attention
    mlp_norm: Norm  # before the MLP
    qkv: FusedProduct  # joint product of queries, keys and values
    heads: HeadShape  # layout of its output
    output: FusedProduct  # added to the residual stream
    gate_up: FusedProduct  # gated product of the MLP
    down: FusedProduct  # added to the residual stream
    scale: float  # factor on query-key products


@dataclass(frozen=True, slots=True, eq=False)
class FusedModel:
    """All layers, and what is before and after them."""

    embedding: nn.Module  # returns a row for each token
    layers: tuple[FusedLayer, ...]
    norm: Norm  # before the output head
    head: FusedProduct
    rotary: nn.Module  # cosines and sines of positions


def refusal(model: PreTrainedModel) -> str | None:
    """Return the reason why a model cannot be fused; None if it can."""
    reason = architecture_refusal(model)
    if reason is not None:
        return reason
    if model.device.type != "cpu":
        return f"the model is on {model.device.type}, and these fused layers run on a CPU"
    if model.dtype not in KINDS:
        return f"its weights are {model.dtype}; fused layers take float32 and bfloat16"
    return _layer_refusal(model)


def architecture_refusal(model: PreTrainedModel) -> str | None:
    """Return the reason why an architecture has no fused layers on any device, or None."""
    name = type(model).__name__
    if name not in FAMILIES:
        return f"{name} is not among the fused architectures ({', '.join(sorted(FAMILIES))})"
    config: Any = model.config
    if config.hidden_act not in ("silu", "swish"):
        return f"its activation is {config.hidden_act!r}; fused layers compute silu"
    return None


def _layer_refusal(model: PreTrainedModel) -> str | None:
    decoder: Any = model.model
    for layer in decoder.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, module in parent.named_modules():
                if hasattr(module, "in_features") and type(module) is not nn.Linear:
                    return f"{name} is a {type(module).__name__}, not a plain linear layer"
        if any(linear.bias is not None for linear in layer.mlp.children() if _is_linear(linear)):
            return "its MLP has biases"
    for linear in (module for module in model.modules() if _is_linear(module)):
        if not can_pack(linear.in_features, KINDS[model.dtype]) or linear.in_features % 16:
            return f"a linear layer has {linear.in_features} inputs, not a multiple of 16"
    head_dim = ModelSpec.from_config(model.config.to_dict()).head_dim
    rotary = rotary_dim(decoder.rotary_emb)
    if rotary % (2 * NARROW_LANES) or head_dim % NARROW_LANES:
        return f"its heads have {head_dim} elements, {rotary} of them rotated"
    return None


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear


def fuse(model: PreTrainedModel, products: Products, kind: str | None = None) -> FusedModel:
    """Pack the weights of a model and replace its linear layers by modules that share them.

    Layers are packed one at a time; the original weights are freed before the next.
    """
    decoder: Any = model.model
    plain = KINDS[model.dtype]
    rotary = rotary_dim(decoder.rotary_emb)
    files = MappedFiles()
    layers = []
    for layer in decoder.layers:
        weights = [weight.detach() for weight in layer.parameters()]
        layers.append(_fuse_layer(layer, products, kind or plain, model.config, rotary))
        files.release_pages(weights)
        del weights
        trim_free_memory()  # else all weights are in memory twice
    weights = [model.lm_head.weight.detach()]
    head = _fuse_head(model, products, head_codec(kind) or plain)
    files.release_pages(weights)
    return FusedModel(
        embedding=decoder.embed_tokens,
        layers=tuple(layers),
        norm=_norm(decoder.norm),
        head=head,
        rotary=decoder.rotary_emb,
    )


def rotary_dim(rotary: Any) -> int:
    """Leading elements of a head that a rotary module rotates."""
    device = rotary.inv_freq.device
    positions = torch.zeros(1, 1, dtype=torch.int64, device=device)
    cosine, _ = rotary(torch.empty(1, device=device), positions)
    return int(cosine.shape[-1])


def _norm(module: Any) -> Norm:
    weight = module.weight.detach().to(torch.float32, copy=True)  # not of a mapped file
    return Norm(weight, float(module.variance_epsilon))


def _fuse_layer(
    layer: Any, products: Products, kind: str, config: Any, rotary_dim: int
) -> FusedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    num_heads = config.num_attention_heads
    num_kv_heads = config.num_key_value_heads or num_heads
    heads = (num_heads, num_kv_heads, num_kv_heads)
    qkv, columns = _fuse_qkv(attention, products, kind, heads)
    norms = None
    if hasattr(attention, "q_norm"):
        norms = (_norm(attention.q_norm).weight, _norm(attention.k_norm).weight)
    shape = HeadShape(
        columns=columns,
        heads=heads,
        head_dim=attention.head_dim,
        rotary_dim=rotary_dim,
        norms=norms,
        eps=0.0 if norms is None else _norm(attention.q_norm).eps,
    )
    return FusedLayer(
        attention_norm=_norm(layer.input_layernorm),
        mlp_norm=_norm(layer.post_attention_layernorm),
        qkv=qkv,
        heads=shape,
        output=_fuse_output(attention, "o_proj", products, kind),
        gate_up=_fuse_gate(mlp, products, kind),
        down=_fuse_output(mlp, "down_proj", products, kind),
        scale=float(attention.scaling),
    )


def _fuse_qkv(
    attention: Any, products: Products, kind: str, heads: tuple[int, ...]
) -> tuple[FusedProduct, tuple[int, int, int]]:
    lengths = [count * attention.head_dim for count in heads]
    names = ("q_proj", "k_proj", "v_proj")
    joint = hasattr(attention, "qkv_proj")
    if joint:
        weights = attention.qkv_proj.weight.detach().split(lengths)
        biases: list[Tensor | None] = [None] * 3
    else:
        weights = tuple(getattr(attention, name).weight.detach() for name in names)
        biases = [getattr(attention, name).bias for name in names]
    packed, starts = pack_parts(weights, kind)
    bias = pack_bias(biases, lengths)
    if joint:
        columns = torch.cat([s + torch.arange(n) for s, n in zip(starts, lengths, strict=True)])
        attention.qkv_proj = PackedLinear(products.prepare(packed, bias=bias), products, columns)
    else:
        for name, start, length in zip(names, starts, lengths, strict=True):
            weight = packed.part(start, length)
            places = slice(start, start + len(weight.panels) * PANEL_COLUMNS)
            product = products.prepare(weight, bias=None if bias is None else bias[places])
            setattr(attention, name, PackedLinear(product, products))
    first, second, third = starts
    return FusedProduct(packed, bias), (first, second, third)


def _fuse_gate(mlp: Any, products: Products, kind: str) -> FusedProduct:
    joint = hasattr(mlp, "gate_up_proj")
    if joint:
        gate, other = mlp.gate_up_proj.weight.detach().chunk(2)
    else:
        gate, other = mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()
    packed = pack_gated(gate, other, kind)
    half = torch.arange(len(gate))
    gates = half // GATE_COLUMNS * PANEL_COLUMNS + half % GATE_COLUMNS
    whole = products.prepare(packed.whole_panels())
    if joint:
        both = torch.cat([gates, gates + GATE_COLUMNS])
        mlp.gate_up_proj = PackedLinear(whole, products, both)
    else:
        mlp.gate_proj = PackedLinear(whole, products, gates)
        mlp.up_proj = PackedLinear(whole, products, gates + GATE_COLUMNS)
    return FusedProduct(packed, finish=GATE_SILU)


def _fuse_output(parent: Any, name: str, products: Products, kind: str) -> FusedProduct:
    linear = getattr(parent, name)
    packed = pack(linear.weight.detach(), kind)
    bias = pack_bias([linear.bias], [packed.outer])
    setattr(parent, name, PackedLinear(products.prepare(packed, bias=bias), products))
    return FusedProduct(packed, bias, ADD)


def _fuse_head(model: Any, products: Products, kind: str) -> FusedProduct:
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    packed = pack(model.lm_head.weight.detach(), kind)
    bias = pack_bias([model.lm_head.bias], [packed.outer])
    product = products.prepare(packed, bias=bias)
    if tied:
        model.model.embed_tokens = PackedEmbedding(packed, model.dtype)
    model.lm_head = PackedLinear(product, products)
    return FusedProduct(packed, bias)


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
        norm=_gpu_norm(decoder.norm),
        head=_own(model.lm_head),
        rotary=decoder.rotary_emb,
    )


def _layer(layer: Any, config: Any) -> GpuLayer:
    attention, mlp = layer.self_attn, layer.mlp
    num_heads = config.num_attention_heads
    norms = None
    if hasattr(attention, "q_norm"):
        norms = _gpu_norm(attention.q_norm), _norm(attention.k_norm)
    joined = GpuLayer(
        attention_norm=_gpu_norm(layer.input_layernorm),
        mlp_norm=_gpu_norm(layer.post_attention_layernorm),
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


def _gpu_norm(module: Any) -> Norm:
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
