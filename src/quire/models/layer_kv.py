"""Recompute the keys and values of a layer from the input of its attention.

The input of a layer's attention is X: after the norm in pre-norm models, before it in post-norm
models. In models without grouped heads, X is half the bytes of keys and values. The layer's own
module recomputes keys and values: its projections, biases and norms run unchanged at position 0,
where RoPE is the identity, and stop at the attention call. Then keys are rotated to their
positions. Queries are skipped if the module has a separate query projection.

The first layer needs no X: token ids are enough.

Source: KVPR (Jiang et al. 2024), section 3. Differs from the paper: grouped heads, norms of heads
and rotary positions are supported, since the model's own code computes them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quire.errors import InvariantError
from quire.models.base import AttentionCall
from quire.models.bridge import BRIDGE_ATTRIBUTE, Bridge
from quire.models.layer_source import LayerSource
from quire.models.rope import Probe
from quire.models.rotary import Rotary

HIDDEN = "hidden_states"
QUERY = "q_proj"
MOST_ERROR = 0.02  # maximum relative error of keys and values computed without queries

KeysAndValues = tuple[Tensor, Tensor]


class _Caught(Exception):
    """Not an error: raised at the attention call to end the forward of a layer."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self.key, self.value = key, value


class _Catching:
    """Attention that ends the forward and returns the keys and values of its call."""

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `PagedAttention.attend`."""
        raise _Caught(key, value)


class _NoQuery(nn.Module):
    """Replaces a query projection: returns zeros without a matrix product.

    Args:
        width: elements of all heads.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    def forward(self, hidden: Tensor) -> Tensor:
        """Return zeros in the shape of the projection's output."""
        return hidden.new_zeros(()).expand(*hidden.shape[:-1], self._width)


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """The attention of a layer.

    Attributes:
        module: attention module of the model.
        args, kwargs: arguments of the module other than hidden states, at position 0.
        hidden_first: whether hidden states are the first positional argument, or a keyword.
        rotary: RoPE of its keys.
        no_query: replaces its query projection; None if queries are part of a joint product.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden_first: bool
    rotary: Rotary
    no_query: _NoQuery | None = None

    def run(self, hidden: Tensor) -> None:
        """Run the module on hidden states [1, token, hidden]."""
        if self.hidden_first:
            self.module(hidden, *self.args[1:], **self.kwargs)
        else:
            self.module(*self.args, **self.kwargs | {HIDDEN: hidden})


class LayerKV:
    """Recomputes keys and values. The owner must run only one forward of the model at a time.

    Args:
        model: has a bridge; prepared by its decoder.
        bridge: bridge of the model.
        rotaries: RoPE of the keys of each layer.
        probe: runs the model.
        weights: prefetches offloaded layers; None if all weights are on the device.
    """

    def __init__(
        self,
        model: nn.Module,
        bridge: Bridge,
        rotaries: Mapping[int, Rotary],
        probe: Probe,
        weights: LayerSource | None = None,
    ) -> None:
        self._model, self._bridge, self._weights = model, bridge, weights
        self._layers = {
            number: self._with_no_query(number, layer)
            for number, layer in _seen_layers(model, rotaries, probe).items()
        }

    @property
    def leaves_queries_out(self) -> bool:
        """Whether every layer skips the computation of queries."""
        return all(layer.no_query is not None for layer in self._layers.values())

    def keys_and_values(
        self,
        layer: int,
        inputs: Float[Tensor, "token hidden"],
        positions: Int[Tensor, " token"],
    ) -> KeysAndValues:
        """Keys and values of a layer, [token, num_kv_heads, head_dim] each, keys after RoPE.

        Equal to the stored ones up to the summation order of products and, in half precision after
        fused layers, the rounding of cosines and sines.

        Args:
            layer: index of the layer.
            inputs: input of the layer's attention, as passed by `watch_inputs`.
            positions: logical positions.
        """
        found = self._layers[layer]
        self.arrive(layer)
        key, value = self._caught(found, inputs[None])
        return found.rotary.rotate_pre_rope(key, positions).to(value.dtype), value

    def first_layer(
        self, token_ids: Int[Tensor, " token"], positions: Int[Tensor, " token"]
    ) -> KeysAndValues:
        """Keys and values of layer 0, computed from token ids."""
        with self._catching() as caught:
            self._model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        return caught[0].key, caught[0].value

    def _caught(self, layer: _Layer, hidden: Tensor) -> KeysAndValues:
        with _replaced(layer), self._catching() as caught:
            layer.run(hidden)
        return caught[0].key, caught[0].value

    @contextmanager
    def _catching(self) -> Iterator[list[_Caught]]:
        """Run the block until it calls attention; may be used inside another attention call."""
        caught: list[_Caught] = []
        with self._bridge.attending(_Catching()):
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
        """Wait for the weights that compute keys and values, which are transferred first."""
        if self._weights is None:
            return
        found = self._layers.get(layer)
        reads_all = found is not None and QUERY in found.module._modules and not found.no_query
        if found is None or reads_all:
            self._weights.arrive(layer)
        else:
            self._weights.arrive_kv(layer)

    def _with_no_query(self, number: int, layer: _Layer) -> _Layer:
        """Skip the query projection of the layer if keys and values remain equal without it."""
        query = layer.module._modules.get(QUERY)
        if query is None or "k_proj" not in layer.module._modules:
            return layer
        self._arrive(number)
        hidden = layer.args[0] if layer.hidden_first else layer.kwargs[HIDDEN]
        expected = self._caught(layer, hidden)
        lighter = _Layer(
            module=layer.module,
            args=layer.args,
            kwargs=layer.kwargs,
            hidden_first=layer.hidden_first,
            rotary=layer.rotary,
            no_query=_NoQuery(query(hidden).shape[-1]),
        )
        try:
            found = self._caught(lighter, hidden)
        except RuntimeError:  # the module writes into its queries
            return layer
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
) -> dict[int, _Layer]:
    """Record the arguments of each layer's attention in a forward of one token at position 0."""
    seen: dict[int, _Layer] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        number: Any = module.layer_idx
        seen[int(number)] = _Layer(
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


class _Zeros:
    """Attention that returns zeros."""

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `PagedAttention.attend`."""
        return torch.zeros_like(query)


@contextmanager
def _replaced(layer: _Layer) -> Iterator[None]:
    """Replace the query projection of the layer within the block."""
    if layer.no_query is None:
        yield
        return
    query = layer.module._modules[QUERY]
    layer.module._modules[QUERY] = layer.no_query
    try:
        yield
    finally:
        layer.module._modules[QUERY] = query


def _near(found: Tensor, expected: Tensor) -> bool:
    difference = (found.float() - expected.float()).norm()
    return bool(difference <= MOST_ERROR * expected.float().norm())
