"""What must be found out about a model before some rules can be served: when first asked."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from quire.layout.model import ModelSpec
from quire.layout.statistics import AttentionShift, QueryMoments, Statistic
from quire.models.bridge import Bridge
from quire.models.rotary import Rotary
from quire.models.rotations import Probe, Rotations, find_rotaries
from quire.models.shift import watch_shift
from quire.offload.recompute.layer_kv import LayerKV, watch_inputs


class Observing:
    """Looks into one model, and puts what it finds on its bridge.

    Args:
        model: has a bridge already.
        bridge: the model's.
        spec: the model's.
        probe: runs the model.
    """

    def __init__(
        self, model: PreTrainedModel, bridge: Bridge, spec: ModelSpec, probe: Probe
    ) -> None:
        self._model, self._bridge, self._spec, self._probe = model, bridge, spec, probe
        self._inputs: list[RemovableHandle] = []
        self._recomputation: LayerKV | None = None

    def prepare(self, statistic: Statistic) -> str | None:
        """See `Decoder.prepare`."""
        if isinstance(statistic, QueryMoments) and not self._all_turn_as_known:
            return f"{self._name} rotates its queries in a way that cannot be taken off again"
        if isinstance(statistic, AttentionShift) and self._shift is None:
            return (
                f"{self._name} does not add attention to its residual stream before all else, so "
                "there is no stream after attention alone"
            )
        return None

    def prepare_pre_rope(self) -> str | None:
        """See `Decoder.prepare_pre_rope`."""
        if self._spec.learned_positions:
            return (
                f"{self._name} adds learned positions to its embeddings; there is no RoPE to undo"
            )
        unknown = [layer for layer in range(self._spec.num_layers) if layer not in self._rotaries]
        if unknown:
            return (
                f"layer {unknown[0]} of {self._name} turns its queries in a way that is not known"
            )
        return None

    def prepare_recomputation(self) -> str | None:
        """See `TransformersDecoder.prepare_recomputation`."""
        unknown = [layer for layer in range(self._spec.num_layers) if layer not in self._rotaries]
        if unknown:
            return (
                f"layer {unknown[0]} of {self._name} turns its keys in a way that is not known, so "
                "they cannot be made again"
            )
        if self._recomputation is None:
            with torch.inference_mode():
                self._recomputation = LayerKV(
                    self._model, self._bridge, self._rotaries, self._probe
                )
        return None

    @property
    def recomputation(self) -> LayerKV:
        """Makes keys and values again."""
        assert self._recomputation is not None, "prepared before"
        return self._recomputation

    def watch_inputs(self) -> None:
        """From now on show every attention that wants it what layers' attentions are given."""
        if not self._inputs:
            self._inputs = watch_inputs(self._model, self._bridge)

    def rotations(self, chosen: Callable[[], AbstractContextManager[None]]) -> Rotations | None:
        """Mean rotations of all layers without a window.

        Args:
            chosen: enters the frequencies of one kind of request.
        """
        if not self._all_turn_as_known:
            return None
        model = self._model
        return Rotations(self._rotaries, self._spec.head_dim, model.device, chosen)

    def close(self) -> None:
        """Stop looking: nothing of this stays on the model."""
        for handle in (*(vars(self).pop("_shift", None) or ()), *self._inputs):
            handle.remove()
        self._inputs = []

    @property
    def _name(self) -> str:
        return type(self._model).__name__

    @cached_property
    def _rotaries(self) -> dict[int, Rotary]:
        if self._spec.learned_positions:  # they are in the hidden states; nothing turns
            found = dict.fromkeys(range(self._spec.num_layers), Rotary(None))
        else:
            found = find_rotaries(self._model, self._probe)
        self._bridge.learn_rotaries(found)
        return found

    @property
    def _all_turn_as_known(self) -> bool:
        """Statistics are of layers without a window only."""
        layers = enumerate(self._spec.layers)
        return all(number in self._rotaries for number, layer in layers if layer.window is None)

    @cached_property
    def _shift(self) -> list[RemovableHandle] | None:
        return watch_shift(self._model, self._bridge, self._probe)
