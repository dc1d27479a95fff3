"""How a step over keys before RoPE is cut up: entries with equally many new tokens together."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.backend import LaneSlots, StepShape

BUCKET_SLACK = 1.25  # longest over shortest entry of a bucket, beyond a few slots
FEW_SLOTS = 16


@dataclass(frozen=True, slots=True)
class Bucket:
    """Entries that attend in one call. An entry is a row of the step in one lane.

    The places of an entry are the slots that any of its queries sees, in the order of positions.

    Attributes:
        rows: [entries] index of the row in the step.
        lanes: [entries] lane among the layer's own.
        token: [entries, tokens] where the row's new tokens stand in the flat batch.
        slot: [entries, places] slots of the lane, as they lie.
        is_live: bool [entries, places] whether there is such a slot.
        query_place: [entries, tokens] each query's own place.
        seen: bool [entries, 1, tokens, places] which places a query sees.
    """

    rows: Tensor
    lanes: Tensor
    token: Tensor
    slot: Tensor
    is_live: Tensor
    query_place: Tensor
    seen: Tensor


def plan_buckets(
    step: StepShape, lanes: LaneSlots, *, most_slots: int, device: torch.device
) -> Iterator[Bucket]:
    """Cut a step into buckets of at most `most_slots` places, or of one entry.

    Args:
        step: new tokens of each row.
        lanes: slots of each row's lanes, and the window.
        most_slots: over all entries of a bucket.
        device: of the tensors.
    """
    held = lanes.slots.astype(np.int64)
    tokens = np.broadcast_to(step.tokens[:, None], held.shape)
    first = np.zeros_like(held)
    if lanes.window is not None:  # what lies behind the window of the oldest query nobody sees
        first = np.maximum(held - tokens + 1 - lanes.window, 0)
    places = held - first
    for entries in _cut(tokens.reshape(-1), places.reshape(-1), most_slots):
        rows, lane = np.divmod(entries, held.shape[1])
        yield _bucket(step, (rows, lane), held[rows, lane], first[rows, lane], lanes.window, device)


def _cut(
    tokens: NDArray[np.int32], places: NDArray[np.int64], most_slots: int
) -> Iterator[NDArray[np.int64]]:
    """Entries that go together: as many tokens each, of similar length, not too many."""
    order = np.lexsort((places, tokens))
    start = 0
    for i in range(1, len(order)):
        begun, entry = order[start], order[i]
        other = tokens[entry] != tokens[begun]
        longer = places[entry] > BUCKET_SLACK * places[begun] + FEW_SLOTS
        if other or longer or (i + 1 - start) * places[entry] > most_slots:
            yield order[start:i]
            start = i
    if len(order):
        yield order[start:]


def _bucket(
    step: StepShape,
    entries: tuple[NDArray[np.int64], NDArray[np.int64]],
    held: NDArray[np.int64],
    first: NDArray[np.int64],
    window: int | None,
    device: torch.device,
) -> Bucket:
    rows, lane = entries
    tokens = int(step.tokens[rows[0]])
    live = (held - first)[:, None]
    place = np.arange(int(live.max()))
    own = live - tokens + np.arange(tokens)
    seen = place <= own[:, :, None]
    if window is not None:
        seen &= place > own[:, :, None] - window
    numbers = (rows, lane, step.starts[rows, None] + np.arange(tokens), first[:, None] + place)
    rows_, lanes_, token, slot = (torch.from_numpy(x).to(device) for x in numbers)
    return Bucket(
        rows=rows_,
        lanes=lanes_,
        token=token,
        slot=slot,
        is_live=torch.from_numpy(place < live).to(device),
        query_place=torch.from_numpy(own).to(device),
        seen=torch.from_numpy(seen[:, None]).to(device),
    )
