"""Whether evicting while prompts are read pays, and why.

It pays by its larger batch alone: rows are read in blocks, which takes longer, and what is evicted
is chosen before the prompt is known. So it does not pay where no larger batch comes of it:

    batch fixed, prompts fit      read them whole, evict while decoding
    prompt within the cap         nothing leaves before the answer: both schedules are one
    memory ample                  the wanted rows fit with all their tokens: evict nothing

Source: Batch-Max (Metel et al. 2025), section 1, which names the first two.
"""

from collections.abc import Sequence
from dataclasses import dataclass

FULL, DECODE_ONLY, EXTREME, BOTH_PHASES = (
    "full",
    "decode",
    "decode_extreme",
    "prefill_and_decode",
)
ARMS = (FULL, DECODE_ONLY, EXTREME, BOTH_PHASES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmBatch:
    """What one way of evicting makes of the memory.

    Attributes:
        arm: one of ARMS.
        rows: that run side by side.
        tokens_per_s: predicted at that batch; None where nothing was measured.
    """

    arm: str
    rows: int
    tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockVerdict:
    """The answer.

    Attributes:
        pays: None where it depends on times that were not measured.
        reasons: sentences with the numbers that decided.
    """

    pays: bool | None
    reasons: tuple[str, ...]


def judge_blocks(
    arms: Sequence[ArmBatch],
    *,
    cap: int,
    prompt_tokens: int,
    new_tokens: int,
    batch: int | None = None,
) -> BlockVerdict:
    """Say whether evicting while prompts are read pays.

    Args:
        arms: all of ARMS.
        cap: most tokens of a lane.
        prompt_tokens: of each row.
        new_tokens: generated behind it.
        batch: rows wanted, if they are fixed; None: as many as can be.
    """
    rows = {found.arm: found.rows for found in arms}
    held = prompt_tokens + new_tokens - 1
    if held <= cap:
        reason = f"a row comes to hold {held:,} tokens, within the cap of {cap:,}: nothing leaves"
        return BlockVerdict(pays=False, reasons=(reason,))
    if prompt_tokens <= cap:
        reason = (
            f"the prompt of {prompt_tokens:,} tokens is within the cap of {cap:,}: nothing leaves "
            "while it is read, and when=decode is the same"
        )
        return BlockVerdict(pays=False, reasons=(reason,))
    if batch is not None:
        return _for_fixed(batch, rows)
    whole = max(rows[DECODE_ONLY], rows[EXTREME])
    more = rows[BOTH_PHASES]
    ample = (
        f"up to {rows[FULL]:,} rows fit with all their tokens and up to {whole:,} with whole "
        "prompts: for a batch of that size do not evict while prompts are read"
    )
    if more <= whole:
        reason = f"it holds {more:,} rows, no more than the {whole:,} whose prompts fit whole"
        return BlockVerdict(pays=False, reasons=(reason, ample))
    larger = f"it holds {more:,} rows where {whole:,} fit with whole prompts"
    pays, compared = _by_time(arms)
    return BlockVerdict(pays=pays, reasons=(larger, compared, ample))


def _for_fixed(batch: int, rows: dict[str, int]) -> BlockVerdict:
    whole = max(rows[DECODE_ONLY], rows[EXTREME])
    if batch <= rows[FULL]:
        reason = f"memory is ample: {batch:,} rows fit with all their tokens"
        return BlockVerdict(pays=False, reasons=(reason,))
    if batch <= whole:
        reason = (
            f"the batch is fixed and the prompts of {batch:,} rows fit whole: read them whole and "
            "evict while decoding (when=decode)"
        )
        return BlockVerdict(pays=False, reasons=(reason,))
    if batch <= rows[BOTH_PHASES]:
        reason = f"whole prompts fit for {whole:,} rows only, and {batch:,} are wanted"
        return BlockVerdict(pays=True, reasons=(reason,))
    reason = f"no way holds {batch:,} rows: {rows[BOTH_PHASES]:,} at most, with this cap"
    return BlockVerdict(pays=False, reasons=(reason,))


def _by_time(arms: Sequence[ArmBatch]) -> tuple[bool | None, str]:
    speeds = {found.arm: found.tokens_per_s for found in arms if found.rows}
    own = speeds.pop(BOTH_PHASES)
    others = [speed for speed in speeds.values() if speed is not None]
    if own is None or len(others) < len(speeds):
        return None, "whether that is faster was not measured here"
    if not others:
        return True, "no other way holds a row"
    best = max(others)
    return own > best, f"{own:,.0f} tokens/s are predicted, {own / best:.2f} of the best other way"
