"""The reference as a backend: every row and lane by itself, slot by slot, in float32."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.kernels.backend import (
    AttentionMath,
    LaneSlots,
    LayerPages,
    LookRows,
    LookTally,
    MovedSlots,
    NewSlots,
    StepShape,
)
from quire.kernels.coded import decode_slots
from quire.kernels.looks import tally_looks
from quire.kernels.paging import move_slots, write_slots
from quire.kernels.reference import attend_reference


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """The step as it is: nothing to prepare."""

    step: StepShape
    lanes: LaneSlots


class ReferenceAttention:
    """Slow and plain; what the other backends must equal."""

    name = "reference"
    peak_scratch_bytes = 0

    def plan(self, step: StepShape, lanes: LaneSlots, page_tokens: int, slot_bytes: int) -> object:
        """Keep the shapes."""
        return ReferencePlan(step, lanes)

    def write(self, slots: NewSlots, key: Tensor, value: Tensor) -> None:
        """Put keys and values into their slots; see `AttentionBackend.write`."""
        write_slots(slots, key, value)

    def move(self, moves: MovedSlots) -> None:
        """Copy slots onto others; see `AttentionBackend.move`."""
        move_slots(moves)

    def tally(self, tally: LookTally, rows: LookRows, column_sums: Tensor) -> None:
        """Add a step's looks to the numbers of slots; see `AttentionBackend.tally`."""
        tally_looks(tally, rows, column_sums)

    def attend(
        self,
        plan: object,
        pages: LayerPages,
        math: AttentionMath,
        query: Tensor,
        fresh: tuple[Tensor, Tensor],
        *,
        column_sums: Tensor | None = None,
    ) -> Tensor:
        """Attend row by row and lane by lane; see `AttentionBackend.attend`."""
        assert isinstance(plan, ReferencePlan), "a plan comes from this backend"
        out = torch.empty_like(query)
        heads = query.shape[1] // pages.num_lanes
        for row, (start, tokens) in enumerate(
            zip(plan.step.starts.tolist(), plan.step.tokens.tolist(), strict=True)
        ):
            for lane in range(pages.num_lanes):
                part = (slice(start, start + tokens), slice(lane * heads, (lane + 1) * heads))
                slots = int(plan.lanes.slots[row, lane])
                attended, sums = _attend_lane(
                    query[part], pages, math, (row, lane, slots), plan.lanes.window
                )
                out[part] = attended.to(out.dtype)
                if column_sums is not None:
                    column_sums[row, part[1], slots - sums.shape[1] : slots] = sums
        return out


def _attend_lane(
    query: Tensor,
    pages: LayerPages,
    math: AttentionMath,
    place: tuple[int, int, int],
    window: int | None,
) -> tuple[Tensor, Tensor]:
    row, lane, slots = place
    # what lies behind the window of the oldest query is seen by none of them
    first = 0 if window is None else max(0, slots - len(query) + 1 - window)
    slot = torch.arange(first, slots, device=query.device)
    numbers = pages.table[pages.rows[row], pages.first_lane + lane][slot // pages.page_tokens]
    offsets = slot % pages.page_tokens
    if pages.coded is None:
        key, value = (x[numbers.long(), :, offsets] for x in (pages.key, pages.value))
    else:
        sides = (pages.coded.key, pages.coded.value)
        key, value = (decode_slots(side, numbers.long(), offsets) for side in sides)
    heads = slice(lane * query.shape[1], (lane + 1) * query.shape[1])
    return attend_reference(
        query,
        key,
        value,
        math=replace(math, sinks=None if math.sinks is None else math.sinks[heads]),
        query_positions=slot[len(slot) - len(query) :],
        key_positions=slot,
        window=window,
    )
