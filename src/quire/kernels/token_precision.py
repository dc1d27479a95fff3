"""Tokens attended in higher precision than the codes of their pages: full precision or promoted.

Which tokens these are depends on the query; see `quire.layout.token_precision`. For a decode query,
full-precision tokens overwrite the decoded ones. In a prefill chunk, some queries need a token in
full precision and later ones its code. These tokens get an additional column after the slots:

    slots of the lane            0 1 2 3 4 5 6 7 8 9 | 0 7 8 9     columns of attention
    seen by the query of slot 8    x x x x x x       | x x x       as codes | in full precision
    seen by the query of slot 9    x x x x x x x     | x   x x
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.coded import CodedPages, CodedPlanes
from quire.kernels.device_copies import to_device
from quire.layout.token_precision import FullPrecisionTokens

# Tokens that attention reads in full precision instead of their codes.


@dataclass(frozen=True, slots=True)
class FullPrecisionPages:
    """Full-precision tokens of a layer: those of the step, and those stored earlier.

    Attributes:
        tokens: which tokens are in full precision.
        key, value: views of all pages of the class, [page, head, record, elements]. They do not yet
            contain the step's tokens.
        table: page numbers [all rows, all lanes, capacity]; a lane has one page.
        lengths: [rows of the step] tokens of each row, including the step's.
        starts: [rows of the step] index of the row's first token in the step.
        fresh: keys and values of the step, [num_tokens, num_kv_heads, elements] each.
        marks: [page, record] position + 1 of relocated tokens; None if no slot moves.
    """

    tokens: FullPrecisionTokens
    key: Float[Tensor, "page head record head_dim"]
    value: Float[Tensor, "page head record value_dim"]
    table: Int[Tensor, "all_rows all_lanes capacity"]
    lengths: NDArray[np.int64]
    starts: NDArray[np.int64]
    fresh: tuple[Tensor, Tensor]
    marks: Int[Tensor, "page record"] | None = None

    @property
    def sides(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Planes and the step's vectors, of keys and of values."""
        return (self.key, self.fresh[0]), (self.value, self.fresh[1])

    def of_rows(
        self, rows: NDArray[np.int64], starts: NDArray[np.int64], tokens: Int[Tensor, " token"]
    ) -> "FullPrecisionPages":
        """Return those of some rows, whose `tokens` of the step begin at `starts`."""
        fresh = self.fresh[0][tokens], self.fresh[1][tokens]
        return replace(self, lengths=self.lengths[rows], starts=starts, fresh=fresh)

    def of_head(self, head: int, num_lanes: int) -> "FullPrecisionPages":
        """Return those of one KV head of each lane."""
        key, value = (x.reshape(len(x), num_lanes, -1, x.shape[2])[:, :, head] for x in self.fresh)
        own = slice(head, head + 1)
        return replace(self, key=self.key[:, own], value=self.value[:, own], fresh=(key, value))


def in_full_precision(
    full: FullPrecisionTokens,
    positions: Int[Tensor, "*shape"],
    slots: Int[Tensor, "*slot_shape"],
    query_positions: Int[Tensor, "*query_shape"],
    query_slots: Int[Tensor, "*query_shape"],
) -> Bool[Tensor, "*seen_shape"]:
    """Mark the slots that queries attend to in full precision; shapes are broadcast."""
    exact = (positions < full.sinks) | (positions > query_positions - full.residual)
    if full.page_tokens > 1:  # a page is attended as codes once its last slot is used
        last = torch.div(slots, full.page_tokens, rounding_mode="floor") + 1
        exact = exact | (last * full.page_tokens - 1 > query_slots)
    return exact


def record_of(
    full: FullPrecisionTokens, positions: Shaped[Tensor, "*shape"]
) -> Shaped[Tensor, "*shape"]:
    """Return the record of the token at a position; arbitrary for tokens without a record."""
    newest = full.sinks + (positions - full.sinks) % max(1, full.recent)
    return torch.where(positions < full.sinks, positions, newest).clamp(
        max=full.first_relocated - 1
    )


def stored_record(
    full: FullPrecisionTokens,
    marks: Int[Tensor, "page record"] | None,
    pages: Int[Tensor, "*page_shape"],
    positions: Shaped[Tensor, "*shape"],
    slots: Int[Tensor, "*slot_shape"],
) -> Shaped[Tensor, "*shape"]:
    """Return the record of the token at a position and slot, relocated tokens included.

    Args:
        full: which tokens are in full precision.
        marks: position + 1 of relocated tokens; None if there are none.
        pages: page of the lane's full-precision tokens; broadcast over the positions.
        positions: positions of tokens; the result for tokens without a record is arbitrary.
        slots: slots of the tokens.
    """
    record = record_of(full, positions)
    if marks is None:
        return record
    relocated = full.first_relocated + slots % full.page_tokens
    is_relocated = (marks[pages, relocated] == positions + 1) & (positions >= full.sinks)
    return torch.where(is_relocated, relocated, record)


def write_full_precision(
    full: FullPrecisionPages,
    place: tuple[Int[Tensor, " entry"], Int[Tensor, " entry"], Int[Tensor, " entry"]],
    positions: Int[Tensor, "entry slot"],
    slots: Int[Tensor, "entry slot"],
    wanted: Bool[Tensor, "entry slot"],
    decoded: tuple[Tensor, Tensor],
) -> None:
    """Overwrite decoded tokens with full-precision ones.

    Args:
        full: full-precision tokens of the layer.
        place: row of the step, page of full-precision tokens and lane of the layer, for each
            entry.
        positions: positions of slots; a row's newest token belongs to the step.
        slots: numbers of the slots in their lanes.
        wanted: live slots to overwrite.
        decoded: keys and values [entry, head, slot, elements], modified in place.
    """
    entry, slot = wanted.nonzero(as_tuple=True)
    row, page, lane = (numbers[entry] for numbers in place)
    position = positions[entry, slot]
    lengths = to_device(full.lengths, position.device)[row]
    starts = to_device(full.starts, position.device)[row]
    own = (position == lengths - 1)[:, None, None]
    record = stored_record(
        full.tokens, full.marks, page, position, slots.expand_as(positions)[entry, slot]
    )
    for target, (plane, fresh) in zip(decoded, full.sides, strict=True):
        stored = plane[page, :, record]
        fresh_by_lane = fresh.reshape(len(fresh), -1, *stored.shape[1:])
        target[entry, :, slot] = torch.where(own, fresh_by_lane[starts, lane], stored).to(
            target.dtype
        )


@dataclass(frozen=True, slots=True)
class ChunkLane:
    """One lane of one row whose chunk attends.

    Attributes:
        row: row of the step.
        lane: lane of the layer.
        page: page of its full-precision tokens.
        slots: numbers [slot] of the gathered slots.
        positions: [slot] their positions.
        held: live slots of the lane; the last `num_tokens` belong to the chunk.
        num_tokens: tokens of the chunk.
    """

    row: int
    lane: int
    page: int
    slots: Int[Tensor, " slot"]
    positions: Int[Tensor, " slot"]
    held: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class FullPrecisionColumns:
    """Columns for slots that some query of a chunk attends to in full precision.

    Attributes:
        index: [exact] their indices among the gathered slots.
        as_codes: [query, slot] slots that each query attends to as codes.
        in_full_precision: [query, exact] columns that each query attends to in full precision.
        key, value: [1, head, exact, elements].
    """

    index: Int[Tensor, " exact"]
    as_codes: Bool[Tensor, "query slot"]
    in_full_precision: Bool[Tensor, "query exact"]
    key: Float[Tensor, "1 head exact head_dim"]
    value: Float[Tensor, "1 head exact value_dim"]

    @property
    def seen(self) -> Bool[Tensor, "1 1 query column"]:
        """Attention mask over the slots and the additional columns."""
        return torch.cat([self.as_codes, self.in_full_precision], dim=1)[None, None]

    def append_to(
        self, decoded: Float[Tensor, "1 head slot head_dim"], exact: Float[Tensor, "1 head exact _"]
    ) -> Float[Tensor, "1 head column head_dim"]:
        """Append these columns to the decoded slots, and zero the slots that no query sees."""
        unseen = ~self.as_codes.any(dim=0)
        cleared = decoded.masked_fill(unseen[:, None], 0)  # may hold NaN, and 0 * NaN is NaN
        return torch.cat([cleared, exact.to(decoded.dtype)], dim=2)

    def by_slot(self, numbers: Float[Tensor, "*batch column"]) -> Float[Tensor, "*batch slot"]:
        """Add the numbers of the additional columns to those of their slots."""
        slots = self.as_codes.shape[1]
        whole = numbers[..., :slots].clone()
        return whole.index_add_(-1, self.index, numbers[..., slots:])


def full_precision_columns(
    full: FullPrecisionPages, place: ChunkLane, seen: Bool[Tensor, "query slot"]
) -> FullPrecisionColumns:
    """Build the columns of a chunk.

    Args:
        full: full-precision tokens of the layer.
        place: the lane.
        seen: slots that each query sees.
    """
    length, count = int(full.lengths[place.row]), place.num_tokens
    offset = torch.arange(count, device=seen.device)[:, None]
    exact = seen & in_full_precision(
        full.tokens,
        place.positions,
        place.slots,
        offset + (length - count),
        offset + (place.held - count),
    )
    index = exact.any(dim=0).nonzero()[:, 0]
    position = place.positions[index].long()
    is_fresh = position >= length - count
    token = (position - (length - count)).clamp_min(0) + int(full.starts[place.row])
    page = torch.full_like(index, place.page)
    record = stored_record(full.tokens, full.marks, page, position, place.slots[index])
    vectors = []
    for plane, fresh in full.sides:
        stored = plane[place.page, :, record]  # [head, exact, head_dim]
        heads = slice(place.lane * len(stored), (place.lane + 1) * len(stored))
        new = fresh[token, heads].transpose(0, 1)
        vectors.append(torch.where(is_fresh[None, :, None], new, stored)[None])
    return FullPrecisionColumns(index, seen & ~exact, exact[:, index], *vectors)


# Promoted tokens: records of quantization residuals, which are added to the decoded tokens.
#
# The tokens with a record change only between steps, so all queries of a step see the same ones.

NO_TOKEN = 0  # mark of a free record, and the content of a page that was never written


@dataclass(frozen=True, slots=True)
class PromotedPages:
    """Promoted tokens of a layer: records of what the codes of the pages lost.

    Attributes:
        coded: decodes the records.
        marks: position + 1 of the token that each record holds, for all pages of the class.
        table: page numbers [all rows, all lanes, capacity]; a lane has one page.
    """

    coded: CodedPages
    marks: Int[Tensor, "page record"]
    table: Int[Tensor, "all_rows all_lanes capacity"]

    def of_head(self, head: int) -> "PromotedPages":
        """Return those of one KV head of each lane."""
        sides = (
            replace(side, planes=tuple(plane[:, head : head + 1] for plane in side.planes))
            for side in (self.coded.key, self.coded.value)
        )
        return replace(self, coded=CodedPages(*sides))


def records_of(
    marks: Int[Tensor, "entry record"], positions: Int[Tensor, "entry slot"]
) -> Int[Tensor, "entry slot"]:
    """Return the record of each slot's token; -1 if it has none.

    Cost: proportional to the numbers of slots and records, independent of positions.

    Args:
        marks: marks of the entries' pages.
        positions: logical positions; the result for empty slots is undefined.
    """
    ordered, record = marks.long().sort(dim=1)
    mark = positions.long() + 1
    index = torch.searchsorted(ordered, mark).clamp_(max=marks.shape[1] - 1)
    matches = (ordered.gather(1, index) == mark) & (mark != NO_TOKEN)
    return record.gather(1, index).masked_fill_(~matches, -1)


def add_promoted(
    promoted: PromotedPages,
    pages: Int[Tensor, " entry"],
    positions: Int[Tensor, "entry slot"],
    decoded: tuple[Tensor, Tensor],
    live: Bool[Tensor, "entry slot"] | None = None,
) -> None:
    """Add the records of promoted tokens to the decoded tokens.

    Args:
        promoted: records of the layer.
        pages: pages of the entries' records.
        positions: positions of the entries' slots.
        decoded: keys and values [entry, head, slot, elements], modified in place.
        live: slots that hold a token; None for all.
    """
    found = records_of(promoted.marks[pages], positions)
    has_one = found >= 0 if live is None else (found >= 0) & live
    entry, slot = has_one.nonzero(as_tuple=True)
    if not len(entry):
        return
    record = found[entry, slot]
    for target, side in zip(decoded, (promoted.coded.key, promoted.coded.value), strict=True):
        lost = decode_records(side, pages[entry], record)
        target[entry, :, slot] = (target[entry, :, slot].float() + lost).to(target.dtype)


def decode_records(
    side: CodedPlanes, pages: Int[Tensor, " place"], records: Int[Tensor, " place"]
) -> Float[Tensor, "place head head_dim"]:
    """Decode single records, float32."""
    codes: list[Shaped[Tensor, "place head 1 _"]] = [
        plane[pages, :, records].unsqueeze(-2) for plane in side.planes
    ]
    return side.codec.decode(codes).squeeze(-2)
