"""Places a model on its device with the weights of some layers offloaded.

Prefetches each offloaded layer's weights while the layer before it computes.

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
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from quire.errors import ConfigError, StorageError
from quire.layout.model import ModelSpec
from quire.layout.sizes import format_size, parse_size_or
from quire.models.layer_source import LayerPlacer, LayerSource
from quire.models.linear_weights import widen_linears
from quire.models.weights import weight_bytes
from quire.offload.weights.links import (
    KV_PART,
    PARTS,
    Held,
    TransferredWeights,
    WeightLink,
    layer_weights,
    make_link,
)
from quire.plan.weights import SLOTS, WeightsPlacement, place_weights


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
        self, layers: Sequence[TransferredWeights], place: WeightsPlacement, link: WeightLink
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


ALL_WEIGHTS = "all"


def place_beyond(memory: int | str | None) -> LayerPlacer | None:
    """Create the placement of layers for an amount of device memory.

    Args:
        memory: device memory for weights in bytes, or a size such as "4GiB"; "all" or None
            keeps all weights on the device.

    Returns:
        Placement for `load_model`; None if all weights stay on the device.

    Raises:
        ConfigError: `memory` is not a size.
    """
    try:
        budget_bytes = parse_size_or(ALL_WEIGHTS)(memory)
    except ConfigError as error:
        raise ConfigError(
            f"weights memory of {memory!r}: expected bytes, a size such as 4GiB, or {ALL_WEIGHTS}"
        ) from error
    return None if budget_bytes is None else WithinBudget(budget_bytes)


@dataclass(frozen=True, slots=True)
class WithinBudget(LayerPlacer):
    """Places a model on its device with as many layers as a budget holds.

    Attributes:
        budget_bytes: maximum bytes of weights on the device, slots included.
    """

    budget_bytes: int

    def check(
        self, config: PreTrainedConfig, *, dtype: torch.dtype | None, trust_remote_code: bool
    ) -> None:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config,
                dtype=dtype or config.dtype or torch.float32,
                trust_remote_code=trust_remote_code,
            )
        _place(model, layer_weights(model, _num_layers(model)), self.budget_bytes)

    def place(
        self, model: PreTrainedModel, device: torch.device
    ) -> tuple[WeightsPlacement, LayerSource | None]:
        if device.type == "cpu":
            widen_linears(model)  # first: the offloaded bytes are those that are multiplied
        layers = layer_weights(model, _num_layers(model))
        place = _place(model, layers, self.budget_bytes)
        _check_room(place, device)
        if not place.offloaded_layers:
            nn.Module.to(model, device)
            return place, None
        with torch.inference_mode(False):
            link = make_link(device, place.host_bytes)
            for number in place.offloaded_layers:
                link.store(number, layers[number])
                for held in layers[number].held:  # free at once: the model may fill the memory
                    held.parameter.data = torch.empty(0, dtype=held.dtype)
            nn.Module.to(model, device)
            link.open(SLOTS, place.slot_bytes)
            return place, WeightStream(layers, place, link)


def _num_layers(model: PreTrainedModel) -> int:
    return ModelSpec.from_config(model.config.to_dict()).num_layers


def _place(
    model: PreTrainedModel, layers: tuple[TransferredWeights, ...], budget_bytes: int
) -> WeightsPlacement:
    own_bytes = sum(held.num_bytes for layer in layers for held in layer.held)
    other_bytes = weight_bytes(model) - own_bytes
    return place_weights([layer.num_bytes for layer in layers], other_bytes, budget_bytes)


def _check_room(place: WeightsPlacement, device: torch.device) -> None:
    if device.type != "cuda":
        return
    free_bytes = torch.cuda.mem_get_info(device)[0]
    if place.device_bytes > free_bytes:
        raise ConfigError(
            f"weights on the device need {format_size(place.device_bytes)}, and "
            f"{format_size(free_bytes)} are free on {device}; lower --weights-memory"
        )
