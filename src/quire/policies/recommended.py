"""`auto`: the rules that the leaderboard recommends, with the caller's cap and schedule.

    --evict auto:cap=50%      the first of `RECOMMENDED` that the engine can serve

Source: docs/board-measured.md (SmolLM2, `when=prefill_end`), whose eviction precedes the question.
At 75 and 50 % of the tokens the quality of the first is within 0.005 of that of `snapkv` with the
same budget, the highest but for `kvzip`, in fewer bytes; `kvzip` computes the prompt twice. Of the
other rules with equal budgets `lagkv` is the best at 75 %; `recent:sinks=4` is within 0.015 of it
at 50 and 25 %, with any cap.
"""

from collections.abc import Iterator

from quire.errors import ConfigError
from quire.layout.eviction import AUTO, SCHEDULE_OPTIONS, parse_policy

RECOMMENDED = ("recent:sinks=4,budget=(duo:scores=smollm2)", "lagkv", "recent:sinks=4")
"""The best rule first."""


def candidates(text: str) -> Iterator[str]:
    """Yield the rules that an `--evict` text may mean, the best one first; others yield the text.

    The last one reads nothing that only one model has.

    Raises:
        ConfigError: `auto` with options other than the cap and the schedule.
    """
    parsed = parse_policy(text)
    if parsed.name != AUTO:
        yield text
        return
    own = [name for name in parsed.options if name not in SCHEDULE_OPTIONS or name == "budget"]
    if own:
        raise ConfigError(
            f"'auto' selects the rule, its options and its budget, and takes cap, when, every and "
            f"granularity; got {own[0]} in {text!r}: name the rule instead"
        )
    options = ",".join(f"{name}={value}" for name, value in parsed.options.items())
    if "cap" not in parsed.options:
        raise ConfigError(f"{text!r} needs a cap, such as cap=50%")
    for rule in RECOMMENDED:
        yield f"{rule}{',' if ':' in rule else ':'}{options}"
