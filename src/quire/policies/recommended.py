"""`auto`: the rules that the leaderboard recommends, with the caller's cap and schedule.

    --evict auto:cap=50%      the first rule of the class of 50 % that the engine can serve

Source: the results of `bash runs/board.sh` in docs/log.md, 2026-11-30: the entries with the highest
quality of those that have run. They evict the context before the question is computed.
"""

from collections.abc import Iterator

from quire.errors import ConfigError
from quire.layout.eviction import Cap, parse_policy
from quire.policies.registry import AUTO, SCHEDULE_OPTIONS

RECOMMENDED = (
    (0.3, ("keydiff:budget=(duo:scores=smollm2)", "keydiff")),
    (1.0, ("recent:sinks=4,budget=(duo:scores=smollm2)", "keydiff")),
)
"""Rules by the largest cap of their class, as a fraction of the prompt; the best one first.

A cap in tokens or bytes is one of the first class: it can be a small part of a long prompt.
"""


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
    share = Cap.parse(parsed.options["cap"]).share
    for rule in _of_class(0.0 if share is None else float(share)):
        yield f"{rule}{',' if ':' in rule else ':'}{options}"


def _of_class(share: float) -> tuple[str, ...]:
    return next((rules for largest, rules in RECOMMENDED if share <= largest), RECOMMENDED[-1][1])
