"""The ways of evicting that are compared, each a text that `--evict` takes.

arm                    what leaves, and when
full                   nothing
decode                 by the asked rule down to cap - every, once the prompt has been read whole
decode_extreme         all but the newest token and the next one: no decode-only rule reads less
prefill_and_decode     by the asked rule: prompt and answer stay within the cap

Source: Batch-Max (Metel et al. 2025), Algorithm 1 (the last) and Algorithm 2 (the third).
"""

from quire.errors import ConfigError
from quire.layout.eviction import DECODE, PREFILL_AND_DECODE, parse_policy
from quire.plan.batch_verdict import BOTH_PHASES, DECODE_ONLY, EXTREME, FULL

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
