"""Plans of decode steps whose tensors keep their addresses, for CUDA graphs.

A CUDA graph repeats kernels with the same arguments. A captured decode step therefore reads its
inputs, such as live slots and page numbers, from memory that the engine overwrites before each
replay. A backend that can compute attention in this way implements `StaticPlans`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.backend import LayerPages, StepShape


@dataclass(frozen=True, slots=True)
class StaticLanes:
    """Live slots of the lanes of a layer, in memory that keeps its address.

    Attributes:
        slots: int32 [rows, lanes] on the device of the pages: live slots of each lane, including
            the step's token. The engine overwrites them between calls. All are at least 1.
        max_slots: no lane will have more slots: the page tables have columns for this number.
        window: number of slots a query attends to, including its own; None for all.
    """

    slots: Int[Tensor, "row lane"]
    max_slots: int
    window: int | None


@runtime_checkable
class StaticPlans(Protocol):
    """A backend whose decode plans stay valid while live slots and page numbers change.

    With such a plan, `AttentionBackend.write` and `AttentionBackend.attend` must launch the same
    kernels with the same arguments on every call:

    * They read live slots from `StaticLanes.slots`, pages from `LayerPages.table` and
      `LayerPages.rows`, and places of new tokens from `NewSlots`, all on the device. Grids, numbers
      of splits and scratch sizes depend on shapes and `max_slots` only.
    * They neither wait for the device nor read its data, and make no copies from the CPU.
    * Scratch is allocated by torch in the call, or before the capture: calls are captured after
      warm-up calls on the same stream, and torch then allocates from the memory pool of the graphs.
    * Each row has one new token. `column_sums` is None, and the pages have neither tokens in full
      precision nor promoted tokens.
    * Several rows may name the same table row and the same place of their new token; their new
      keys and values are then equal. Such rows fill up the batch, and their outputs are not used.
    """

    def static_plan(
        self, step: StepShape, lanes: StaticLanes, layers: Sequence[LayerPages], slot_bytes: int
    ) -> object | None:
        """Prepare a plan that layers of equal lane lengths share.

        Args:
            step: one new token for each row.
            lanes: live slots; their present values are arbitrary.
            layers: pages of these layers.
            slot_bytes: bytes of a slot, as for `AttentionBackend.plan`.

        Returns:
            The plan; None if a layer cannot be computed in this way.
        """
        ...

    def refresh(self, plan: object, slots: NDArray[np.int32]) -> bool:
        """Prepare a plan for the next calls, outside of the captured kernels.

        `StaticLanes.slots` has the new values already, or a copy to it is queued on the current
        stream. A backend that derives data from live slots on the CPU queues its copies here.

        Args:
            plan: result of `static_plan`.
            slots: [rows, lanes] the new live slots, on the CPU.

        Returns:
            Whether the plan can compute these slots; if not, the step runs without a graph.
        """
        ...
