"""Interface between paged attention and KV offload: one object per step, None without offload."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.backend import AttentionBackend, AttentionMath, LayerPages, NewSlots
from quire.kv.flat_batch import WHOLE_STEP, FlatBatch, StepPart
from quire.layout.pages import LaneGroup
from quire.layout.sparse import SparseSpec


@runtime_checkable  # for the type checks in tests
class StepOffload(Protocol):
    """The offloaded KV of one step; `quire.offload.kv.step_offload.StepKVOffload` implements it."""

    wants_inputs: bool

    def slots(self, group: LaneGroup, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """Live slots [rows, lanes] that the backend attends to."""
        ...

    def note_input(self, layer: int, inputs: Tensor) -> None:
        """Record the input of a layer's attention."""

    def begin_layer(
        self,
        group: LaneGroup,
        index: int,
        backend: AttentionBackend,
        slots: NewSlots,
        positions: Tensor | None,
    ) -> None:
        """Recompute KV at the start of a layer, whose weights may still be in transfer."""
        ...

    def start_cpu_attention(
        self, group: LaneGroup, index: int, query: Tensor, math: AttentionMath
    ) -> None:
        """Begin attention on the CPU."""

    def wait_for_prefix(
        self,
        group: LaneGroup,
        index: int,
        backend: AttentionBackend,
        slots: NewSlots,
        positions: Tensor | None,
    ) -> None:
        """Wait until the offloaded pages of a layer are in their staging slot."""
        ...

    def layer_pages(self, group: LaneGroup, index: int, pages: LayerPages) -> LayerPages:
        """Return the pages of a layer, which find those that are not on the device."""
        ...

    def merge_cpu_attention(
        self, out: Tensor, group: LaneGroup, pages: LayerPages, query: Tensor, math: AttentionMath
    ) -> None:
        """Merge the result of CPU attention into the output."""

    def release_staging(self, group: LaneGroup, index: int) -> None:
        """Release a layer's staging slot after the layer's attention."""


@runtime_checkable  # for the type checks in tests
class EngineOffload(Protocol):
    """The offloaded KV of an engine; implemented by `quire.offload.kv.step_offload.KVOffload`."""

    @property
    def staging_bytes(self) -> int:
        """Bytes of activation staging buffers on the device, in addition to the arena."""
        ...

    def batch_key(self, row: int) -> int | None:
        """Return a key that rows with common offloaded pages have: they must be in one batch."""

    def step(
        self,
        batch: FlatBatch,
        part: StepPart = WHOLE_STEP,
        sparse: Sequence[SparseSpec | None] = (),
    ) -> StepOffload | None:
        """Return the offload object of a batch; None if no row of the batch has offloaded KV."""
        ...
