"""Attention classes of Transformers that compute attention in their modules, without its interface.

DiffLlama and JetMoe use the interface, but with keys and values repeated for their query heads.
One method of each module is replaced by one that calls the attention of the forward in progress;
without such a forward, the module's own method runs.

    forward    the module's own projections, then attention, then its output projection
    _attn      attention between the module's own projections
    expand_kv  keeps the latents of latent attention, to which Quire's attention applies
    forward    of an indexer: returns its queries and keys, by which Quire's attention selects

These models build causal masks in their forwards; `model_inputs` avoids that.
"""

import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quire.kernels.backend import Alibi, TokenIndex
from quire.kernels.latent import LatentHeads, TiedHeads
from quire.layout.config import ATTENTION_FREE, PARTIAL_ROPE
from quire.models.recurrent import StateCache, continued, is_lightning, is_recurrent, run_recurrent

Attend = Callable[..., tuple[Tensor, None]]
"""Attention of a module, called as by Transformers; see `bridge.attend_through_bridge`."""


@dataclass(frozen=True, slots=True)
class OwnAttention:
    """A replaced method.

    Attributes:
        method: its name.
        attend: computes its result from the module, `Attend` and the arguments.
        has_number: whether modules of the class have a `layer_idx`.
    """

    method: str
    attend: Callable[..., Any]
    has_number: bool = True


def alibi_slopes(num_heads: int) -> list[float]:
    """Return the slopes of ALiBi; for a number of heads that is no power of two, see the source.

    Source: Press et al. 2022, arXiv 2108.12409, and its code. MPT's formula gives the same slopes.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * head / power) for head in range(1, power + 1)]
    between = [2 ** (-4 * head / power) for head in range(1, 2 * power, 2)]
    return slopes + between[: num_heads - power]


@functools.cache
def _alibi(num_heads: int, device: torch.device) -> Alibi:
    return Alibi(torch.tensor(alibi_slopes(num_heads), device=device))


@functools.cache
def _rounded_alibi(num_heads: int, device: torch.device, factor: float) -> Alibi:
    slopes = torch.tensor(alibi_slopes(num_heads), device=device).bfloat16().float()
    return Alibi(slopes, factor, rounded=True)


def _by_head(x: Tensor, num_heads: int) -> Tensor:
    """Reshape [batch, token, numbers] to [batch, head, token, head_dim]."""
    return x.view(*x.shape[:2], num_heads, -1).transpose(1, 2)


def _bloom(
    module: Any, attend: Attend, hidden: Tensor, residual: Tensor, *args: Any, **options: Any
) -> tuple[Tensor, None]:
    heads = module._reshape(module.query_key_value(hidden))
    alibi = _alibi(module.num_heads, hidden.device)
    out, _ = attend(module, *heads, None, scaling=module.inv_norm_factor, alibi=alibi)
    return residual + module.dense(out.flatten(2)), None


def _mpt(
    module: Any, attend: Attend, hidden_states: Tensor, *args: Any, **options: Any
) -> tuple[Tensor, None]:
    fused = module.Wqkv(hidden_states)
    if module.clip_qkv:
        fused = fused.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    heads = (_by_head(x, module.n_heads) for x in fused.chunk(3, dim=2))
    alibi = _alibi(module.n_heads, hidden_states.device)
    out, _ = attend(module, *heads, None, scaling=module.softmax_scale, alibi=alibi)
    return module.out_proj(out.flatten(2)), None


def _falcon(
    module: Any,
    attend: Attend,
    hidden_states: Tensor,
    alibi: Tensor | None = None,
    *args: Any,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    fused = module.query_key_value(hidden_states)
    if module.new_decoder_architecture:  # the module would repeat keys and values for all queries
        groups = fused.view(*fused.shape[:2], module.num_kv_heads, -1, module.head_dim)
        by_token = groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
    else:
        by_token = module._split_heads(fused)
    query, key, value = (x.transpose(1, 2) for x in by_token)
    bias = None
    if alibi is not None:
        bias = _rounded_alibi(module.num_heads, query.device, module.inv_norm_factor)
    elif position_embeddings is not None:
        query, key = _rotated(module, query, key, position_embeddings)
    out, _ = attend(module, query, key, value, None, scaling=module.inv_norm_factor, alibi=bias)
    return module.dense(out.flatten(2)), None


def _xglm(
    module: Any, attend: Attend, hidden_states: Tensor, *args: Any, **options: Any
) -> tuple[Tensor, None]:
    projections = (module.q_proj, module.k_proj, module.v_proj)
    heads = (_by_head(project(hidden_states), module.num_heads) for project in projections)
    out, _ = attend(module, *heads, None, scaling=module.scaling)
    return module.out_proj(out.flatten(2)), None


def _gpt_neo(
    module: Any, attend: Attend, query: Tensor, key: Tensor, value: Tensor, *args: Any
) -> tuple[Tensor, None]:
    window = module.config.window_size if module.attention_type == "local" else None
    out, _ = attend(module, query, key, value, None, scaling=1.0, sliding_window=window)
    return out.transpose(1, 2), None


def _gpt_neox_japanese(
    module: Any, attend: Attend, query: Tensor, key: Tensor, value: Tensor, *args: Any
) -> tuple[Tensor, None]:
    out, _ = attend(module, query, key, value, None, scaling=1 / module.norm_factor)
    return out.transpose(1, 2), None


def _openai_gpt(
    module: Any, attend: Attend, query: Tensor, key: Tensor, value: Tensor, *args: Any
) -> list[Tensor]:
    scale = query.shape[-1] ** -0.5 if module.scale else 1.0
    out, _ = attend(module, query, key.transpose(2, 3), value, None, scaling=scale)
    return [out.transpose(1, 2)]


def _diffllama(
    module: Any,
    attend: Attend,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *args: Any,
    **options: Any,
) -> tuple[Tensor, None]:
    # the module attends twice with the same weights: once to each half of its values
    projections = (module.q_proj, module.k_proj, module.v_proj)
    query, key, value = (
        _by_head(projected := project(hidden_states), projected.shape[2] // module.head_dim)
        for project in projections
    )
    query, key = _rotated(module, query, key, position_embeddings)
    both = torch.cat(value.chunk(2, dim=1), dim=3).repeat(1, 2, 1, 1)
    out, _ = attend(module, query, key, both, None, scaling=module.scaling)
    first, second = out.chunk(2, dim=2)
    pairs = (module.lambda_q1, module.lambda_k1), (module.lambda_q2, module.lambda_k2)
    one, two = (torch.exp(torch.sum(q * k, dtype=torch.float32)).to(out.dtype) for q, k in pairs)
    out = first - (one - two + module.lambda_init) * second
    out = (1 - module.lambda_init) * module.groupnorm(out)
    return module.o_proj(out.flatten(2)), None


def _jetmoe(
    module: Any,
    attend: Attend,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor, None, Tensor]:
    # a router selects the query heads of each token; expert by expert, each has all KV heads
    query, router_logits, routes = module.experts.map(hidden_states)
    kv_heads = module.num_key_value_heads
    query = query.view(*query.shape[:3], kv_heads, -1).transpose(2, 3).flatten(2, 3).transpose(1, 2)
    key, value = (_by_head(x, kv_heads) for x in module.kv_proj(hidden_states).chunk(2, dim=2))
    query, key = _rotated(module, query, key, position_embeddings)
    out, _ = attend(module, query, key, value, None, scaling=module.scaling)
    by_expert = out.view(*out.shape[:2], kv_heads, module.top_k, -1).transpose(2, 3).flatten(3)
    return module.experts.reduce(by_expert, routes), None, router_logits


def _rotated(module: Any, query: Tensor, key: Tensor, cos_sin: Any) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the function of the module's file."""
    rotated: tuple[Tensor, Tensor] = vars(_file_of(type(module)))["apply_rotary_pos_emb"](
        query, key, *cos_sin
    )
    return rotated


def _latents(module: Any, attend: Attend, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    # attention gets what pages hold, and expands what it needs: a step costs O(1) outside of it
    return k_rot, kv_nope


def _indexer(
    module: Any,
    attend: Attend,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *args: Any,
    rotate: str = "apply_rotary_pos_emb",
    rotated_last: bool = False,
    **options: Any,
) -> TokenIndex:
    """Compute index queries, weights and keys as the module does, and nothing between tokens."""
    norm, of_weights = module.k_norm, module.weights_proj
    query = module.wq_b(q_resid).view(*q_resid.shape[:2], module.n_heads, module.head_dim)
    key = norm(module.wk(hidden_states).to(norm.weight.dtype)).to(hidden_states.dtype)
    rotated_dim = module.qk_rope_head_dim
    begin = module.head_dim - rotated_dim if rotated_last else 0
    part = slice(begin, begin + rotated_dim)
    rotation = vars(_file_of(type(module)))[rotate]
    turned = rotation(
        query[..., part], key[:, :, None, part], *position_embeddings, unsqueeze_dim=2
    )
    query, key = (
        torch.cat([x[..., :begin], y, x[..., begin + rotated_dim :]], dim=-1)[0]
        for x, y in zip((query, key[:, :, None]), turned, strict=True)
    )
    weights = of_weights(hidden_states.to(of_weights.weight.dtype))[0].float()
    weights, scale = weights * module.n_heads**-0.5, module.softmax_scale
    if rotated_last:  # this family multiplies the weights by the scale
        weights, scale = weights * scale, 1.0
    return TokenIndex(query, weights, key[:, 0], scale, module.index_topk, begin)


_LATENT = OwnAttention("expand_kv", _latents)
_INTERLEAVED = partial(_indexer, rotate="apply_rotary_pos_emb_interleave")
_INDEXERS: Mapping[str, OwnAttention] = {
    "axk2.AXK2Indexer": OwnAttention("forward", _indexer),
    "deepseek_v32.DeepseekV32Indexer": OwnAttention("forward", _indexer),
    "dots3_note.Dots3NoteTextIndexer": OwnAttention("forward", _INTERLEAVED),
    "glm_moe_dsa.GlmMoeDsaIndexer": OwnAttention("forward", _INTERLEAVED),
    "hy_v4.HYV4Indexer": OwnAttention("forward", partial(_indexer, rotated_last=True)),
}
_OWN: Mapping[str, OwnAttention] = {
    "bloom.BloomAttention": OwnAttention("forward", _bloom),
    "mpt.MptAttention": OwnAttention("forward", _mpt),
    "falcon.FalconAttention": OwnAttention("forward", _falcon),
    "falcon.FalconFlashAttention2": OwnAttention("forward", _falcon),
    "xglm.XGLMAttention": OwnAttention("forward", _xglm),
    "gpt_neo.GPTNeoSelfAttention": OwnAttention("_attn", _gpt_neo, has_number=False),
    "gpt_neox_japanese.GPTNeoXJapaneseAttention": OwnAttention("_attn", _gpt_neox_japanese),
    "openai.Attention": OwnAttention("_attn", _openai_gpt, has_number=False),
    "diffllama.DiffLlamaAttention": OwnAttention("forward", _diffllama),
    "jetmoe.JetMoeAttention": OwnAttention("forward", _jetmoe),
}
_WITHOUT_POSITIONS = frozenset({"bloom", "mpt"})  # attention with ALiBi is all that depends on them
_INDEXED = frozenset(name.partition(".")[0] for name in _INDEXERS)


def _file_of(of: type) -> ModuleType:
    return sys.modules[of.__module__]


def _family(of: type) -> str:
    """The folder of a class in `transformers.models`; "" for other classes."""
    package, _, rest = of.__module__.partition(".models.")
    return rest.partition(".")[0] if package == "transformers" else ""


def has_own_attention(model_class: type) -> bool:
    """Whether the attention of a model is replaced in its modules."""
    family = _family(model_class)
    return family in ATTENTION_FREE or any(name.startswith(f"{family}.") for name in _OWN)


def selects_tokens(model_class: type) -> bool:
    """Whether a model has an index that selects single tokens for all heads."""
    return _family(model_class) in _INDEXED


def needs_no_positions(model_class: type) -> bool:
    """Whether a model takes no `position_ids`, because ALiBi alone depends on positions."""
    return _family(model_class) in _WITHOUT_POSITIONS | ATTENTION_FREE


def reference_attention(model_class: type) -> str:
    """Return the attention of Transformers with which a model is compared.

    With "eager", Falcon of Transformers 5.24 adds ALiBi twice: in the mask, and to the products.
    """
    return "sdpa" if _family(model_class) == "falcon" else "eager"


def model_inputs(model: PreTrainedModel, token_ids: Tensor, positions: Tensor) -> dict[str, Any]:
    """Return the arguments of a forward for a flat batch."""
    inputs: dict[str, Any] = {"input_ids": token_ids[None]}
    family = _family(type(model))
    if family not in _WITHOUT_POSITIONS | ATTENTION_FREE:
        inputs["position_ids"] = positions[None]
    elif family == "mpt":  # always makes a mask of all tokens, unless it has one
        inputs["attention_mask"] = torch.zeros(1, 1, 1, 1, device=token_ids.device)
    if family in _INDEXED:  # layers index the mask that they pass to their indexer
        mask = torch.zeros(1, 1, 1, 1, device=token_ids.device)
        masks = {"full_attention": None, "sliding_attention": None, "indexed_attention": mask}
        inputs["attention_mask"] = masks
    return inputs


def number_layers(model: nn.Module) -> None:
    """Set `layer_idx` on modules that are replaced and have none; idempotent."""
    numberless = (module for module, own in _modules(model) if not own.has_number)
    for number, module in enumerate(numberless):
        vars(module)["layer_idx"] = number
    hybrid: Any
    for hybrid in model.modules():  # Zamba: attention of a block that layers share has no number
        for module in hybrid.modules() if hasattr(hybrid, "mamba_decoder") else ():
            if vars(module).get("layer_idx", 0) in (None, -1):
                vars(module)["layer_idx"] = hybrid.mamba_decoder.layer_idx


def replace_recurrent(model: nn.Module, current: Callable[[], Any]) -> None:
    """Replace the forward of recurrent modules by one over the states of a flat batch.

    Args:
        model: a causal language model.
        current: returns the attention of the forward in progress; None: there is none.
    """
    for module in filter(is_recurrent, model.modules()):
        vars(module)["forward"] = _over_states(module, module.forward, current)


def restore_recurrent(model: nn.Module) -> None:
    """Undo `replace_recurrent`."""
    for module in filter(is_recurrent, model.modules()):
        vars(module).pop("forward", None)


def _over_states(
    module: Any, original: Callable[..., Any], current: Callable[[], Any]
) -> Callable[..., Any]:
    arguments = ("position_embeddings", "attention_mask") if is_lightning(module) else ()
    unused: dict[str, Any] = dict.fromkeys(arguments)

    @functools.wraps(original)
    def forward(hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        attention = current()
        if attention is None:
            return original(hidden_states, *args, **options)
        # positions and lengths in the options are those of the flat batch

        def run(inputs: Tensor, cache: StateCache | None) -> Any:
            found = continued(module, original, inputs, cache)(inputs, cache=cache, **unused)
            return found[0] if unused else found

        found = run_recurrent(module, attention.states, module.layer_idx, hidden_states, run)
        return (found, None) if unused else found

    return forward


def replace_attention(model: nn.Module, attend: Attend, is_active: Callable[[], bool]) -> None:
    """Replace the attention of modules that compute it themselves, while `is_active` is true."""
    for module, own in _modules(model):
        original = getattr(module, own.method)
        vars(module)[own.method] = _replacement(module, original, own.attend, attend, is_active)


def restore_attention(model: nn.Module) -> None:
    """Undo `replace_attention` and `number_layers`."""
    for module, own in _modules(model):
        vars(module).pop(own.method, None)
        if not own.has_number:
            vars(module).pop("layer_idx", None)


def _modules(model: nn.Module) -> Iterator[tuple[nn.Module, OwnAttention]]:
    for module in model.modules():
        name = f"{_family(type(module))}.{type(module).__name__}"
        own = _OWN.get(name) or _INDEXERS.get(name)
        if own is None and has_latents(module):
            own = _LATENT
        if own is not None:
            yield module, own


def has_latents(module: nn.Module) -> bool:
    """Whether a module is latent attention (MLA), with a method that expands its latents."""
    return hasattr(type(module), _LATENT.method)


def latent_heads(model: nn.Module) -> dict[int, LatentHeads]:
    """Return the latent projections of each layer that has latent attention."""
    found: dict[int, LatentHeads] = {}
    for module in filter(has_latents, model.modules()):
        of: Any = module
        weight = partial(attrgetter("kv_b_proj.weight"), of)  # the layer may be replaced
        expand = partial(getattr(type(of), _LATENT.method), of)
        found[of.layer_idx] = LatentHeads(weight, of.num_heads, of.qk_nope_head_dim, expand)
    return found


def tied_heads(model: nn.Module) -> dict[int, TiedHeads]:
    """Return the heads of each layer whose keys are values times a weight (Gemma 4).

    A layer that reads the keys of another layer has the norm of that layer.
    """
    found: dict[int, TiedHeads] = {}
    norms: dict[str, Any] = {}
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if not getattr(module, "use_alternative_attention", False):
            continue
        norm = getattr(module, "k_norm", None) or norms[module.layer_type]
        norms[module.layer_type] = norm
        rope, half = module.config.rope_parameters[module.layer_type], module.head_dim // 2
        is_partial = rope["rope_type"] == PARTIAL_ROPE
        factor = rope.get("partial_rotary_factor", 1.0) if is_partial else 1.0
        angles = int(factor * module.head_dim // 2)
        if 0 < angles < half:
            first = torch.arange(angles, device=norm.weight.device)
            rotated = torch.cat([first, first + half])
            found[module.layer_idx] = TiedHeads(partial(getattr, norm, "weight"), rotated)
    return found


def read_projections(model: nn.Module) -> list[nn.Module]:
    """Return the linear layers whose weights or biases are read outside of them.

    They project latents, compute the weights of index heads, or the time steps of Mamba.
    """
    modules: list[Any] = list(filter(has_latents, model.modules()))
    indexers = (getattr(module, "indexer", None) for module in modules)
    weights = [indexer.weights_proj for indexer in indexers if indexer is not None]
    recurrent: Iterator[Any] = filter(is_recurrent, model.modules())
    steps = [module.dt_proj for module in recurrent if hasattr(module, "dt_proj")]
    return [module.kv_b_proj for module in modules] + weights + steps


def _replacement(
    module: nn.Module,
    original: Callable[..., Any],
    own: Callable[..., Any],
    attend: Attend,
    is_active: Callable[[], bool],
) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(*args: Any, **options: Any) -> Any:
        return own(module, attend, *args, **options) if is_active() else original(*args, **options)

    return method
