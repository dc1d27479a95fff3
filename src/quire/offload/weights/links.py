"""Transfers of layer weights into slots: from a file, or from pinned memory over a link.

    prefetch  start to fill a slot, once its previous layer is released: W_K and W_V, then the rest
    arrive    make the next computation wait for the filled slot, or for its first part
    release   mark the end of the work that reads the slot
    finalize  wait until no transfer is in flight

`copied_s` is the time spent in copies, `stalled_s` the time computation waited for them.
"""

import os
import tempfile
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import UInt8
from torch import Tensor, nn

from quire.errors import ConfigError, StorageError
from quire.kv.store import zero_bytes
from quire.layout.sizes import format_size
from quire.models.layer_source import decoder_layers
from quire.offload.swap.host_store import pin_memory
from quire.offload.swap.transfer import ThreadTransferWorker, Transfer, TransferWorker

KV_PART, REST = range(2)
"""Parts of a layer, in the order of their transfers: W_K and W_V, from which keys and values are
computed, with the other parameters that attention reads before; then all others."""

_AFTER_KV = ("q_proj", "o_proj", "out_proj", "dense", "c_proj")  # of an attention module

ALIGNMENT_BYTES = 256  # of each tensor in a slot: the least alignment of device allocators


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A parameter and its location in the bytes of its layer.

    Attributes:
        parameter: parameter of the model; its storage changes, the object does not.
        start: its first byte.
        dtype, shape: dtype and shape of the parameter when it was registered.
        part: KV_PART or REST, the transfer that it is part of.
    """

    parameter: nn.Parameter
    start: int
    dtype: torch.dtype
    shape: torch.Size
    part: int

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return self.shape.numel() * self.dtype.itemsize

    def within(self, whole: Tensor) -> Tensor:
        """View of its elements in the bytes of a layer, uint8 [num_bytes]."""
        part = whole[self.start : self.start + self.num_bytes]
        return part.view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class TransferredWeights:
    """A decoder layer and its own parameters.

    Attributes:
        module: module of the model.
        held: its parameters, in storage order.
        num_bytes: bytes of all parameters, each rounded up to the alignment.
        kv_bytes: those of KV_PART, which comes first.
    """

    module: nn.Module
    held: tuple[Held, ...]
    num_bytes: int
    kv_bytes: int = 0

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """First byte and end of KV_PART and of REST."""
        return (0, self.kv_bytes), (self.kv_bytes, self.num_bytes)


def layer_weights(model: nn.Module, num_layers: int) -> tuple[TransferredWeights, ...]:
    """Find the decoder layers and their own parameters.

    Buffers, parameters shared with other modules (a head tied to embeddings, shared layers) and
    non-contiguous parameters are not a layer's own: they stay on the device.

    Raises:
        UnsupportedModel: the layers are not in one list, each with its index.
    """
    modules = decoder_layers(model, num_layers)
    shared = _shared(model, modules)
    return tuple(_own(module, shared) for module in modules)


def _shared(model: nn.Module, modules: Sequence[nn.Module]) -> set[int]:
    """Ids of parameters that more than one layer, or another module, uses."""
    owner: Mapping[int, int] = {
        id(part): number for number, layer in enumerate(modules) for part in layer.modules()
    }
    owners: dict[int, set[int]] = {}
    for part in model.modules():
        for parameter in part._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), set()).add(owner.get(id(part), -1))
    return {number for number, found in owners.items() if len(found) > 1}


def _own(module: nn.Module, shared: set[int]) -> TransferredWeights:
    held: list[Held] = []
    start = kv_bytes = 0
    first = {
        id(parameter)
        for part in module.modules()
        if "Attention" in type(part).__name__ and hasattr(part, "layer_idx")
        for name, parameter in part.named_parameters()
        if name.split(".")[0] not in _AFTER_KV
    }
    for parameter in sorted(module.parameters(), key=lambda p: id(p) not in first):
        if id(parameter) in shared or not parameter.is_contiguous() or not parameter.numel():
            continue
        part = KV_PART if id(parameter) in first else REST
        found = Held(parameter, start, parameter.dtype, parameter.shape, part)
        held.append(found)
        start += -(-found.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        kv_bytes = start if part == KV_PART else kv_bytes
    return TransferredWeights(module, tuple(held), start, kv_bytes)


PARTS = (KV_PART, REST)


class WeightLink(ABC):
    """Offloaded bytes of layers, and the device slots that they are transferred to.

    Attributes:
        slots: [slot_bytes] on the device each.
        num_bytes: bytes transferred so far.
        copied_s, stalled_s: see the module; delayed on a device.
    """

    slots: Sequence[UInt8[Tensor, " slot_bytes"]]
    num_bytes: int = 0
    copied_s: float = 0.0
    stalled_s: float = 0.0

    @abstractmethod
    def store(self, layer: int, weights: TransferredWeights) -> None:
        """Store the bytes of a layer outside of the device."""

    @abstractmethod
    def open(self, num_slots: int, slot_bytes: int) -> None:
        """Allocate the slots, after all layers are stored."""

    @abstractmethod
    def prefetch(self, layer: int, slot: int) -> None:
        """Start to fill a slot with a layer; see the module."""

    @abstractmethod
    def arrive(self, slot: int, parts: Sequence[int] = PARTS) -> None:
        """Make the next computation wait for parts of a slot; see the module.

        Raises:
            Exception: the error of the copy.
        """

    @abstractmethod
    def release(self, slot: int) -> None:
        """Mark the end of the work that reads a slot; see the module."""

    @abstractmethod
    def finalize(self) -> None:
        """Wait until no transfer is in flight; see the module."""

    @abstractmethod
    def clock_s(self) -> Callable[[], float | None]:
        """Mark the current point of the device's work; the result returns its time once known."""


class FileLink(WeightLink):
    """Reads from an unnamed file through the page cache of the system: the link of a CPU.

    Args:
        num_bytes: bytes of all offloaded layers.
        transfer_worker: runs the copies; default: a thread of its own.

    Raises:
        ConfigError: too little free disk space.
    """

    def __init__(self, num_bytes: int, transfer_worker: TransferWorker | None = None) -> None:
        folder = tempfile.gettempdir()
        free_bytes = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
        if num_bytes > free_bytes:
            raise ConfigError(
                f"offloaded layers need {format_size(num_bytes)} in a file in {folder}, which has "
                f"{format_size(free_bytes)} free; set TMPDIR to a folder on a larger disk, or "
                "raise --weights-memory"
            )
        self._file = tempfile.TemporaryFile(prefix="quire-weights-")  # noqa: SIM115 - for life
        weakref.finalize(self, self._file.close)
        self._places: dict[int, tuple[int, TransferredWeights]] = {}
        self.transfer_worker: TransferWorker = transfer_worker or ThreadTransferWorker()
        self._in_flight: dict[tuple[int, int], Transfer] = {}

    def store(self, layer: int, weights: TransferredWeights) -> None:
        whole = _packed(weights)
        start = self._file.tell()
        self._file.write(whole.numpy().data)
        self._places[layer] = start, weights

    def open(self, num_slots: int, slot_bytes: int) -> None:
        self._file.flush()
        cpu = torch.device("cpu")
        self.slots = tuple(zero_bytes(slot_bytes, cpu) for _ in range(num_slots))

    def prefetch(self, layer: int, slot: int) -> None:
        start, weights = self._places[layer]
        whole = self.slots[slot].numpy().data
        for part, (first, end) in enumerate(weights.parts):
            if end > first:
                copy = self._copy(start + first, whole[first:end])
                self.num_bytes += end - first
                self._in_flight[slot, part] = self.transfer_worker.submit(copy, end - first)

    def _copy(self, start: int, into: memoryview) -> Callable[[], None]:
        def copy() -> None:
            started_s = time.perf_counter()
            _read(self._file.fileno(), into, start)
            self.copied_s += time.perf_counter() - started_s

        return copy

    def arrive(self, slot: int, parts: Sequence[int] = PARTS) -> None:
        for part in parts:
            transfer = self._in_flight.pop((slot, part), None)
            if transfer is not None:
                started_s = time.perf_counter()
                transfer.result()
                self.stalled_s += time.perf_counter() - started_s

    def release(self, slot: int) -> None:
        """Do nothing: reads of a slot are complete on return."""

    def finalize(self) -> None:
        for transfer in self._in_flight.values():
            transfer.exception()
        self._in_flight.clear()

    def clock_s(self) -> Callable[[], float | None]:
        now_s = time.perf_counter()
        return lambda: now_s


class CudaLink(WeightLink):
    """Copies from pinned memory on a stream of its own: the link of a CUDA device.

    Streams wait for events; the CPU does not wait.

    Args:
        device: device of the slots.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stored: dict[int, tuple[Tensor, TransferredWeights]] = {}
        self._arrived: dict[tuple[int, int], torch.cuda.Event] = {}
        self._released: dict[int, torch.cuda.Event] = {}
        self._origin = self._event(torch.cuda.current_stream(device))
        self._copies: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._stalls: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def store(self, layer: int, weights: TransferredWeights) -> None:
        """See `WeightLink`.

        Raises:
            ConfigError: the system cannot pin the bytes.
        """
        whole = _packed(weights)
        try:
            pin_memory(whole, self)
        except ConfigError as error:
            raise ConfigError(
                f"the system cannot pin {format_size(weights.num_bytes)} for layer {layer}; "
                "raise --weights-memory, or the limit on locked memory (ulimit -l)"
            ) from error
        self._stored[layer] = whole, weights

    def open(self, num_slots: int, slot_bytes: int) -> None:
        self.slots = tuple(zero_bytes(slot_bytes, self._device) for _ in range(num_slots))
        for slot in range(num_slots):
            self.release(slot)  # after the zeros are written

    def prefetch(self, layer: int, slot: int) -> None:
        stored, weights = self._stored[layer]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._released[slot])
            for part, (first, end) in enumerate(weights.parts):
                if end > first:
                    began = self._event(self._stream)
                    self.slots[slot][first:end].copy_(stored[first:end], non_blocking=True)
                    self._arrived[slot, part] = self._event(self._stream)
                    self._copies.append((began, self._arrived[slot, part]))
        self.num_bytes += stored.numel()

    def arrive(self, slot: int, parts: Sequence[int] = PARTS) -> None:
        for part in parts:
            arrived = self._arrived.pop((slot, part), None)
            if arrived is not None:
                current = torch.cuda.current_stream(self._device)
                before = self._event(current)
                current.wait_event(arrived)
                self._stalls.append((before, self._event(current)))
        self._note()

    def release(self, slot: int) -> None:
        self._released[slot] = self._event(torch.cuda.current_stream(self._device))

    def finalize(self) -> None:
        self._stream.synchronize()
        self._arrived.clear()

    def clock_s(self) -> Callable[[], float | None]:
        now = self._event(torch.cuda.current_stream(self._device))

        def at_s() -> float | None:
            return self._origin.elapsed_time(now) / 1e3 if now.query() else None  # type: ignore[no-untyped-call]

        return at_s

    def _event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def _note(self) -> None:
        """Add up the times of finished copies and stalls."""
        for pairs, name in ((self._copies, "copied_s"), (self._stalls, "stalled_s")):
            while pairs and pairs[0][1].query():  # type: ignore[no-untyped-call]
                began, ended = pairs.popleft()
                setattr(self, name, getattr(self, name) + began.elapsed_time(ended) / 1e3)


def make_link(device: torch.device, num_bytes: int) -> WeightLink:
    """Create the link for a type of device.

    Raises:
        ConfigError: too little disk space for the offloaded layers.
    """
    return CudaLink(device) if device.type == "cuda" else FileLink(num_bytes)


def _packed(weights: TransferredWeights) -> UInt8[Tensor, " num_bytes"]:
    """A layer's parameters in one contiguous tensor."""
    whole = zero_bytes(weights.num_bytes, torch.device("cpu"))
    for held in weights.held:
        held.within(whole).copy_(held.parameter.detach())
    return whole


def _read(file: int, into: memoryview, start: int) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(file, [into[done:]], start + done)
        if not count:
            raise StorageError(f"the weights file ends {len(into) - done:,} B too early")
        done += count
