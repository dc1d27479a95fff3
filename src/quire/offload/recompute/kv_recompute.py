"""Recomputes keys and values of an offloaded prefix in a step from its stored activations (X).

    link      | X 0 | X 1 | KV of the others |
    device          | recompute 0 | recompute 1 |  attend

X is transferred in chunks; recompute starts with the first. The staging of X, outside of the arena,
has slots for two layers. Keys and values go to the staging pages. Layer 0 needs token ids only.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import UInt8
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.device_copies import to_device
from quire.kv.tables import LaneTable
from quire.layout.layout import SLOTS
from quire.models.adapter import TransformersDecoder
from quire.offload.kv.offloaded_prefixes import OffloadedPrefixes
from quire.offload.kv.offloader import RowRequests
from quire.offload.kv.prefix_splits import Share
from quire.offload.kv.staging import slot_places
from quire.offload.recompute.activation_allocator import Segment
from quire.offload.recompute.activation_store import ActivationStore
from quire.offload.step_log import PROJECT, X_IN, StepLog
from quire.offload.swap.transfer import Transfer

CHUNK_TOKENS = 256  # least tokens of a chunk of X
_MAX_CHUNKS = 8  # most chunks of a layer above that size


Submit = Callable[[str, int, int, int, Callable[[], None]], Transfer]
"""Starts a copy: kind, layer of the model, tokens, bytes, function that copies."""

Write = Callable[..., None]
"""Writes to slots: pages, offsets [token, lane], positions, keys, values, and index keys if any."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Slots of one group whose keys and values are computed together.

    Attributes:
        first, tokens: range of the tokens recomputed in the step.
        segments: locations of their activations.
        pages: page of each token and lane, by staging slot.
        offsets: offset in the page of each token and lane.
    """

    first: int
    tokens: int
    segments: tuple[Segment, ...]
    pages: tuple[Tensor, ...]
    offsets: Tensor


class KVRecompute:
    """Recomputes keys and values of offloaded prefixes for the steps of an engine.

    Args:
        model: computes keys and values.
        store: stores the activations.
        tokens: properties of sequences.
        device: device of the model.
        groups: names of the lane groups that can be recomputed.

    Attributes:
        groups: see above.
        chunk_tokens: least tokens of a chunk of X.
        num_recomputed: tokens recomputed so far, counted in each layer.
    """

    def __init__(
        self,
        model: TransformersDecoder,
        store: ActivationStore,
        tokens: RowRequests,
        device: torch.device,
        *,
        groups: Sequence[str],
    ) -> None:
        self.model, self.store, self.tokens, self.device = model, store, tokens, device
        self.groups, self.chunk_tokens, self.num_recomputed = groups, CHUNK_TOKENS, 0
        self._staging: dict[tuple[str, int], Tensor] = {}

    @property
    def staging_bytes(self) -> int:
        """Bytes of X on the device."""
        return sum(staging.numel() for staging in self._staging.values())

    def staging(
        self, group: str, tokens: int, batch: int = 0
    ) -> UInt8[Tensor, "slot token row_bytes"]:
        """Staging of X for two layers, encoded; each group and batch of a step has its own."""
        needed = SLOTS * tokens * (row_bytes := self.store.codec.row_bytes)
        key = group, batch
        if key not in self._staging or self._staging[key].numel() < needed:
            with torch.inference_mode(mode=False):
                self._staging[key] = torch.empty(needed, dtype=torch.uint8, device=self.device)
        return self._staging[key][:needed].view(SLOTS, tokens, row_bytes)


class StepKVRecompute:
    """KV recompute of one group in a step.

    Args:
        kv_recompute: KV recompute of the engine.
        prefixes: offloaded prefixes of all sequences.
        table: page table of the lane group.
        shares: splits of the sequences of the step.
        log: log of the step.
        batch: index of the batch in the step.
    """

    def __init__(
        self,
        kv_recompute: KVRecompute,
        prefixes: OffloadedPrefixes,
        table: LaneTable,
        shares: Mapping[int, Share],
        log: StepLog,
        batch: int = 0,
    ) -> None:
        self._engine, self._log, self._group = kv_recompute, log, table.group
        self._prefixes, self._batch = prefixes, batch
        slots = _slots(table, shares)
        self.rows = {row: slots for row, slots in slots.items() if len(slots)}
        self.tokens = sum(map(len, self.rows.values()))
        self._chunks = self._divide(table)
        self._staging = kv_recompute.staging(self._group.name, self.tokens, batch)
        self._in_flight: dict[tuple[int, int], Transfer] = {}
        self._positions: dict[int, Tensor] = {}
        variants = {kv_recompute.tokens.rope_variant(row) for row in self.rows}
        self._rope_variant = variants.pop() if variants else 0
        starts = bool(self.tokens) and self._group.layers[0] == 0
        self._first = self._recompute_first() if starts else None

    def prefetch(self, index: int, submit: Submit) -> None:
        """Start the transfer of a layer's X into its staging slot, unless it was loaded ahead."""
        if self._group.layers[index] == 0:
            return
        ahead = self._prefixes.use
        found = ahead.take_activations(self._group.name, self._batch, index, self.rows)
        copies = self._submit_chunks(index, submit) if found is None else found
        for number, transfer in enumerate(copies):
            self._in_flight[index, number] = transfer

    def prefetch_ahead(self, index: int, submit: Submit) -> None:
        """Start the transfer of a layer's X for the next step, whose staging it is if all agree."""
        if self._group.layers[index]:
            copies = self._submit_chunks(index, submit)
            ahead, name = self._prefixes.use, self._group.name
            ahead.add_activations(name, self._batch, index, self.rows, copies)

    def _submit_chunks(self, index: int, submit: Submit) -> Sequence[Transfer]:
        layer = self._group.layers[index]
        staging, store = self._staging[self._slot(index)], self._engine.store
        copies = []
        for chunk in self._chunks:
            out = staging[chunk.first : chunk.first + chunk.tokens]

            def copy(chunk: _Chunk = chunk, out: Tensor = out) -> None:
                store.load(layer, chunk.segments, out)

            copies.append(submit(X_IN, layer, chunk.tokens, out.numel(), copy))
        return copies

    def recompute(self, index: int, write: Write) -> None:
        """Compute a layer's keys and values as its X arrives, and write them to their slots."""
        layer, positions = self._group.layers[index], self._positions_of(index)
        model, marks = self._engine.model, self._log.marks
        for number, chunk in enumerate(self._chunks):
            some = slice(chunk.first, chunk.first + chunk.tokens)
            if layer == 0:
                assert self._first is not None, "computed at the start of the step"
                stored = tuple(part[some] for part in self._first)
            else:
                self._in_flight.pop((index, number)).result()
                start = marks.now()
                stored = model.keys_and_values(
                    layer,
                    self._engine.store.codec.decode(self._staging[self._slot(index), some]),
                    positions[some],
                    rope_variant=self._rope_variant,
                )
            write(chunk.pages[self._slot(index)], chunk.offsets, positions[some], *stored)
            if layer:
                self._log.add(PROJECT, layer, chunk.tokens, 0, start, marks.now())
        self._engine.num_recomputed += self.tokens

    def unfinished(self) -> Sequence[Transfer]:
        """Copies that no call has waited for."""
        return tuple(self._in_flight.values())

    # ---- locations -----------------------------------------------------------------------------

    def _slot(self, index: int) -> int:
        return self._group.staging_slot(index, SLOTS)

    def _recompute_first(self) -> tuple[Tensor, ...]:
        """Compute keys and values of layer 0, before the model's forward begins."""
        ids = [
            token
            for row in self.rows
            for token in self._engine.tokens.token_ids(row, self._logical(row, 0))
        ]
        tokens = torch.tensor(ids, dtype=torch.int64, device=self._engine.device)
        positions = self._positions_of(0)
        return self._engine.model.first_layer(tokens, positions, rope_variant=self._rope_variant)

    def _logical(self, row: int, index: int) -> NDArray[np.int64]:
        return self._prefixes.positions(row, self._group.name, index, self.rows[row])

    def _positions_of(self, index: int) -> Tensor:
        """Logical positions of all tokens in a layer."""
        place = 0 if self._group.ordered else index
        if place not in self._positions:
            found = [self._logical(row, index) for row in self.rows]
            numbers = np.concatenate(found) if found else np.empty(0, dtype=np.int64)
            self._positions[place] = to_device(numbers, self._engine.device)
        return self._positions[place]

    def _divide(self, table: LaneTable) -> list[_Chunk]:
        """Divide X into chunks, with the staging pages for their keys and values."""
        most = max(self._engine.chunk_tokens, -(-self.tokens // _MAX_CHUNKS))
        pages, offsets = slot_places(table, self.rows)
        chunks: list[_Chunk] = []
        parts = list(self._segments(most))
        for first in range(0, self.tokens, most):
            tokens = min(most, self.tokens - first)
            some = slice(first, first + tokens)
            inside = tuple(s for start, s in parts if first <= start < first + tokens)
            by_slot = tuple(self._tensor(pages[slot, some]) for slot in range(SLOTS))
            chunks.append(_Chunk(first, tokens, inside, by_slot, self._tensor(offsets[some])))
        return chunks

    def _segments(self, most: int) -> list[tuple[int, Segment]]:
        """(First token, segment) of the stored activations, split at chunk boundaries."""
        found, done = [], 0
        for row, slots in self.rows.items():
            start = slots.start
            while start < slots.stop:
                left = most - done % most
                stop = min(slots.stop, start + left)
                for segment in self._engine.store.allocator.segments(row, start, stop):
                    found.append((done, segment))
                    done += segment.tokens
                start = stop
        return found

    def _tensor(self, numbers: NDArray[np.int64]) -> Tensor:
        return to_device(numbers, self._engine.device)


def _slots(table: LaneTable, shares: Mapping[int, Share]) -> dict[int, range]:
    """Slots of each sequence that are recomputed."""
    tokens, found = table.group.page_class.tokens, {}
    for row, share in shares.items():
        stop = min(share.recomputed.stop, int(table.staged[row]))
        found[row] = range(
            share.recomputed.start * tokens, max(share.recomputed.start, stop) * tokens
        )
    return found
