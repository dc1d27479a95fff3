"""Tokens attended finer than the codes of their pages: as the model made them, or promoted.

Which those are depends on the query: see `quire.layout.token_precision`. A query that decodes has
them written over what their codes decode to. Of a prompt's chunk some queries want a token as it
was made and later ones want its code, so these tokens get a column of their own behind the others:

    slots of the lane            0 1 2 3 4 5 6 7 8 9 | 0 7 8 9     columns that attention gets
    seen by the query of slot 8    x x x x x x       | x x x       as codes | as made
    seen by the query of slot 9    x x x x x x x     | x   x x
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.coded import CodedPages, CodedPlanes
from quire.layout.token_precision import FullPrecisionTokens

# Tokens that are attended as the model made them, although their pages hold codes.


@dataclass(frozen=True, slots=True)
class FullPrecisionPages:
    """Tokens of a layer as the model made them: those of the step, and what was kept before.

    Attributes:
        tokens: which they are.
        key, value: views of all pages of the class, [page, head, record, head_dim]. Those of the
            step are not in them yet.
        table: page numbers [all rows, all lanes, capacity]; a lane has one page.
        lengths: [rows of the step] tokens of each row, those of the step included.
        starts: [rows of the step] where their tokens start in the step.
        fresh: keys and values of the step, [num_tokens, num_kv_heads, head_dim] each.
    """

    tokens: FullPrecisionTokens
    key: Float[Tensor, "page head record head_dim"]
    value: Float[Tensor, "page head record head_dim"]
    table: Int[Tensor, "all_rows all_lanes capacity"]
    lengths: NDArray[np.int64]
    starts: NDArray[np.int64]
    fresh: tuple[Tensor, Tensor]

    @property
    def sides(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Planes and the step's vectors, of keys and of values."""
        return (self.key, self.fresh[0]), (self.value, self.fresh[1])


def attended_as_made(
    kept: FullPrecisionTokens,
    positions: Int[Tensor, "*shape"],
    slots: Int[Tensor, "*slot_shape"],
    query_positions: Int[Tensor, "*query_shape"],
    query_slots: Int[Tensor, "*query_shape"],
) -> Bool[Tensor, "*seen_shape"]:
    """Which slots queries want as they were made; shapes are broadcast."""
    made = (positions < kept.sinks) | (positions > query_positions - kept.residual)
    if kept.page_tokens > 1:  # a page is read as codes once its last slot is taken
        last = torch.div(slots, kept.page_tokens, rounding_mode="floor") + 1
        made = made | (last * kept.page_tokens - 1 > query_slots)
    return made


def record_of(
    kept: FullPrecisionTokens, positions: Shaped[Tensor, "*shape"]
) -> Shaped[Tensor, "*shape"]:
    """Where a token at a position is kept; some record for one that is not."""
    newest = kept.sinks + (positions - kept.sinks) % max(1, kept.recent)
    return torch.where(positions < kept.sinks, positions, newest).clamp(max=kept.records - 1)


def write_full_precision(
    kept: FullPrecisionPages,
    place: tuple[Int[Tensor, " entry"], Int[Tensor, " entry"], Int[Tensor, " entry"]],
    positions: Int[Tensor, "entry slot"],
    wanted: Bool[Tensor, "entry slot"],
    decoded: tuple[Tensor, Tensor],
) -> None:
    """Write tokens as they were made over what their codes decode to.

    Args:
        kept: of the layer.
        place: for each entry its row in the step, its page of kept tokens, and its lane of the
            layer.
        positions: of slots; a row's newest token is the step's.
        wanted: slots that are live and wanted as they were made.
        decoded: keys and values [entry, head, slot, head_dim], written to.
    """
    entry, slot = wanted.nonzero(as_tuple=True)
    row, page, lane = (numbers[entry] for numbers in place)
    position = positions[entry, slot]
    lengths = torch.from_numpy(kept.lengths).to(position.device)[row]
    starts = torch.from_numpy(kept.starts).to(position.device)[row]
    own = (position == lengths - 1)[:, None, None]
    record = record_of(kept.tokens, position)
    for target, (plane, fresh) in zip(decoded, kept.sides, strict=True):
        stored = plane[page, :, record]
        fresh_by_lane = fresh.reshape(len(fresh), -1, *stored.shape[1:])
        target[entry, :, slot] = torch.where(own, fresh_by_lane[starts, lane], stored).to(
            target.dtype
        )


@dataclass(frozen=True, slots=True)
class LanePlace:
    """One lane of one row whose chunk attends.

    Attributes:
        row: in the step.
        lane: of the layer.
        page: of its kept tokens.
        slots: numbers [slot] of the slots that are gathered.
        positions: [slot] of these.
        held: live slots of the lane; the last `num_tokens` are the chunk's.
        num_tokens: of the chunk.
    """

    row: int
    lane: int
    page: int
    slots: Int[Tensor, " slot"]
    positions: Int[Tensor, " slot"]
    held: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class MadeColumns:
    """Slots that some query of a chunk wants as they were made.

    Attributes:
        index: [made] their places among the gathered slots.
        as_codes: [query, slot] what each query sees as codes.
        as_made: [query, made] what it sees as it was made.
        key, value: [1, head, made, head_dim].
    """

    index: Int[Tensor, " made"]
    as_codes: Bool[Tensor, "query slot"]
    as_made: Bool[Tensor, "query made"]
    key: Float[Tensor, "1 head made head_dim"]
    value: Float[Tensor, "1 head made head_dim"]

    @property
    def seen(self) -> Bool[Tensor, "1 1 query column"]:
        """What each query sees of slots and of these columns behind them."""
        return torch.cat([self.as_codes, self.as_made], dim=1)[None, None]

    def behind(
        self, decoded: Float[Tensor, "1 head slot head_dim"], made: Float[Tensor, "1 head made _"]
    ) -> Float[Tensor, "1 head column head_dim"]:
        """What slots decode to, cleared where no query sees it so, and these columns behind it."""
        unseen = ~self.as_codes.any(dim=0)
        cleared = decoded.masked_fill(unseen[:, None], 0)  # may be anything, and 0 * NaN is NaN
        return torch.cat([cleared, made.to(decoded.dtype)], dim=2)

    def by_slot(self, numbers: Float[Tensor, "*batch column"]) -> Float[Tensor, "*batch slot"]:
        """Numbers of columns added up for each slot."""
        slots = self.as_codes.shape[1]
        whole = numbers[..., :slots].clone()
        return whole.index_add_(-1, self.index, numbers[..., slots:])


def made_columns(
    kept: FullPrecisionPages, place: LanePlace, seen: Bool[Tensor, "query slot"]
) -> MadeColumns:
    """The columns of a chunk.

    Args:
        kept: of the layer.
        place: of the lane.
        seen: slots that each query sees at all.
    """
    length, count = int(kept.lengths[place.row]), place.num_tokens
    offset = torch.arange(count, device=seen.device)[:, None]
    made = seen & attended_as_made(
        kept.tokens,
        place.positions,
        place.slots,
        offset + (length - count),
        offset + (place.held - count),
    )
    index = made.any(dim=0).nonzero()[:, 0]
    position = place.positions[index].long()
    is_fresh = position >= length - count
    token = (position - (length - count)).clamp_min(0) + int(kept.starts[place.row])
    record = record_of(kept.tokens, position)
    vectors = []
    for plane, fresh in kept.sides:
        stored = plane[place.page, :, record]  # [head, made, head_dim]
        heads = slice(place.lane * len(stored), (place.lane + 1) * len(stored))
        new = fresh[token, heads].transpose(0, 1)
        vectors.append(torch.where(is_fresh[None, :, None], new, stored)[None])
    return MadeColumns(index, seen & ~made, made[:, index], *vectors)


# ---- promoted ------------------------------------------------------------------------------------

# Important tokens: written over what the codes of their pages decode to, finer.
#
# Which tokens have a record changes between steps only, so all queries of a step see the same.

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
