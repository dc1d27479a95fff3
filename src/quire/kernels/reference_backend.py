"""The reference as a backend: every row and lane by itself, slot by slot, in float32."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from quire.kernels.backend import (
    AttentionMath,
    LaneSlots,
    LayerPages,
    StepShape,
)
from quire.kernels.coded import decode_slots
from quire.kernels.paging import TorchSlots
from quire.kernels.token_precision import (
    FullPrecisionPages,
    attended_as_made,
    decode_records,
    record_of,
    records_of,
)


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """The step as it is: nothing to prepare."""

    step: StepShape
    lanes: LaneSlots


class ReferenceAttention(TorchSlots):
    """Slow and plain; what the other backends must equal."""

    name = "reference"
    peak_scratch_bytes = 0

    def plan(self, step: StepShape, lanes: LaneSlots, page_tokens: int, slot_bytes: int) -> object:
        """Keep the shapes."""
        return ReferencePlan(step, lanes)

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
        of_lane = torch.tensor(lane, device=query.device)
        key, value = (decode_slots(side, numbers.long(), offsets, of_lane) for side in sides)
        _write_promoted(pages, (row, lane), (numbers.long(), offsets), (key, value))
    heads = slice(lane * query.shape[1], (lane + 1) * query.shape[1])
    math = replace(math, sinks=None if math.sinks is None else math.sinks[heads])
    own = slot[len(slot) - len(query) :]
    if pages.kept is None:
        return attend_reference(
            query,
            key,
            value,
            math=math,
            query_positions=own,
            key_positions=slot,
            window=window,
        )
    out, sums = torch.empty(query.shape, device=query.device), key.new_zeros(0)
    for i, query_slot in enumerate(own.tolist()):
        # each query by itself: which tokens it attends to as they were made is its own business
        seen = slot[: query_slot - first + 1]
        at = numbers[: len(seen)].long(), seen % pages.page_tokens
        made = _as_made(pages, pages.kept, (row, lane, slots), len(query) - 1 - i, seen, at)
        out[i : i + 1], more = attend_reference(
            query[i : i + 1],
            torch.where(made.wanted, made.key, key[: len(seen)]),
            torch.where(made.wanted, made.value, value[: len(seen)]),
            math=math,
            query_positions=own[i : i + 1],
            key_positions=seen,
            window=window,
        )
        sums = more + torch.nn.functional.pad(sums, (0, len(seen) - sums.shape[-1]))
    return out, sums


def _write_promoted(
    pages: LayerPages,
    place: tuple[int, int],
    at: tuple[Tensor, Tensor],
    decoded: tuple[Tensor, Tensor],
) -> None:
    """Slots [slot, head, head_dim] that have a record in a finer codec, one by one."""
    promoted = pages.promoted
    if promoted is None:
        return
    assert pages.positions is not None, "lanes that lose tokens carry positions"
    row, lane = place
    page = promoted.table[pages.rows[row], pages.first_lane + lane, 0].long()
    record = records_of(promoted.marks[page[None]], pages.positions[at][None])[0].tolist()
    for slot, number in enumerate(record):
        if number >= 0:
            one = torch.tensor([number])
            for target, side in zip(
                decoded, (promoted.coded.key, promoted.coded.value), strict=True
            ):
                target[slot] = decode_records(side, page[None], one)[0]


@dataclass(frozen=True, slots=True)
class _Made:
    """Slots of a lane as the model made them, [slot, head, head_dim], and which a query wants so.

    What is not wanted may be anything.
    """

    wanted: Tensor
    key: Tensor
    value: Tensor


def _as_made(
    pages: LayerPages,
    kept: FullPrecisionPages,
    place: tuple[int, int, int],
    behind: int,
    slot: Tensor,
    at: tuple[Tensor, Tensor],
) -> _Made:
    """What a query sees of kept tokens, so many tokens before the row's last one."""
    row, lane, slots = place
    length, start = int(kept.lengths[row]), int(kept.starts[row])
    positions = slot + (length - slots) if pages.positions is None else pages.positions[at].long()
    query_slot, query_position = slots - 1 - behind, length - 1 - behind
    # the row's tokens of this step end with its last one, wherever they begin
    token = start + positions - (length - _num_tokens(kept, row))
    is_fresh = (token >= start)[:, None, None]
    page = int(kept.table[pages.rows[row], pages.first_lane + lane, 0])
    wanted = attended_as_made(
        kept.tokens, positions, slot, torch.tensor(query_position), torch.tensor(query_slot)
    )
    sides = []
    for plane, fresh in kept.sides:
        stored = plane[page, :, record_of(kept.tokens, positions)].transpose(0, 1)
        heads = slice(lane * stored.shape[1], (lane + 1) * stored.shape[1])
        sides.append(torch.where(is_fresh, fresh[token.clamp_min(0), heads], stored).float())
    return _Made(wanted[:, None, None], *sides)


def _num_tokens(kept: FullPrecisionPages, row: int) -> int:
    """Tokens of a row in this step."""
    ends = [*kept.starts.tolist(), len(kept.fresh[0])]
    return int(ends[row + 1] - ends[row])


# ---- reference -----------------------------------------------------------------------------------

# Plain attention, written to be read: the truth that every fast path is tested against.


def attend_reference(
    query: Float[Tensor, "query num_heads head_dim"],
    key: Float[Tensor, "token num_kv_heads head_dim"],
    value: Float[Tensor, "token num_kv_heads head_dim"],
    *,
    math: AttentionMath,
    query_positions: Int[Tensor, " query"],
    key_positions: Int[Tensor, " token"],
    window: int | None = None,
) -> tuple[Float[Tensor, "query num_heads head_dim"], Float[Tensor, "num_heads token"]]:
    """Attend one sequence in float32, and sum each slot's weights over the queries.

    Formula: w = softmax(cap(q k^T * scale)) over the slots a query sees (position p sees positions
    in (p - window, p]); out = w v; column_sums[h, t] = sum over queries of w[h, query, t].
    A sink is a logit that joins the softmax and carries no value.
    Source: the column sums are what H2O and Batch-Max (section 3.2) rank by.

    Args:
        query: after RoPE; num_heads is a multiple of num_kv_heads.
        key: after RoPE, in any order of slots.
        value: like key.
        math: scale, softcap, sinks [num_heads].
        query_positions: logical positions of the queries.
        key_positions: logical positions of the slots.
        window: positions a query looks back, itself included; None for all.

    Returns:
        out like query, in float32, and column_sums in float32.
    """
    num_heads, group = query.shape[1], query.shape[1] // key.shape[1]
    q, k, v = (x.float().transpose(0, 1) for x in (query, key, value))
    k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
    logits = q @ k.transpose(1, 2) * math.scale
    if math.softcap is not None:
        logits = math.softcap * torch.tanh(logits / math.softcap)
    distance = query_positions[:, None] - key_positions[None, :]
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    logits = logits.masked_fill(~seen, float("-inf"))
    if math.sinks is not None:
        column = math.sinks.float()[:, None, None].expand(-1, len(query), 1)
        logits = torch.cat([logits, column], dim=2)
    weights = torch.softmax(logits, dim=-1)[:, :, : key.shape[0]]
    weights = weights.masked_fill(~seen, 0.0)
    out = torch.einsum("hqt,htd->qhd", weights, v)
    return out, weights.sum(dim=1).reshape(num_heads, -1)
