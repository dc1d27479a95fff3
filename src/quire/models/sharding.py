"""Tensor parallelism of a model: each rank keeps some heads and some columns of every layer.

    hidden ─ q, k, v: rows of some heads ─ attention of these heads ─ o: columns ─ sum ─ hidden
    hidden ─ gate, up: some rows ──────────────────────────────── down: columns ─ sum ─ hidden

The plan that Transformers ships for an architecture names the layers. Embeddings, norms and the
output head are whole on every rank, so hidden states and logits are equal on all ranks. So is the
projection to latents (MLA): each rank stores the latents of all heads and expands its own heads.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from quire.errors import UnsupportedModel
from quire.layout.model import ModelSpec
from quire.models.own_attention import has_latents
from quire.parallel.group import TensorGroup

COLUMNS, ROWS = "colwise", "rowwise"  # names of Transformers: parts of the output, of the input
# on every rank
_WHOLE = frozenset({"replicated_with_grad_allreduce", "embedding_rowwise", "mla_kv_a_proj"})
_LATENT_PLAN = {
    "layers.*.self_attn.q_proj": COLUMNS,
    "layers.*.self_attn.q_b_proj": COLUMNS,
    "layers.*.self_attn.kv_b_proj": COLUMNS,
    "layers.*.self_attn.o_proj": ROWS,
}
"""Of latent attention, which the plans of most architectures leave out."""
_COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads")
_ONE_RANK = "use --tensor-parallel-size 1"


class SummedLinear(nn.Module):
    """A linear layer of which each rank has some columns: the results of all ranks are summed."""

    def __init__(self, linear: nn.Linear, bias: nn.Parameter | None, group: TensorGroup) -> None:
        super().__init__()
        self.own = linear
        self.bias = bias
        self._group = group

    def forward(self, rows: Float[Tensor, "... inner"]) -> Float[Tensor, "... outer"]:
        """Multiply, and sum over the ranks; the bias is added once."""
        summed = self._group.sum(self.own(rows))
        return summed if self.bias is None else summed + self.bias


@dataclass(frozen=True, slots=True)
class _Planned:
    """A linear layer of the plan."""

    parent: nn.Module
    name: str  # attribute of the parent
    linear: nn.Linear
    path: str  # in the model
    style: str  # COLUMNS or ROWS


def rank_spec(spec: ModelSpec, size: int) -> ModelSpec:
    """Return the shape of one rank's part of a model."""
    sizes = spec.dense_sizes or ()
    counts = {("columns of the MLP", columns) for columns in (spec.intermediate_size, *sizes)}
    for heads in spec.heads:
        counts.add(("query heads", heads.query_heads))
        if heads.latent is None or heads.latent.is_value:
            counts.add(("KV heads", heads.kv_heads))
    for what, count in sorted(counts, reverse=True):
        if count % size:
            raise UnsupportedModel(
                f"expected a number of {what} that is a multiple of tensor_parallel_size={size}, "
                f"but this model has {count}; use a size that divides "
                f"{spec.num_kv_heads} KV heads and {spec.num_heads} query heads"
            )
    return replace(
        spec,
        num_heads=spec.num_heads // size,
        num_kv_heads=spec.num_kv_heads // (size if spec.latent is None else 1),
        intermediate_size=spec.intermediate_size // size,
        dense_sizes=spec.dense_sizes and tuple(columns // size for columns in sizes),
        layers=tuple(
            replace(layer, heads=layer.heads and layer.heads.of_rank(size)) for layer in spec.layers
        ),
    )


def refuse_unshardable(model: PreTrainedModel, spec: ModelSpec, size: int) -> None:
    """Refuse a model that cannot run on several ranks; its weights may be on the meta device."""
    rank_spec(spec, size)
    name = type(model).__name__
    if spec.mixture is not None:
        raise UnsupportedModel(
            f"{name} is a mixture of experts, whose experts Quire does not divide over ranks; "
            f"{_ONE_RANK}"
        )
    if any(getattr(module, "activation_sparsity", 0.0) > 0 for module in model.modules()):
        raise UnsupportedModel(
            f"{name} selects neurons by the mean and deviation of all columns of its MLP, of which "
            f"a rank has some; {_ONE_RANK}"
        )
    styles = {found.style for found in _planned(model)}
    if styles != {COLUMNS, ROWS}:
        raise UnsupportedModel(
            f"Transformers has no tensor-parallel plan for {name} that divides its heads; "
            f"{_ONE_RANK}"
        )


def shard(model: PreTrainedModel, spec: ModelSpec, group: TensorGroup) -> None:
    """Replace the linear layers of a model by the part of this rank.

    The weights of other ranks are not copied, so a mapped weight file is read in part.
    """
    refuse_unshardable(model, spec, group.size)
    parents: dict[int, nn.Module] = {}
    for found in list(_planned(model)):
        if found.linear.weight.shape[found.style == ROWS] % group.size:
            raise UnsupportedModel(
                f"{found.path} has a weight of {list(found.linear.weight.shape)}, which "
                f"{group.size} ranks cannot divide; {_ONE_RANK}"
            )
        setattr(found.parent, found.name, _part(found, group))
        parents[id(found.parent)] = found.parent
    for parent in parents.values():
        # divide the numbers of heads that a module stores, for architectures that reshape by them
        for name in _COUNTS:
            count = vars(parent).get(name)
            if isinstance(count, int):
                setattr(parent, name, count // group.size)


def _part(found: _Planned, group: TensorGroup) -> nn.Module:
    linear, dim = found.linear, int(found.style == ROWS)
    bias = linear._parameters["bias"]  # the attribute is typed as never None
    own = nn.Linear(1, 1, bias=False, device="meta")
    own.weight = _own_part(linear.weight, dim, group)
    own.out_features, own.in_features = own.weight.shape
    if found.style == ROWS:
        whole = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        return SummedLinear(own, whole, group)
    if bias is not None:
        own.bias = _own_part(bias, 0, group)
    return own


def _own_part(whole: Tensor, dim: int, group: TensorGroup) -> nn.Parameter:
    part = torch.tensor_split(whole.detach(), group.size, dim=dim)[group.rank]
    return nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=False)


def _planned(model: PreTrainedModel) -> Iterator[_Planned]:
    """Yield the linear layers of the plan."""
    base = model.base_model
    plan = getattr(base.config, "base_model_tp_plan", None) or {}
    if plan and any(map(has_latents, base.modules())):
        plan = _LATENT_PLAN | plan
    modules = dict(base.named_modules())
    for path, module in modules.items():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path))
        if style is None or style in _WHOLE:
            continue
        if style not in (COLUMNS, ROWS) or not isinstance(module, nn.Linear):
            raise UnsupportedModel(
                f"the tensor-parallel plan of {type(model).__name__} divides {path} by {style!r}, "
                f"which Quire does not implement (it has {COLUMNS} and {ROWS}); {_ONE_RANK}"
            )
        parent, _, name = path.rpartition(".")
        yield _Planned(modules[parent], name, module, path, style)
