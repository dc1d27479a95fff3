"""Reference backend: attention of every row and lane separately, slot by slot, in float32."""

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
    decode_records,
    in_full_precision,
    records_of,
    stored_record,
)


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """The unmodified shapes of a step."""

    step: StepShape
    lanes: LaneSlots


class ReferenceAttention(TorchSlots):
    """Slow, simple implementation that the other backends must match."""

    name = "reference"
    peak_scratch_bytes = 0

    def plan(self, step: StepShape, lanes: LaneSlots, page_tokens: int, slot_bytes: int) -> object:
        """Store the shapes."""
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
        """Compute attention row by row and lane by lane; see `AttentionBackend.attend`."""
        assert isinstance(plan, ReferencePlan), "a plan comes from this backend"
        out = query.new_empty(*query.shape[:2], math.output_dim(pages))
        heads = query.shape[1] // pages.num_lanes
        for row, (start, tokens) in enumerate(
            zip(plan.step.starts.tolist(), plan.step.tokens.tolist(), strict=True)
        ):
            for lane in range(pages.num_lanes):
                part = (slice(start, start + tokens), slice(lane * heads, (lane + 1) * heads))
                slots = int(plan.lanes.slots[row, lane])
                own_math = replace(math, selected=math.selected_by(slice(start, start + tokens)))
                attended, sums = _attend_lane(
                    query[part], pages, own_math, (row, lane, slots), plan.lanes.window
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
    # skip slots older than the window of the oldest query
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
        _add_promoted(pages, (row, lane), (numbers.long(), offsets), (key, value))
    heads = slice(lane * query.shape[1], (lane + 1) * query.shape[1])
    math = replace(
        math,
        sinks=None if math.sinks is None else math.sinks[heads],
        alibi=None if math.alibi is None else replace(math.alibi, slopes=math.alibi.slopes[heads]),
    )
    positions = slot if pages.positions is None else pages.positions[numbers.long(), offsets]
    math = math.at(positions, positions[-1:])
    own = slot[len(slot) - len(query) :]
    if pages.full_precision is None:
        return attend_reference(
            query,
            key,
            value,
            math=math,
            query_positions=own,
            key_positions=slot,
            window=window,
        )
    out = torch.empty(*query.shape[:2], math.output_dim(pages), device=query.device)
    sums = key.new_zeros(0)
    for i, query_slot in enumerate(own.tolist()):
        # one query at a time, because the full-precision tokens differ between queries
        seen = slot[: query_slot - first + 1]
        at = numbers[: len(seen)].long(), seen % pages.page_tokens
        exact = _exact_tokens(
            pages, pages.full_precision, (row, lane, slots), len(query) - 1 - i, seen, at
        )
        biases = None if math.bias is None else math.bias[:, :, : len(seen)]
        out[i : i + 1], more = attend_reference(
            query[i : i + 1],
            torch.where(exact.wanted, exact.key, key[: len(seen)]),
            torch.where(exact.wanted, exact.value, value[: len(seen)]),
            math=replace(math, bias=biases, selected=math.selected_by(slice(i, i + 1))),
            query_positions=own[i : i + 1],
            key_positions=seen,
            window=window,
        )
        sums = more + torch.nn.functional.pad(sums, (0, len(seen) - sums.shape[-1]))
    return out, sums


def _add_promoted(
    pages: LayerPages,
    place: tuple[int, int],
    at: tuple[Tensor, Tensor],
    decoded: tuple[Tensor, Tensor],
) -> None:
    """Add their records to the slots [slot, head, elements] of promoted tokens."""
    promoted = pages.promoted
    if promoted is None:
        return
    assert pages.positions is not None, "lanes that evict store positions"
    row, lane = place
    page = promoted.table[pages.rows[row], pages.first_lane + lane, 0].long()
    record = records_of(promoted.marks[page[None]], pages.positions[at][None])[0].tolist()
    for slot, number in enumerate(record):
        if number >= 0:
            one = torch.tensor([number])
            for target, side in zip(
                decoded, (promoted.coded.key, promoted.coded.value), strict=True
            ):
                target[slot] += decode_records(side, page[None], one)[0]


@dataclass(frozen=True, slots=True)
class _Exact:
    """Full-precision slots of a lane, [slot, head, elements], and a mask of those a query uses.

    Slots outside the mask are undefined.
    """

    wanted: Tensor
    key: Tensor
    value: Tensor


def _exact_tokens(
    pages: LayerPages,
    full: FullPrecisionPages,
    place: tuple[int, int, int],
    behind: int,
    slot: Tensor,
    at: tuple[Tensor, Tensor],
) -> _Exact:
    """Return the full-precision tokens for the query at `behind` tokens before the row's end."""
    row, lane, slots = place
    length, start = int(full.lengths[row]), int(full.starts[row])
    positions = slot + (length - slots) if pages.positions is None else pages.positions[at].long()
    query_slot, query_position = slots - 1 - behind, length - 1 - behind
    # the row's tokens of this step end with its last token
    token = start + positions - (length - _num_tokens(full, row))
    is_fresh = (token >= start)[:, None, None]
    page = int(full.table[pages.rows[row], pages.first_lane + lane, 0])
    wanted = in_full_precision(
        full.tokens,
        positions,
        slot,
        torch.tensor(query_position),
        torch.tensor(query_slot),
    )
    record = stored_record(full.tokens, full.marks, torch.full_like(slot, page), positions, slot)
    sides = []
    for plane, fresh in full.sides:
        stored = plane[page, :, record].transpose(0, 1)
        heads = slice(lane * stored.shape[1], (lane + 1) * stored.shape[1])
        sides.append(torch.where(is_fresh, fresh[token.clamp_min(0), heads], stored).float())
    return _Exact(wanted[:, None, None], *sides)


def _num_tokens(full: FullPrecisionPages, row: int) -> int:
    """Return the tokens of a row in this step."""
    ends = [*full.starts.tolist(), len(full.fresh[0])]
    return int(ends[row + 1] - ends[row])


# Reference implementation of attention, against which every fast path is tested.


def attend_reference(
    query: Float[Tensor, "query num_heads head_dim"],
    key: Float[Tensor, "token num_kv_heads _"],
    value: Float[Tensor, "token num_kv_heads _"],
    *,
    math: AttentionMath,
    query_positions: Int[Tensor, " query"],
    key_positions: Int[Tensor, " token"],
    window: int | None = None,
) -> tuple[Float[Tensor, "query num_heads value_dim"], Float[Tensor, "num_heads token"]]:
    """Compute attention of one sequence in float32, and sum each slot's weights over the queries.

    Formula: w = softmax(cap(q k^T * scale) + bias) over the slots a query sees (position p sees
    positions in (p - window, p]); out = w v; column_sums[h, t] = sum over queries of
    w[h, query, t]. A sink is a logit that is added to the softmax without a value.
    Source: H2O and Batch-Max (section 3.2) rank by the column sums.

    Args:
        query: after RoPE; num_heads is a multiple of num_kv_heads.
        key: after RoPE, in any order of slots; as pages hold them, like `value`.
        value: as many as keys.
        math: scale, latent projections, softcap, sinks [num_heads], and ALiBi or biases
            [1, num_heads, token].
        query_positions: logical positions of the queries.
        key_positions: logical positions of the slots.
        window: number of positions a query attends to, including its own; None for all.

    Returns:
        The attention output and column_sums, in float32.
    """
    num_heads = query.shape[1]
    q, k, v = (x.float().transpose(0, 1) for x in (query, key, value))
    k, v = (x.float() for x in math.heads(k, v))
    group = query.shape[1] // k.shape[0]
    k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
    logits = q @ k.transpose(1, 2) * math.scale
    if math.softcap is not None:
        logits = math.softcap * torch.tanh(logits / math.softcap)
    math = math.at(key_positions, query_positions[-1:])
    if math.bias is not None:
        logits = logits + math.bias[0][:, None]
    distance = query_positions[:, None] - key_positions[None, :]
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if math.selected is not None:
        seen = seen & math.selected[:, : key.shape[0]]
    logits = logits.masked_fill(~seen, float("-inf"))
    if math.sinks is not None:
        column = math.sinks.float()[:, None, None].expand(-1, len(query), 1)
        logits = torch.cat([logits, column], dim=2)
    weights = torch.softmax(logits, dim=-1)[:, :, : key.shape[0]]
    weights = weights.masked_fill(~seen, 0.0)
    out = torch.einsum("hqt,htd->qhd", weights, v)
    return out, weights.sum(dim=1).reshape(num_heads, -1)
