"""Important tokens: written over what the codes of their pages decode to, finer.

Which tokens have a record changes between steps only, so all queries of a step see the same.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from quire.kernels.coded import CodedPages, CodedPlanes

NO_TOKEN = 0  # of a record, which is what a page that was never written holds


@dataclass(frozen=True, slots=True)
class PromotedPages:
    """Records of a layer.

    Attributes:
        coded: what decodes them.
        marks: whose token each record of all pages of the class holds: its position + 1.
        table: page numbers [all rows, all lanes, capacity]; a lane has one page.
    """

    coded: CodedPages
    marks: Int[Tensor, "page record"]
    table: Int[Tensor, "all_rows all_lanes capacity"]


def records_of(
    marks: Int[Tensor, "entry record"], positions: Int[Tensor, "entry slot"]
) -> Int[Tensor, "entry slot"]:
    """Which record holds the token of each slot; -1 where none does.

    Cost: numbers of slots and records, however far positions have come.

    Args:
        marks: of the entries' pages.
        positions: logical; anything where no token is, and what is found there means nothing.
    """
    ordered, record = marks.long().sort(dim=1)
    mark = positions.long() + 1
    place = torch.searchsorted(ordered, mark).clamp_(max=marks.shape[1] - 1)
    is_its = (ordered.gather(1, place) == mark) & (mark != NO_TOKEN)
    return record.gather(1, place).masked_fill_(~is_its, -1)


def write_promoted(
    promoted: PromotedPages,
    pages: Int[Tensor, " entry"],
    positions: Int[Tensor, "entry slot"],
    decoded: tuple[Tensor, Tensor],
    live: Bool[Tensor, "entry slot"] | None = None,
) -> None:
    """Write records over what the codes of their tokens decode to.

    Args:
        promoted: of the layer.
        pages: of the entries' records.
        positions: of their slots.
        decoded: keys and values [entry, head, slot, head_dim], written to.
        live: slots that hold a token; None for all.
    """
    found = records_of(promoted.marks[pages], positions)
    has_one = found >= 0 if live is None else (found >= 0) & live
    entry, slot = has_one.nonzero(as_tuple=True)
    if not len(entry):
        return
    record = found[entry, slot]
    for target, side in zip(decoded, (promoted.coded.key, promoted.coded.value), strict=True):
        target[entry, :, slot] = decode_records(side, pages[entry], record).to(target.dtype)


def decode_records(
    side: CodedPlanes, pages: Int[Tensor, " place"], records: Int[Tensor, " place"]
) -> Float[Tensor, "place head head_dim"]:
    """Decode single records, float32."""
    codes: list[Shaped[Tensor, "place head 1 _"]] = [
        plane[pages, :, records].unsqueeze(-2) for plane in side.planes
    ]
    return side.codec.decode(codes).squeeze(-2)
