"""What attention over pages knows of KV offload: one object a step, and nothing where it is off."""

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.backend import AttentionBackend, AttentionMath, LayerPages, NewSlots
from quire.kv.flat_batch import FlatBatch
from quire.layout.pages import LaneGroup


@runtime_checkable  # for the type checks in tests
class StepOffload(Protocol):
    """The offloaded KV of one step; `quire.offload.kv.step_offload.StepKVOffload` implements it.

    Attributes:
        wants_inputs: whether `note_input` is to be called.
    """

    wants_inputs: bool

    def slots(self, group: LaneGroup, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """Live slots [rows, lanes] that the backend attends to."""
        ...

    def note_input(self, layer: int, inputs: Tensor) -> None:
        """Record what a layer's attention is given."""
        ...

    def start_cpu_attention(
        self, group: LaneGroup, index: int, query: Tensor, math: AttentionMath
    ) -> None:
        """Begin attention on the CPU."""
        ...

    def arrive(
        self,
        group: LaneGroup,
        index: int,
        backend: AttentionBackend,
        slots: NewSlots,
        positions: Tensor | None,
    ) -> None:
        """Return when the offloaded pages of a layer are in their staging slot."""
        ...

    def merge_cpu_attention(
        self, out: Tensor, group: LaneGroup, pages: LayerPages, query: Tensor, math: AttentionMath
    ) -> None:
        """Merge what the CPU attended to into the output."""
        ...

    def leave(self, group: LaneGroup, index: int) -> None:
        """Release a layer's staging slot: the layer has attended."""
        ...


@runtime_checkable  # for the type checks in tests
class KVOffload(Protocol):
    """The offloaded KV of an engine; `quire.offload.kv.step_offload.KVOffload` implements it."""

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging for activations on the device, beside the arena."""
        ...

    def step(self, batch: FlatBatch) -> StepOffload | None:
        """What a step has to do with offloaded KV; None where that is nothing."""
        ...
