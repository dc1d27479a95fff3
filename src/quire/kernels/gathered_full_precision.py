"""Where the gathered backend finds tokens that are attended finer than their pages hold them."""

import torch
from torch import Tensor

from quire.kernels.backend import LayerPages
from quire.kernels.full_precision import (
    FullPrecisionPages,
    LanePlace,
    attended_as_made,
    write_full_precision,
)
from quire.kernels.gathered_plan import DecodeBucket
from quire.kernels.paging import page_numbers
from quire.kernels.promoted import write_promoted


def write_full_precision_in_bucket(
    pages: LayerPages,
    kept: FullPrecisionPages,
    bucket: DecodeBucket,
    decoded: tuple[Tensor, Tensor],
) -> None:
    """Give rows that decode the tokens that they attend to as these were made, or finer.

    Args:
        pages: of the layer.
        kept: its kept tokens.
        bucket: rows and lanes, gathered together.
        decoded: their keys and values, written to.
    """
    device = decoded[0].device
    first, held = (torch.from_numpy(x).to(device) for x in (bucket.slots, bucket.held))
    lengths = torch.from_numpy(kept.lengths).to(device)[bucket.rows][:, None]
    slots = first + torch.arange(decoded[0].shape[2], device=device)
    if pages.positions is None:
        positions = slots + (lengths - held)
    else:
        numbers = page_numbers(pages, bucket.rows, bucket.lanes, bucket.columns)
        positions = pages.positions[numbers].flatten(1).long()
    live = None if bucket.seen is None else bucket.seen[:, 0, 0]
    if pages.promoted is not None:
        own = pages.promoted.table[pages.rows[bucket.rows], pages.first_lane + bucket.lanes, 0]
        write_promoted(pages.promoted, own.long(), positions, decoded, live)
    wanted = attended_as_made(kept.tokens, positions, slots, lengths - 1, held - 1)
    if live is not None:
        wanted = wanted & live
    page = kept.table[pages.rows[bucket.rows], pages.first_lane + bucket.lanes, 0].long()
    write_full_precision(kept, (bucket.rows, page, bucket.lanes), positions, wanted, decoded)


def write_promoted_in_chunk(
    pages: LayerPages, place: LanePlace, decoded: tuple[Tensor, Tensor]
) -> None:
    """Write records of important tokens over what a lane's gathered slots decode to.

    Args:
        pages: of the layer.
        place: of the lane.
        decoded: keys and values [1, head, slot, head_dim], written to.
    """
    if pages.promoted is None:
        return
    table_row, table_lane = pages.rows[place.row], pages.first_lane + place.lane
    page = pages.promoted.table[table_row, table_lane, 0].long()[None]
    write_promoted(pages.promoted, page, place.positions[None], decoded)


def lane_place(
    pages: LayerPages, row: int, lane: int, *, held: int, num_tokens: int, first: int = 0
) -> LanePlace:
    """Where a lane of a row is whose chunk attends, and at which positions its slots are.

    Args:
        pages: of the layer, with kept tokens.
        row: in the step.
        lane: of the layer.
        held: live slots of the lane.
        num_tokens: of the chunk.
        first: slot that the place begins with.
    """
    assert pages.kept is not None, "asked where tokens are kept"
    table_row, table_lane = pages.rows[row], pages.first_lane + lane
    slots = torch.arange(first, held, device=pages.table.device)
    if pages.positions is None:
        positions = slots + (int(pages.kept.lengths[row]) - held)
    else:
        numbers = pages.table[table_row, table_lane, slots // pages.page_tokens].long()
        positions = pages.positions[numbers, slots % pages.page_tokens].long()
    page = int(pages.kept.table[table_row, table_lane, 0])
    return LanePlace(row, lane, page, slots, positions, held, num_tokens)
