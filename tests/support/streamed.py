"""Zoo models with weight offload; slots hold NaN until a layer is loaded into them."""

import random
import time
from functools import cache

import torch

from quire.layout.model import ModelSpec
from quire.models.adapter import TransformersDecoder
from quire.models.loader import LoadedModel
from quire.models.weights import weight_bytes
from quire.offload.swap.transfer import ThreadTransferWorker
from quire.offload.weights.links import layer_weights
from quire.offload.weights.placement import WithinBudget
from support import zoo
from support.engines import loaded


class DelayedTransfers(ThreadTransferWorker):
    """A transfer worker that delays each copy by a random time and fails chosen copies."""

    def __init__(self, seed: int = 0, max_s: float = 0.0005) -> None:
        super().__init__()
        self._rng, self._max_s = random.Random(seed), max_s
        self.num_bytes = self.num_copies = 0
        self.fails: dict[int, Exception] = {}  # by the number of the copy, from 0

    def submit(self, copy, num_bytes):
        delay_s, number = self._rng.random() * self._max_s, self.num_copies
        self.num_copies += 1
        self.num_bytes += num_bytes

        def late():
            time.sleep(delay_s)
            if number in self.fails:
                raise self.fails[number]
            copy()

        return super().submit(late, num_bytes)


@cache
def min_bytes(architecture: str, times: int = 3) -> tuple[int, int]:
    """Bytes of two slots and all weights outside layers, and of the largest layer."""
    model = zoo.build(architecture, times=times)
    layers = layer_weights(model, ModelSpec.from_config(model.config.to_dict()).num_layers)
    own = sum(held.num_bytes for layer in layers for held in layer.held)
    largest = max(layer.num_bytes for layer in layers)
    return weight_bytes(model) - own + 2 * largest, largest


def load_streamed(
    architecture: str,
    *,
    stay: int = 0,
    times: int = 3,
    device: str = "cpu",
    transfer_worker: DelayedTransfers | None = None,
) -> LoadedModel:
    """A zoo model with `stay` layers and two slots on the device; on a CPU they are poisoned."""
    least, largest = min_bytes(architecture, times)
    model = zoo.build(architecture, times=times)
    budget = least + stay * largest
    place, weights = WithinBudget(budget).place(model, torch.device(device))
    if device == "cpu" and weights is not None:
        poison(weights.link)
        weights.link.transfer_worker = transfer_worker or DelayedTransfers()
    own = {"weight_bytes": place.device_bytes, "weights": weights, "place": place}
    return loaded(TransformersDecoder(model, weights), architecture, **own)


def poison(link) -> None:
    prefetch = link.prefetch

    def poisoned(layer: int, slot: int) -> None:
        link.slots[slot].fill_(0xFF)
        prefetch(layer, slot)

    link.prefetch = poisoned
