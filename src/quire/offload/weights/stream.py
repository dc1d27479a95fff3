"""Brings each layer's weights while the one before it computes, and takes the slot back behind it.

    carrier   | 1       | 2       | 4       | 5       | 1 ...      layers 0 and 3 stay
    slot          a         b         a         b
    device        | 0 | 1 |   2     | 3 | 4 |   5     | sampling | 0 | 1 ...

Layers that are brought follow each other in a ring, over the end of a pass into the next one. A
layer that is not on the device has no weights at all: reading them is an error, not a wrong answer.
Any order of layers is right, the model's own is fast.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from quire.errors import StorageError
from quire.offload.weights.layers import Held, LayerWeights
from quire.offload.weights.links import WeightLink
from quire.plan.offload.resident import WeightsPlacement


@dataclass(slots=True)
class PassTimes:
    """What passes through the model have taken, as far as it is known.

    Attributes:
        num_passes: all of them; one has all layers, for one batch or several.
        seconds: from the first layer to behind the last one.
    """

    num_passes: int = 0
    seconds: float = 0.0
    pending: list[tuple[Callable[[], float | None], Callable[[], float | None]]] = field(
        default_factory=list
    )

    def note(self) -> None:
        """Add up those that have ended."""
        while self.pending:
            began_s, ended_s = (at() for at in self.pending[0])
            if began_s is None or ended_s is None:
                return
            self.pending.pop(0)
            self.num_passes += 1
            self.seconds += ended_s - began_s


class WeightStream:
    """The layers of one model, of which some are brought.

    Args:
        layers: of the model; from now on it has hooks on them.
        place: which of them are brought.
        link: has their bytes, and the slots.

    Attributes:
        place: where weights lie.
        link: see above.
        passes: what they take.
    """

    def __init__(
        self, layers: Sequence[LayerWeights], place: WeightsPlacement, link: WeightLink
    ) -> None:
        self.place, self.link, self.passes = place, link, PassTimes()
        self._layers = layers
        self._sharers = 1
        self._left = 0  # of those that share a pass, how many have left the layer that computes
        self._began: Callable[[], float | None] | None = None
        self._slot_of: dict[int, int] = {}
        self._pointing: set[int] = set()
        self._next = 0  # in the ring
        self._views: dict[tuple[int, int], list[Tensor]] = {}
        with torch.inference_mode(False):
            self._absent = {h.dtype: _nothing(h.dtype, link) for h in self._all_held()}
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
        """The device's own work in all passes so far: what they took, without waiting."""
        self.passes.note()
        return max(0.0, self.passes.seconds - self.link.stalled_s)

    @property
    def copied_s(self) -> float:
        """What copies have taken."""
        return self.link.copied_s

    @property
    def num_bytes(self) -> int:
        """Bytes transferred so far."""
        return self.link.num_bytes

    @contextmanager
    def shared_by(self, batches: int) -> Iterator[None]:
        """Within, so many forwards run layer by layer: a layer goes when all have left it."""
        self._sharers, self._left = batches, 0
        try:
            yield
        finally:
            self._sharers, self._left = 1, 0

    def arrive(self, layer: int) -> None:
        """Return when a layer's weights are there for whatever is computed next.

        Raises:
            StorageError: they could not be brought; asked again, they are tried again.
        """
        if layer == 0 and not self._left:
            self._began = self.link.clock_s()
        if layer not in self.place.offloaded_layers:
            return
        if layer not in self._slot_of:
            self._restart(layer)
        slot = self._slot_of[layer]
        try:
            self.link.arrive(slot)
        except Exception as error:
            self._forget()
            raise StorageError(f"the weights of layer {layer} could not be brought: {error}") from (
                error
            )
        self._point(layer, slot)

    def leave(self, layer: int) -> None:
        """A layer has computed for one batch; behind the last one its slot is the next layer's."""
        self._left = (self._left + 1) % self._sharers
        if self._left:
            return
        slot = self._slot_of.pop(layer, None)
        if slot is not None:
            self._unpoint(layer)
            self.link.release(slot)
            self._bring(slot)
        if layer == len(self._layers) - 1 and self._began is not None:
            self.passes.pending.append((self._began, self.link.clock_s()))
            self.passes.note()
            self._began = None

    def _restart(self, layer: int) -> None:
        """Somebody begins elsewhere, or a pass has ended early."""
        self._forget()
        self._next = self.place.offloaded_layers.index(layer)
        for slot in range(len(self.link.slots)):
            self.link.release(slot)
            self._bring(slot)

    def _forget(self) -> None:
        self.link.finalize()
        self._slot_of.clear()
        for layer in tuple(self._pointing):
            self._unpoint(layer)

    def _bring(self, slot: int) -> None:
        layer = self.place.offloaded_layers[self._next]
        self._next = (self._next + 1) % len(self.place.offloaded_layers)
        self._slot_of[layer] = slot
        self.link.bring(layer, slot)

    def _point(self, layer: int, slot: int) -> None:
        if layer in self._pointing:
            return
        views = self._views.get((layer, slot))
        if views is None:
            with torch.inference_mode(False):
                views = [h.within(self.link.slots[slot]) for h in self._layers[layer].held]
            self._views[layer, slot] = views
        for held, view in zip(self._layers[layer].held, views, strict=True):
            held.parameter.data = view
        self._pointing.add(layer)

    def _unpoint(self, layer: int) -> None:
        for held in self._layers[layer].held:
            held.parameter.data = self._absent[held.dtype]
        self._pointing.discard(layer)

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


def _nothing(dtype: torch.dtype, link: WeightLink) -> Tensor:
    return torch.empty(0, dtype=dtype, device=link.slots[0].device)
