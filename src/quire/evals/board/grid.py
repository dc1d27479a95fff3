"""The grid of a leaderboard: what is combined, and the entries that follow."""

import re
from dataclasses import dataclass, replace

from quire.config.kv_config import KVConfig
from quire.errors import ConfigError, UnknownName
from quire.layout.eviction import SCHEDULES

FULL = "full"
NO_CODEC = "none"
_FRACTION = re.compile(r"\d+(\.\d+)?%")
QUIRE = "quire"
"""Source of the entries that the engine runs."""


@dataclass(frozen=True, slots=True)
class BoardEntry:
    """One configuration of the leaderboard."""

    rule: str  # without cap; `full` retains all tokens
    budget: str  # cap as a fraction of the prompt, such as 25%; empty with `full`
    schedule: str  # when to evict; empty with `full`
    codec: str
    source: str = QUIRE  # whose code runs: `quire`, or another library in a comparison with it

    @property
    def evict(self) -> str:
        """The eviction rule in the syntax of `--evict`; empty for another source."""
        if self.source != QUIRE:
            return ""
        if self.rule == FULL:
            return FULL
        separator = "," if ":" in self.rule else ":"
        return f"{self.rule}{separator}cap={self.budget},when={self.schedule}"

    def applied(self, kv: KVConfig) -> KVConfig:
        return replace(kv, codec=self.codec, evict=self.evict)

    def __str__(self) -> str:
        if self.source != QUIRE:
            return f"{self.rule} {self.budget} {self.schedule}"
        return f"--kv-codec {self.codec} --evict {self.evict}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The values that are combined."""

    rules: tuple[str, ...] = (
        *(
            "sinks",
            "average",
            "h2o",
            "h2o_sinks",
            "snapkv:window=16",
            "tova",
            "keydiff",
            "lagkv:lag=8",
        ),
        *("expected_attention", "kvcrush:base=(h2o)", "kvcrush:base=(snapkv:window=16),sets=head"),
        "random",
    )  # without cap
    budgets: tuple[str, ...] = ("12.5%", "25%", "50%")  # caps as fractions of the prompt
    schedules: tuple[str, ...] = ("prefill_and_decode", "prefill_end")  # values of `when`
    # full KV with the first one is the reference of quality
    codecs: tuple[str, ...] = ("none", "int8", "int4")

    def __post_init__(self) -> None:
        for name in ("rules", "budgets", "schedules", "codecs"):
            if not getattr(self, name):
                raise ConfigError(f"--{name} has no values: name at least one, or leave it out")
        for budget in self.budgets:
            if not _FRACTION.fullmatch(budget):
                raise ConfigError(
                    f"expected --budgets as fractions of the prompt such as 25%, got {budget!r}"
                )
        for when in self.schedules:  # else noticed only when its entries run, after all others
            if when not in SCHEDULES:
                raise UnknownName("value of --schedules", when, SCHEDULES)

    @property
    def reference(self) -> BoardEntry:
        return BoardEntry(FULL, "", "", self.codecs[0])

    def entries(self) -> list[BoardEntry]:
        """Full KV with each codec, then all combinations."""
        full = [BoardEntry(FULL, "", "", codec) for codec in self.codecs]
        return full + [
            BoardEntry(rule, budget, schedule, codec)
            for codec in self.codecs
            for schedule in self.schedules
            for budget in self.budgets
            for rule in self.rules
            if rule != FULL
        ]
