"""Eviction rules that a benchmark compares, and their `--evict` values for a cap and a schedule."""

import re
from dataclasses import dataclass

from quire.errors import ConfigError
from quire.policies.eviction import make_eviction
from quire.policies.registry import FULL, make_policy

DEFAULT_RULES = ("random", "recent", "sinks", "h2o", "h2o_sinks", "average", "snapkv", "keydiff")


@dataclass(frozen=True, slots=True)
class Rule:
    """An eviction rule without its cap.

    Attributes:
        text: name of the rule, with options if any: `snapkv:window=16`.
    """

    text: str

    @property
    def name(self) -> str:
        """Name for claims and files: letters, digits and underscores."""
        return re.sub(r"\W+", "_", self.text).strip("_")

    def evict(self, cap: int, every: int, when: str) -> str:
        """The `--evict` value for a cap and a schedule.

        Raises:
            ConfigError: the cap is too small for the rule.
        """
        name, _, options = self.text.partition(":")
        made = f"{name}:cap={cap},every={every},when={when}" + (f",{options}" if options else "")
        make_eviction(made)
        return made


def rules_of(text: str) -> tuple[Rule, ...]:
    """Parse rules: comma-separated names, or rules with options separated by semicolons.

    An empty text selects the default rules.

    Raises:
        UnknownName: no rule has this name, or no such option.
        ConfigError: a rule is given twice, or `full`, which every benchmark runs anyway.
    """
    if not text.strip():
        return tuple(map(Rule, DEFAULT_RULES))
    parts = text.split(";") if ";" in text or ":" in text else text.split(",")
    found = tuple(Rule(part.strip()) for part in parts if part.strip())
    for rule in found:
        if rule.text == FULL:
            raise ConfigError("expected rules other than full, which always runs; omit full")
        make_policy(rule.text)
    if len(set(found)) != len(found):
        raise ConfigError(f"expected each rule once, got {text!r}")
    return found


def parts_of_budgets(text: str) -> tuple[float, ...]:
    """Parse comma-separated budgets, each a percentage.

    Raises:
        ConfigError: a budget is not a number above 0 and up to 100.
    """
    try:
        found = tuple(float(part) / 100 for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 < part <= 1 for part in found):
        raise ConfigError(
            f"expected percentages above 0 and up to 100, such as 50,25; got {text!r}"
        )
    return found
