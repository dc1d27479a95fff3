"""Model properties that some eviction rules need; found by a probe at the first request.

Recompute the keys and values of a layer from the input of its attention.

The input of a layer's attention is X: after the norm in pre-norm models, before it in post-norm
models. In models without grouped heads, X is half the bytes of keys and values. The layer's own
module recomputes keys and values: its projections, biases and norms run unchanged at position 0,
where RoPE is the identity, and stop at the attention call. Then keys are rotated to their
positions. Queries are skipped if the module has a separate query projection.

The first layer needs no X: token ids are enough.

Source: KVPR (Jiang et al. 2024), section 3. Differs from the paper: grouped heads, norms of heads
and rotary positions are supported, since the model's own code computes them.
"""

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from quire.errors import InvariantError
from quire.kernels.backend import TokenIndex
from quire.layout.model import HeadShape, ModelSpec
from quire.layout.statistics import QueryMoments, ResidualSimilarity, Statistic
from quire.models.base import AttentionCall, OwnValue
from quire.models.bridge import BRIDGE_ATTRIBUTE, Bridge
from quire.models.layer_source import LayerSource
from quire.models.own_attention import model_inputs
from quire.models.rope import PROBED_POSITIONS, Probe, Rotations, find_rotaries
from quire.models.rotary import Rotary
from quire.policies.windows import slices

HIDDEN = "hidden_states"
QUERIES = ("q_proj", "q_a_proj", "q_b_proj", "indexer.wq_b")
KEYS = frozenset(("k_proj", "kv_a_proj_with_mqa"))
"""Projections beside those of queries; without one of them, a product computes all."""
MAX_KV_ERROR = 0.02  # maximum relative error of keys and values computed without queries

KeysAndValues = tuple[Tensor, ...]
"""Keys and values [token, num_kv_heads, head_dim], and index keys [token, index_dim] if stored."""


class _Caught(Exception):
    """Not an error: raised at the attention call to end the forward of a layer."""

    def __init__(self, key: Tensor, value: Tensor, index: TokenIndex | None) -> None:
        self.key, self.value, self.index = key, value, index

    @property
    def stored(self) -> KeysAndValues:
        return (self.key, self.value, *(() if self.index is None else (self.index.key,)))


class _Catching:
    """Attention that ends the forward and returns the keys and values of its call.

    Args:
        indexed: layers with an index of their own.
    """

    def __init__(self, indexed: Container[int]) -> None:
        self._indexed = indexed

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        raise _Caught(key, value, call.index if call.layer in self._indexed else None)


class _NoQuery(nn.Module):
    """Replaces a query projection: returns zeros without a matrix product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.new_zeros(*hidden.shape[:-1], self._width)


@dataclass(frozen=True, slots=True, eq=False)
class _KVLayer:
    module: nn.Module
    args: tuple[Any, ...]  # of the module other than hidden states, at position 0
    kwargs: dict[str, Any]
    hidden_first: bool  # whether hidden states are the first positional argument, or a keyword
    rotary: Rotary
    # replace its query projections, by name; empty if queries are part of a joint product
    no_query: Mapping[str, _NoQuery] = field(default_factory=dict)

    def run(self, hidden: Tensor) -> None:
        if self.hidden_first:
            self.module(hidden, *self.args[1:], **self.kwargs)
        else:
            self.module(*self.args, **self.kwargs | {HIDDEN: hidden})


class LayerKV:
    """Recomputes keys and values. The owner must run only one forward of the model at a time."""

    def __init__(
        self,
        model: PreTrainedModel,
        bridge: Bridge,
        rotaries: Mapping[int, Rotary],
        probe: Probe,
        weights: LayerSource | None = None,
        indexed: Container[int] = (),
    ) -> None:
        self._model, self._bridge, self._weights = model, bridge, weights
        self._attention = _Catching(indexed)
        self._layers = {
            number: self._with_no_query(number, layer)
            for number, layer in _seen_layers(model, rotaries, probe).items()
        }

    @property
    def leaves_queries_out(self) -> bool:
        return all(layer.no_query for layer in self._layers.values())

    def keys_and_values(
        self,
        layer: int,
        inputs: Float[Tensor, "token hidden"],
        positions: Int[Tensor, " token"],
    ) -> KeysAndValues:
        """What a layer stores of its tokens, keys after RoPE.

        Equal to the stored ones up to the summation order of products and, in half precision after
        fused layers, the rounding of cosines and sines.
        """
        found = self._layers[layer]
        self.arrive(layer)
        caught = self._caught(found, inputs[None])
        rotate, index, dtype = found.rotary.rotate_pre_rope, caught.index, caught.value.dtype
        stored = rotate(caught.key, positions).to(dtype), caught.value
        if index is None:
            return stored
        begin, key = index.rotated_from, index.key
        rotated = rotate(key[:, None, begin:], positions)[:, 0].to(dtype)
        return *stored, torch.cat([key[:, :begin], rotated], dim=1)

    def first_layer(
        self, token_ids: Int[Tensor, " token"], positions: Int[Tensor, " token"]
    ) -> KeysAndValues:
        with self._catching() as caught:
            self._model(**model_inputs(self._model, token_ids, positions), use_cache=False)
        return caught[0].stored

    def _caught(self, layer: _KVLayer, hidden: Tensor) -> _Caught:
        with _replaced(layer), self._catching() as caught:
            layer.run(hidden)
        return caught[0]

    @contextmanager
    def _catching(self) -> Iterator[list[_Caught]]:
        """Run the block until it calls attention; may be used inside another attention call."""
        caught: list[_Caught] = []
        with self._bridge.attending(self._attention):
            try:
                yield caught
            except _Caught as end:
                caught.append(end)
        if not caught:
            raise InvariantError("a layer did not call its attention")

    def _arrive(self, layer: int) -> None:
        """Wait for a layer's weights; they are there already while the layer itself runs."""
        if self._weights is not None:
            self._weights.arrive(layer)

    def arrive(self, layer: int) -> None:
        if self._weights is None:
            return
        found = self._layers.get(layer)
        reads_all = found is not None and _queries(found.module) and not found.no_query
        if found is None or reads_all:
            self._weights.arrive(layer)
        else:
            self._weights.arrive_kv(layer)

    def _with_no_query(self, number: int, layer: _KVLayer) -> _KVLayer:
        """Skip the query projections of the layer if keys and values remain equal without them."""
        queries = _queries(layer.module)
        if not queries or not KEYS & layer.module._modules.keys():
            return layer
        self._arrive(number)
        hidden = layer.args[0] if layer.hidden_first else layer.kwargs[HIDDEN]
        widths: dict[str, int] = {}

        def note(name: str, module: nn.Module, args: object, out: Tensor) -> None:
            widths[name] = out.shape[-1]

        hooks = [one.register_forward_hook(partial(note, name)) for name, one in queries.items()]
        try:
            expected = self._caught(layer, hidden).stored
        finally:
            for hook in hooks:
                hook.remove()
        lighter = replace(layer, no_query={name: _NoQuery(n) for name, n in widths.items()})
        found = self._caught(lighter, hidden).stored
        return lighter if all(map(_near, found, expected)) else layer


def watch_inputs(model: nn.Module, bridge: Bridge) -> list[RemovableHandle]:
    """Register hooks that pass the input of each layer's attention to the `PagedAttention`.

    If the attention has `wants_inputs` set, `note_input(layer, inputs)` is called for each layer
    before `attend`; inputs are [token, hidden].
    """

    def show(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        attention: Any = bridge.attention
        if getattr(attention, "wants_inputs", False):
            number: Any = module.layer_idx
            attention.note_input(int(number), _hidden(args, kwargs)[0])

    return [
        module.register_forward_pre_hook(show, with_kwargs=True) for module in _attentions(model)
    ]


def _attentions(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if hasattr(module, BRIDGE_ATTRIBUTE) and "Attention" in type(module).__name__:
            yield module


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    hidden = args[0] if args else kwargs[HIDDEN]
    assert isinstance(hidden, Tensor), "attention takes hidden states first"
    return hidden


def _seen_layers(
    model: nn.Module, rotaries: Mapping[int, Rotary], probe: Probe
) -> dict[int, _KVLayer]:
    """Record the arguments of each layer's attention in a forward of one token at position 0.

    Only layers of `rotaries`: those that compute keys and values.
    """
    seen: dict[int, _KVLayer] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        number: Any = module.layer_idx
        if number not in rotaries:
            return
        seen[int(number)] = _KVLayer(
            module=module,
            args=args,
            kwargs=dict(kwargs),
            hidden_first=bool(args),
            rotary=rotaries[int(number)],
        )

    handles = [
        module.register_forward_pre_hook(note, with_kwargs=True) for module in _attentions(model)
    ]
    try:
        probe((0,), _Zeros())
    finally:
        for handle in handles:
            handle.remove()
    return seen


class _Zeros(OwnValue):
    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.zeros_like(super().attend(call, query, key, value))


@contextmanager
def _replaced(layer: _KVLayer) -> Iterator[None]:
    """Replace the query projections of the layer within the block."""
    queries = {name: layer.module.get_submodule(name) for name in layer.no_query}
    for name, one in layer.no_query.items():
        layer.module.set_submodule(name, one)
    try:
        yield
    finally:
        for name, query in queries.items():
            layer.module.set_submodule(name, query)


def _queries(module: nn.Module) -> dict[str, nn.Module]:
    """Return the query projections of an attention module, and of its index."""
    return {name: one for name, one in module.named_modules() if name in QUERIES}


def _near(found: Tensor, expected: Tensor) -> bool:
    difference = (found.float() - expected.float()).norm()
    return bool(difference <= MAX_KV_ERROR * expected.float().norm())


class Observing:
    """Probes one model and stores the results on its bridge."""

    def __init__(
        self, model: PreTrainedModel, bridge: Bridge, spec: ModelSpec, probe: Probe
    ) -> None:
        self._model, self._bridge, self._spec, self._probe = model, bridge, spec, probe
        self._inputs: list[RemovableHandle] = []
        self._recomputation: LayerKV | None = None

    def prepare(self, statistic: Statistic) -> str | None:
        if isinstance(statistic, QueryMoments) and self._spec.joins_keys:
            return f"{self._name} attends to latents, and moments are those of queries of heads"
        if isinstance(statistic, QueryMoments) and not self._all_rotaries_known:
            return (
                f"{self._name} rotates its queries, and Quire cannot invert this rotation; use "
                "a rule on attention or keys, such as snapkv or keydiff"
            )
        if isinstance(statistic, ResidualSimilarity) and self._similarity_hooks is None:
            return (
                f"{self._name} does not add the output of attention to its residual stream before "
                "the MLP, so the change by attention alone cannot be measured; leave out "
                "budget=squeeze, or use budget=pyramid"
            )
        return None

    def prepare_pre_rope(self) -> str | None:
        if self._spec.adds_positions:
            kind = "learned" if self._spec.learned_positions else "sinusoidal"
            return f"{self._name} adds {kind} positions to its embeddings and has no RoPE"
        if any(heads.index is not None for heads in self._spec.heads):
            return f"{self._name} selects tokens by index keys, which are stored after RoPE"
        layers = enumerate(self._spec.layers)
        unknown = [n for n, layer in layers if layer.attends and n not in self._rotaries]
        if unknown:
            return (
                f"layer {unknown[0]} of {self._name} rotates its queries by an unknown RoPE variant"
            )
        return None

    def prepare_recomputation(self, weights: LayerSource | None) -> str | None:
        own = [layer for layer, spec in enumerate(self._spec.layers) if spec.stores]
        rotaries = {layer: self._rotaries[layer] for layer in own if layer in self._rotaries}
        unknown = [layer for layer in own if layer not in rotaries]
        if unknown:
            return (
                f"layer {unknown[0]} of {self._name} rotates its keys by an unknown RoPE variant, "
                "so Quire cannot recompute them"
            )
        if self._recomputation is None:
            with torch.inference_mode():
                indexed = [n for n, heads in enumerate(self._spec.heads) if heads.index_dim]
                self._recomputation = LayerKV(
                    self._model, self._bridge, rotaries, self._probe, weights, indexed
                )
        return None

    @property
    def recomputation(self) -> LayerKV:
        assert self._recomputation is not None, "call prepare_recomputation first"
        return self._recomputation

    def watch_inputs(self) -> None:
        """Pass the input of each layer's attention to every attention with `wants_inputs`."""
        if not self._inputs:
            self._inputs = watch_inputs(self._model, self._bridge)

    def rotations(
        self, select_frequencies: Callable[[], AbstractContextManager[None]]
    ) -> Rotations | None:
        """Mean rotations of all layers whose queries count in statistics."""
        if not self._all_rotaries_known:
            return None
        model = self._model
        dims = [heads.key_dim for heads in self._spec.heads]
        return Rotations(self._rotaries, dims, model.device, select_frequencies)

    @cached_property
    def output_projections(self) -> "OutputProjections | str":
        with torch.inference_mode():
            return find_output_projections(self._model, self._spec, self._probe)

    def close(self) -> None:
        for handle in (*(vars(self).pop("_similarity_hooks", None) or ()), *self._inputs):
            handle.remove()
        self._inputs = []

    @property
    def _name(self) -> str:
        return type(self._model).__name__

    @cached_property
    def _rotaries(self) -> dict[int, Rotary]:
        if self._spec.adds_positions:  # in the hidden states; no rotation
            found = dict.fromkeys(range(self._spec.num_layers), Rotary(None))
        else:
            found = find_rotaries(self._model, self._probe)
        self._bridge.set_rotaries(found)
        return found

    @property
    def _all_rotaries_known(self) -> bool:
        """Whether the RoPE of every layer with full attention is known.

        Other layers never evict, so they have no statistics.
        """
        layers = enumerate(self._spec.layers)
        return all(
            number in self._rotaries
            for number, layer in layers
            if layer.attends and layer.window is None and layer.chunk is None
        )

    @cached_property
    def _similarity_hooks(self) -> list[RemovableHandle] | None:
        return watch_residual_similarity(self._model, self._bridge, self._probe)


# ---- residual similarity -------------------------------------------------------------------------

# Measures how much attention changed the residual stream of each layer.
#
# A layer computes `after = before + attention`; attention may be scaled or normalised first.
# `after` is the input of the layer's next submodule. A probe forward finds that submodule: it is
# the first one after attention whose input differs from `before` by the output of attention. Layers
# that add attention and MLP in one step have no such submodule.

MAX_ERROR = 0.02  # maximum relative distance of the added tensor from a multiple of the output


@dataclass(frozen=True, slots=True)
class _Layer:
    """A decoder layer: its number, the module, the name of its attention."""

    number: int
    module: nn.Module
    attention: str


@dataclass(slots=True)
class _LayerRun:
    """Inputs and outputs of a layer's submodules, in the order they ran."""

    before: Tensor | None = None
    parts: list[tuple[str, Tensor, Tensor]] | None = None


def watch_residual_similarity(
    model: nn.Module, bridge: Bridge, probe: Probe
) -> list[RemovableHandle] | None:
    """Register hooks that report residual similarity; None if a layer is not supported.

    If an attention has `wants_residual_similarity` set, its
    `note_residual_similarity(layer, cosines)` is called for each layer. `cosines` is, for each
    token, the cosine between the residual stream before and after attention, float32.
    """
    layers = list(_layers(model))
    ran = _run(layers, probe)
    next_parts = [_next_part(layer, run) for layer, run in zip(layers, ran, strict=True)]
    handles: list[RemovableHandle] = []
    if None in next_parts:
        return None
    for layer, part in zip(layers, next_parts, strict=True):
        assert part is not None, "all were found"
        handles += _watch(layer, part, bridge)
    return handles


def _layers(model: nn.Module) -> Iterator[_Layer]:
    for name, module in model.named_modules():
        if hasattr(module, BRIDGE_ATTRIBUTE) and "Attention" in type(module).__name__:
            parent, _, own = name.rpartition(".")
            number: Any = module.layer_idx
            yield _Layer(int(number), model.get_submodule(parent), own)


def _run(layers: list[_Layer], probe: Probe) -> list[_LayerRun]:
    """Run the model once and record the inputs and outputs of each layer's submodules."""
    notes, handles = [], []
    for layer in layers:
        note = _LayerRun(parts=[])
        notes.append(note)
        handles.append(layer.module.register_forward_pre_hook(_note_before(note), with_kwargs=True))
        handles += [
            part.register_forward_hook(_note_part(note, name), with_kwargs=True)
            for name, part in layer.module.named_children()
        ]
    try:
        probe(PROBED_POSITIONS, _ProbeAttention())
    finally:
        for handle in handles:
            handle.remove()
    return notes


class _ProbeAttention(OwnValue):
    """Attention with a different output for each token, so that its addition can be detected."""

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        own = super().attend(call, query, key, value)
        return query + 1 if own.shape == query.shape else own + query.mean(dim=2, keepdim=True) + 1


def _note_before(note: _LayerRun) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        note.before = _stream(args, kwargs).clone()

    return hook


def _note_part(note: _LayerRun, name: str) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        first = out[0] if isinstance(out, tuple) else out
        assert note.parts is not None, "created for a run"
        if isinstance(first, Tensor):
            flat = first.reshape(-1, first.shape[-1])
            note.parts.append((name, _stream(args, kwargs).clone(), flat.clone()))

    return hook


def _stream(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states in a module's arguments, [tokens, hidden]."""
    hidden = args[0] if args else kwargs["hidden_states"]
    assert isinstance(hidden, Tensor), "modules of a layer take hidden states first"
    return hidden.reshape(-1, hidden.shape[-1])


def _next_part(layer: _Layer, ran: _LayerRun) -> str | None:
    """The submodule whose input is the residual stream after attention was added."""
    parts, before = ran.parts or [], ran.before
    names = [name for name, _, _ in parts]
    if before is None or layer.attention not in names:
        return None
    at = names.index(layer.attention)
    added = [parts[at][2]]  # the attention output, and its normalised form
    for name, part_input, part_output in parts[at + 1 :]:
        if part_input.shape != before.shape:
            continue
        # both errors are small if attention is much larger than the stream: the smaller one decides
        alone = _error(added[0], part_input)
        onto_stream = min(_error(x, part_input - before) for x in added)
        if onto_stream <= min(MAX_ERROR, alone):
            return name
        if alone <= MAX_ERROR:
            added.append(part_output)
    return None


def _error(base: Tensor, found: Tensor) -> float:
    """Relative distance of `found` from the nearest multiple of `base`."""
    if base.shape != found.shape or not found.any():
        return math.inf
    x, y = base.float().flatten(), found.float().flatten()
    return float((y - x * (x @ y / (x @ x))).norm() / y.norm())


def _watch(layer: _Layer, part: str, bridge: Bridge) -> list[RemovableHandle]:
    held: list[Tensor] = []

    def note_before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        held.clear()
        if getattr(bridge.attention, "wants_residual_similarity", False):
            held.append(_stream(args, kwargs))

    def report_similarity(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if held:
            attention: Any = bridge.attention
            before, after = held.pop().float(), _stream(args, kwargs).float()
            attention.note_residual_similarity(
                layer.number, F.cosine_similarity(before, after, dim=-1)
            )

    child = layer.module.get_submodule(part)
    return [
        layer.module.register_forward_pre_hook(note_before, with_kwargs=True),
        child.register_forward_pre_hook(report_similarity, with_kwargs=True),
    ]


# ---- output projections --------------------------------------------------------------------------

# A probe forward with random outputs of attention finds the linear layer that gets them unchanged.
# Its weight is read as it is stored, or by products with unit vectors if it is stored in codes.

ReadWeight = Callable[[], Tensor]
"""Returns a weight [outer, inner]."""


class OutputProjections:
    """The output projections of layers that evict, and of those that read their lanes.

    Args:
        weights: of each layer that evicts: of its own projection, and of those of the layers that
            read its lanes, in the order of their query heads.
        heads: heads of all layers.
    """

    def __init__(
        self, weights: Mapping[int, Sequence[ReadWeight]], heads: Sequence[HeadShape]
    ) -> None:
        self._weights, self._heads = weights, heads

    @torch.inference_mode()
    def lengths(
        self, layers: Sequence[int], values: Float[Tensor, "lane slot value_dim"]
    ) -> Float[Tensor, "lane slot"]:
        by_layer = values.view(len(layers), -1, *values.shape[1:])
        found: Tensor = by_layer.new_zeros(by_layer.shape[:3])
        different = tuple(dict.fromkeys(layers))
        for index, layer in enumerate(different):
            own = slice(index, None, len(different))  # a layer of all sequences
            heads, readers = self._heads[layer], self._weights[layer]
            group, lanes_each = heads.group * len(readers), found.shape[1] // heads.kv_heads
            for reader, weight in enumerate(readers):
                for head, columns in enumerate(torch.split(weight(), heads.value_dim, dim=1)):
                    kv_head, member = divmod(head, heads.group)
                    member += reader * heads.group
                    lane = kv_head * lanes_each + member * lanes_each // group
                    lengths = _projected_lengths(by_layer[own, lane], columns.float())
                    found[own, lane] += lengths * (lanes_each / group)
        return found.flatten(0, 1)


def _projected_lengths(
    values: Float[Tensor, "row slot value_dim"], columns: Float[Tensor, "outer value_dim"]
) -> Float[Tensor, "row slot"]:
    flat = values.flatten(0, 1)
    found = flat.new_empty(len(flat))
    for part in slices(len(flat), len(columns)):
        found[part] = (flat[part] @ columns.T).abs_().sum(dim=1)
    return found.view(values.shape[:2])


def find_output_projections(
    model: nn.Module, spec: ModelSpec, probe: Probe
) -> OutputProjections | str:
    """Find the output projections of attention, or why a layer has none that a rule can read."""
    seen, weights = _Outputs(), dict[int, list[ReadWeight]]()
    linears = (one for one in model.modules() if hasattr(one, "in_features") or hasattr(one, "nf"))
    handles = [one.register_forward_hook(seen.note) for one in linears]
    try:
        probe((0, 1), seen)
    finally:
        for handle in handles:
            handle.remove()
    for number, layer in enumerate(spec.layers):
        source = number if layer.source is None else layer.source
        if not (layer.attends and spec.layers[source].stores_all):
            continue
        read, name = seen.reads.get(number), type(model).__name__
        if read is None:
            return f"layer {number} of {name} changes the output of attention before projecting it"
        weights.setdefault(source, []).append(read)
    return OutputProjections(weights, spec.heads)


class _Outputs(OwnValue):
    """Attention with random outputs, and how to read the weight that projects those of a layer."""

    def __init__(self) -> None:
        self.reads: dict[int, ReadWeight] = {}
        self._last: tuple[int, Tensor] | None = None

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = super().attend(call, query, key, value)
        drawn = torch.randn(out.shape, generator=torch.Generator().manual_seed(call.layer))
        drawn = drawn.to(out)
        self._last = call.layer, drawn.flatten(1)
        return drawn

    def note(self, module: Any, args: tuple[Any, ...], projected: Tensor) -> None:
        if self._last is None or not isinstance(projected, Tensor):
            return
        layer, given = self._last
        rows = args[0].reshape(-1, args[0].shape[-1])
        if rows.shape != given.shape or not torch.equal(rows, given):
            return
        expected = (projected - module(torch.zeros_like(args[0]))).reshape(len(rows), -1)
        for read in (partial(_stored_weight, module), partial(_by_products, module, rows)):
            weight = read().float()
            fits = weight.ndim == 2 and weight.shape[1] == rows.shape[1]
            if fits and _near(rows.float() @ weight.T, expected):
                self.reads[layer] = read
                return


def _stored_weight(module: Any) -> Tensor:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        return torch.empty(0)
    return weight.T if isinstance(module, Conv1D) else weight


def _by_products(module: Any, like: Tensor) -> Tensor:
    width = like.shape[1]
    units = torch.cat([like.new_zeros(1, width), torch.eye(width).to(like)])
    products: Tensor = module(units)
    return (products[1:] - products[:1]).T
