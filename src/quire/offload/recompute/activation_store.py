"""Attention inputs (X) stored in CPU memory as tokens are computed.

    blocks   [block, layer, slot of the block, row_bytes]      elements as computed, or their codes

On a CPU, rows are written directly. From a device they are copied to pinned memory on a separate
stream. Rows of a prompt go straight to their place. Rows of decode tokens go to a contiguous
buffer, and from there to their place before the next step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from quire.codecs.base import DTYPES
from quire.codecs.registry import make_codec
from quire.kernels.device_copies import to_device
from quire.kv.slot_moves import SlotMoves
from quire.kv.store import zero_bytes
from quire.layout.codecs import WIDEST_GROUP, CodecSpec
from quire.offload.recompute.activation_allocator import ActivationAllocator, Segment
from quire.offload.swap.host_store import pin_memory

# Storage and transfer format of attention inputs (X): as computed, or as codes of a codec.
#
# A row holds one token: its elements in vectors of up to 64, and for each the bytes of all planes.


class ActivationCodec:
    """Converts activations to rows of bytes and back.

    Args:
        spec: codec that writes tokens one by one and needs no constants; None: as computed.
        hidden: elements of an activation.
        dtype: dtype of each element, as computed.

    Attributes:
        hidden, dtype: see above.
        row_bytes: bytes of one token in one layer.

    Raises:
        ConfigError: the codec does not support vectors of this width.
    """

    def __init__(self, spec: CodecSpec | None, hidden: int, dtype: torch.dtype) -> None:
        self.hidden, self.dtype = hidden, dtype
        self.row_bytes = hidden * dtype.itemsize
        self._codec = None
        if spec is not None:
            self._width = max(w for w in range(1, WIDEST_GROUP + 1) if hidden % w == 0)
            self._codec, self._planes = make_codec(spec, self._width), spec.planes(self._width)
            vector_bytes = sum(plane.record_bytes for plane in self._planes)
            self.row_bytes = hidden // self._width * vector_bytes

    def encode(self, inputs: Float[Tensor, "token hidden"]) -> UInt8[Tensor, "token row_bytes"]:
        """Rows of activations; without a codec a view of them."""
        if self._codec is None:
            return inputs.contiguous().view(torch.uint8)
        vectors = inputs.view(len(inputs), -1, self._width).float()
        planes = [plane.contiguous().view(torch.uint8) for plane in self._codec.encode(vectors)]
        return torch.cat(planes, dim=-1).view(len(inputs), -1)

    def decode(self, rows: UInt8[Tensor, "token row_bytes"]) -> Float[Tensor, "token hidden"]:
        """Activations of rows, in the model's dtype."""
        if self._codec is None:
            return rows.view(self.dtype)
        vectors = rows.view(len(rows), self.hidden // self._width, -1)
        sizes = [plane.record_bytes for plane in self._planes]
        parts = torch.split(vectors, sizes, dim=-1)
        planes = [
            part.contiguous().view(DTYPES[plane.dtype])
            for part, plane in zip(parts, self._planes, strict=True)
        ]
        return self._codec.decode(planes).to(self.dtype).view(len(rows), self.hidden)


_SHORT = 8  # longest run of a row's tokens that is copied token by token


@dataclass(frozen=True, slots=True)
class Written:
    """New tokens of a batch whose activations are stored.

    Attributes:
        long: (first token of the batch, segment) of tokens that are copied together.
        short: tokens of the batch that are copied one by one, int64 [n].
        places: rows of these in the first stored layer, int64 [n].
    """

    long: tuple[tuple[int, Segment], ...]
    short: Tensor
    places: Tensor

    @classmethod
    def of(
        cls, starts: Sequence[tuple[int, int, list[Segment]]], store: "ActivationStore"
    ) -> "Written":
        """Build from (first token in the batch, first new slot, segments) of each row."""
        long: list[tuple[int, Segment]] = []
        tokens: list[int] = []
        places: list[int] = []
        for token, slot, segments in starts:
            for segment in segments:
                first = token + segment.start - slot
                if segment.tokens > _SHORT:
                    long.append((first, segment))
                    continue
                place = store.place(0, segment)
                tokens += range(first, first + segment.tokens)
                places += range(place, place + segment.tokens)
        return cls(
            tuple(long),
            torch.tensor(tokens, dtype=torch.int64),
            torch.tensor(places, dtype=torch.int64),
        )


@dataclass(frozen=True, slots=True)
class Writing:
    """A batch whose activations are being stored.

    Attributes:
        written: its new tokens.
        short: `written.short` on the device.
        buffer: pinned bytes for these tokens of all layers; empty without a stream.
    """

    written: Written
    short: Tensor
    buffer: Tensor

    def rows(self, index: int, row_bytes: int) -> Tensor:
        """Buffered activations of a layer."""
        size = len(self.written.short) * row_bytes
        return self.buffer[index * size : (index + 1) * size].view(-1, row_bytes)


class ActivationStore:
    """Activations of all sequences of an engine.

    Args:
        allocator: allocates blocks.
        layers: layers of the model whose activations are stored.
        codec: storage format of an activation.
        device: device of the model.

    Raises:
        ConfigError: the system cannot pin the memory.
    """

    def __init__(
        self,
        allocator: ActivationAllocator,
        layers: Sequence[int],
        codec: ActivationCodec,
        device: torch.device,
    ) -> None:
        self.allocator, self.codec = allocator, codec
        self.index = {layer: index for index, layer in enumerate(layers)}
        self._device = device
        self.block_bytes = codec.row_bytes * allocator.block_tokens * len(layers)
        host = zero_bytes(allocator.num_blocks * self.block_bytes, torch.device("cpu"))
        if device.type == "cuda":
            pin_memory(host, self)
        with torch.inference_mode(mode=False):
            self._slots = host.view(-1, codec.row_bytes)  # [block, layer, slot] flattened
        self._writings: list[Writing] = []
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers: list[Tensor] = []  # of the batches of a step

    @property
    def total_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.allocator.num_blocks * self.block_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of blocks allocated to sequences."""
        return self.allocator.used_blocks * self.block_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return self.block_bytes // self.allocator.block_tokens

    def place(self, index: int, segment: Segment) -> int:
        """Row of a segment's first slot in a layer, counted over stored layers."""
        block = segment.block * len(self.index) + index
        return block * self.allocator.block_tokens + segment.offset

    # ---- writes --------------------------------------------------------------------------------

    def begin(self, written: Written) -> Writing:
        """Begin to store the activations of a batch; `finish` ends all batches of a step."""
        writing = Writing(written, written.short, torch.empty(0, dtype=torch.uint8))
        if self._stream is not None:
            buffer = self._buffer(len(self._writings), written)
            short = to_device(written.short.numpy(), self._device)
            writing = Writing(written, short, buffer)
        self._writings.append(writing)
        return writing

    def note(
        self, layer: int, inputs: Float[Tensor, "num_tokens hidden"], writing: Writing
    ) -> None:
        """Store the attention inputs of a layer for a batch of the step."""
        index, written = self.index.get(layer), writing.written
        if index is None:
            return
        if self._stream is None:
            self._put(index, self.codec.encode(inputs), written)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            inputs.record_stream(self._stream)
            rows = self.codec.encode(inputs)
            self._put_long(index, rows, written)
            if len(written.short):
                buffered = writing.rows(index, self.codec.row_bytes)
                buffered.copy_(rows[writing.short], non_blocking=True)

    def finish(self) -> None:
        """Wait until the activations of the step are in their places."""
        writings, self._writings = self._writings, []
        if not writings or self._stream is None:
            return
        self._stream.synchronize()
        for writing in writings:
            for index in range(len(self.index)) if len(writing.written.short) else ():
                rows = writing.rows(index, self.codec.row_bytes)
                self._slots[self._places(index, writing.written)] = rows

    def _put(self, index: int, rows: Tensor, written: Written) -> None:
        self._put_long(index, rows, written)
        if len(written.short):
            self._slots[self._places(index, written)] = rows[written.short]

    def _put_long(self, index: int, rows: Tensor, written: Written) -> None:
        for token, segment in written.long:
            place = self.place(index, segment)
            source = rows[token : token + segment.tokens]
            self._slots[place : place + segment.tokens].copy_(source, non_blocking=True)

    def _places(self, index: int, written: Written) -> Tensor:
        return written.places + index * self.allocator.block_tokens

    def _buffer(self, number: int, written: Written) -> Tensor:
        """Pinned bytes for the short runs of a batch; kept for later steps."""
        needed = len(self.index) * len(written.short) * self.codec.row_bytes
        while len(self._buffers) <= number:
            self._buffers.append(torch.empty(0, dtype=torch.uint8))
        if self._buffers[number].numel() < needed:
            with torch.inference_mode(mode=False):
                self._buffers[number] = torch.empty(2 * needed, dtype=torch.uint8, pin_memory=True)
        return self._buffers[number]

    # ---- reads ---------------------------------------------------------------------------------

    def load(self, layer: int, segments: Sequence[Segment], out: Tensor) -> None:
        """Start to copy the activations of segments into consecutive rows of [slots, row_bytes]."""
        done = 0
        for segment in segments:
            place = self.place(self.index[layer], segment)
            source = self._slots[place : place + segment.tokens]
            out[done : done + segment.tokens].copy_(source, non_blocking=True)
            done += segment.tokens

    def move(self, row: int, moves: SlotMoves, layers: Sequence[int]) -> None:
        """Move activations with their slots; each lane is one layer.

        Args:
            row: the sequence; the activations of all its moved slots are stored.
            moves: slot moves of a lane group.
            layers: layers of that group.
        """
        self.finish()
        known = self.allocator.known(row)
        of_layer = np.array([self.index.get(layer, -1) for layer in layers])
        followed = of_layer[moves.lane] >= 0  # the model's first layer stores none
        places = np.concatenate(
            [
                np.arange(s.tokens) + self.place(0, s)
                for s in self.allocator.segments(row, known.start, known.stop)
            ]
        )
        first = of_layer[moves.lane[followed]] * self.allocator.block_tokens
        source, target = (
            torch.from_numpy(places[slot[followed] - known.start] + first)
            for slot in (moves.source, moves.target)
        )
        self._slots[target] = self._slots[source]
