"""Prefetches each offloaded layer's weights while the layer before it computes.

    transfer  | 1       | 2       | 4       | 5       | 1 ...      layers 0 and 3 are resident
    slot          a         b         a         b
    device        | 0 | 1 |   2     | 3 | 4 |   5     | sampling | 0 | 1 ...

Offloaded layers form a ring that continues from the end of a pass into the next one. A layer that
is not on the device has empty parameters: reading them raises an error instead of giving wrong
results. Layers may run in any order; the model's own order is the fast one.

W_K and W_V of a layer are transferred first, so that keys and values can be recomputed from
activations while its other weights are in transfer (KVPR, section 3.3: fine-grained).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from quire.errors import StorageError
from quire.offload.weights.layers import KV_PART, Held, LayerWeights
from quire.offload.weights.links import PARTS, WeightLink
from quire.plan.offload.resident import WeightsPlacement


@dataclass(slots=True)
class PassTimes:
    """Times of passes through the model.

    Attributes:
        num_passes: finished passes; a pass runs all layers for one batch or several.
        seconds: duration of finished passes, from the start of the first to the end of the last
            layer.
    """

    num_passes: int = 0
    seconds: float = 0.0
    pending: list[tuple[Callable[[], float | None], Callable[[], float | None]]] = field(
        default_factory=list
    )

    def note(self) -> None:
        """Add up the passes that have ended."""
        while self.pending:
            began_s, ended_s = (at() for at in self.pending[0])
            if began_s is None or ended_s is None:
                return
            self.pending.pop(0)
            self.num_passes += 1
            self.seconds += ended_s - began_s


class WeightStream:
    """The layers of one model with offloaded weights.

    Args:
        layers: layers of the model; hooks are registered on them.
        place: placement of the layers: which of them are offloaded.
        link: link that stores and transfers the offloaded bytes, with the slots.

    Attributes:
        place: see above.
        link: see above.
        passes: times of passes.
    """

    def __init__(
        self, layers: Sequence[LayerWeights], place: WeightsPlacement, link: WeightLink
    ) -> None:
        self.place, self.link, self.passes = place, link, PassTimes()
        self._layers = layers
        self._sharers = 1
        self._finished = 0  # batches of the shared pass that have finished the current layer
        self._began: Callable[[], float | None] | None = None
        self._slot_of: dict[int, int] = {}
        self._pointing: set[tuple[int, int]] = set()  # layers and parts
        self._next = 0  # index in the ring
        self._views: dict[tuple[int, int, int], list[Tensor]] = {}  # by layer, slot and part
        with torch.inference_mode(False):
            self._absent = {h.dtype: _empty(h.dtype, link) for h in self._all_held()}
            for offloaded_layers in place.offloaded_layers:
                self._unpoint(offloaded_layers)
        for number, layer in enumerate(layers):
            layer.module.register_forward_pre_hook(self._before(number), prepend=True)
            layer.module.register_forward_hook(self._behind(number))

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The decoder layers."""
        return [layer.module for layer in self._layers]

    @property
    def device_s(self) -> float:
        """Compute time of the device in all passes so far, without stalls."""
        self.passes.note()
        return max(0.0, self.passes.seconds - self.link.stalled_s)

    @property
    def copied_s(self) -> float:
        """Time spent in copies so far."""
        return self.link.copied_s

    @property
    def stalled_s(self) -> float:
        """Time that computation has waited for copies so far."""
        return self.link.stalled_s

    @property
    def num_bytes(self) -> int:
        """Bytes transferred so far."""
        return self.link.num_bytes

    @contextmanager
    def shared_by(self, batches: int) -> Iterator[None]:
        """Share each layer between the forwards of several batches: free it after the last."""
        self._sharers, self._finished = batches, 0
        try:
            yield
        finally:
            self._sharers, self._finished = 1, 0

    def arrive(self, layer: int) -> None:
        """Wait until the next computation can use a layer's weights.

        Raises:
            StorageError: the transfer failed; the next call tries again.
        """
        if layer == 0 and not self._finished:
            self._began = self.link.clock_s()
        self._arrive(layer, PARTS)

    def arrive_kv(self, layer: int) -> None:
        """Wait until the next computation can use a layer's W_K and W_V.

        Raises:
            StorageError: see `arrive`.
        """
        self._arrive(layer, (KV_PART,))

    def _arrive(self, layer: int, parts: Sequence[int]) -> None:
        if layer not in self.place.offloaded_layers:
            return
        if layer not in self._slot_of:
            self._restart(layer)
        slot = self._slot_of[layer]
        try:
            self.link.arrive(slot, parts)
        except Exception as error:
            self._forget()
            raise StorageError(
                f"the weights of layer {layer} could not be transferred: {error}"
            ) from error
        for part in parts:
            self._point(layer, slot, part)

    def leave(self, layer: int) -> None:
        """Note that a layer has run for one batch; after the last batch, refill its slot."""
        self._finished = (self._finished + 1) % self._sharers
        if self._finished:
            return
        slot = self._slot_of.pop(layer, None)
        if slot is not None:
            self._unpoint(layer)
            self.link.release(slot)
            self._prefetch(slot)
        if layer == len(self._layers) - 1 and self._began is not None:
            self.passes.pending.append((self._began, self.link.clock_s()))
            self.passes.note()
            self._began = None

    def _restart(self, layer: int) -> None:
        """Restart the ring at a layer that is not in flight, for example after a failed pass."""
        self._forget()
        self._next = self.place.offloaded_layers.index(layer)
        for slot in range(len(self.link.slots)):
            self.link.release(slot)
            self._prefetch(slot)

    def _forget(self) -> None:
        self.link.finalize()
        self._slot_of.clear()
        for layer in {layer for layer, _ in self._pointing}:
            self._unpoint(layer)

    def _prefetch(self, slot: int) -> None:
        layer = self.place.offloaded_layers[self._next]
        self._next = (self._next + 1) % len(self.place.offloaded_layers)
        self._slot_of[layer] = slot
        self.link.prefetch(layer, slot)

    def _point(self, layer: int, slot: int, part: int) -> None:
        if (layer, part) in self._pointing:
            return
        of_part = [held for held in self._layers[layer].held if held.part == part]
        views = self._views.get((layer, slot, part))
        if views is None:
            with torch.inference_mode(False):
                views = [held.within(self.link.slots[slot]) for held in of_part]
            self._views[layer, slot, part] = views
        for held, view in zip(of_part, views, strict=True):
            held.parameter.data = view
        self._pointing.add((layer, part))

    def _unpoint(self, layer: int) -> None:
        for held in self._layers[layer].held:
            held.parameter.data = self._absent[held.dtype]
        self._pointing -= {(layer, part) for part in PARTS}

    def _all_held(self) -> Iterator[Held]:
        for layer in self.place.offloaded_layers:
            yield from self._layers[layer].held

    def _before(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[object, ...]) -> None:
            self.arrive(number)

        return hook

    def _behind(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[object, ...], out: object) -> None:
            self.leave(number)

        return hook


def _empty(dtype: torch.dtype, link: WeightLink) -> Tensor:
    return torch.empty(0, dtype=dtype, device=link.slots[0].device)
