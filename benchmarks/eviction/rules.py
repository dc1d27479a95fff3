"""Which rules a bench compares, and the text that each becomes under a cap and a schedule."""

import re
from dataclasses import dataclass

from quire.errors import ConfigError
from quire.policies.eviction import make_eviction
from quire.policies.registry import FULL, make_policy

DEFAULT_RULES = ("random", "recent", "sinks", "h2o", "h2o_sinks", "average", "snapkv", "keydiff")


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule without its cap.

    Attributes:
        text: a name, perhaps with options: `snapkv:window=16`.
    """

    text: str

    @property
    def name(self) -> str:
        """For claims and files: letters, digits and underscores."""
        return re.sub(r"\W+", "_", self.text).strip("_")

    def evict(self, cap: int, every: int, when: str) -> str:
        """The whole text, as `--evict` takes it.

        Raises:
            ConfigError: the cap is too small for the rule.
        """
        name, _, options = self.text.partition(":")
        made = f"{name}:cap={cap},every={every},when={when}" + (f",{options}" if options else "")
        make_eviction(made)
        return made


def rules_of(text: str) -> tuple[Rule, ...]:
    """Read rules: names with commas, or rules with options with semicolons; "" for the usual ones.

    Raises:
        UnknownName: no rule has this name, or no such option.
        ConfigError: one stands there twice, or `full`, which every bench has anyway.
    """
    if not text.strip():
        return tuple(map(Rule, DEFAULT_RULES))
    parts = text.split(";") if ";" in text or ":" in text else text.split(",")
    found = tuple(Rule(part.strip()) for part in parts if part.strip())
    for rule in found:
        if rule.text == FULL:
            raise ConfigError("full keeps everything and is always there: leave it out")
        make_policy(rule.text)
    if len(set(found)) != len(found):
        raise ConfigError(f"expected each rule once, got {text!r}")
    return found
