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

from quire.errors import ConfigError
from quire.layout.eviction import DECODE, PREFILL_AND_DECODE, parse_policy

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


# ---- batch rules ---------------------------------------------------------------------------------

# The ways of evicting that are compared, each a text that `--evict` takes.
#
# arm                    what leaves, and when
# full                   nothing
# decode                 by the asked rule down to cap - every, once the prompt has been read whole
# decode_extreme         all but the newest token and the next one: no decode-only rule reads less
# prefill_and_decode     by the asked rule: prompt and answer stay within the cap
#
# Source: Batch-Max (Metel et al. 2025), Algorithm 1 (the last) and Algorithm 2 (the third).

DEFAULT_RULE = "average"
EXTREME_RULE = f"recent:cap=2,every=1,when={DECODE}"


def with_numbers(evict: str, *, cap: int | str, every: int | str | None, when: str) -> str:
    """A rule with another cap and schedule; what else it says stays.

    Args:
        evict: the rule.
        cap: in its place.
        every: in its place; None: as the rule says.
        when: in its place.

    Raises:
        ConfigError: it is no rule.
    """
    parsed = parse_policy(evict)
    numbers = {"cap": str(cap)} | ({} if every is None else {"every": str(every)}) | {"when": when}
    options = ",".join(f"{k}={v}" for k, v in (dict(parsed.options) | numbers).items())
    return f"{parsed.name}:{options}"


def arm_rules(
    evict: str | None = None, *, cap: str | None = None, every: int | None = None
) -> dict[str, str]:
    """The text of each arm.

    Args:
        evict: the rule asked about; None: Batch-Max's own.
        cap: in its place, as `--evict` takes it.
        every: tokens that leave at a time; None: as the rule says, else the default for the cap.

    Raises:
        ConfigError: no cap, neither in the rule nor beside it, or a rule that keeps everything.
    """
    parsed = parse_policy(evict or DEFAULT_RULE)
    if parsed.name == FULL:
        raise ConfigError("evict=full keeps everything: name a rule, such as average:cap=896")
    found = cap or parsed.options.get("cap")
    if found is None:
        raise ConfigError("say how much may stay: --cap 896, or --evict average:cap=896")
    text = evict or DEFAULT_RULE
    return {
        FULL: FULL,
        DECODE_ONLY: with_numbers(text, cap=found, every=every, when=DECODE),
        EXTREME: EXTREME_RULE,
        BOTH_PHASES: with_numbers(text, cap=found, every=every, when=PREFILL_AND_DECODE),
    }
