"""Candidates: combinations of a KV codec and an eviction rule."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from quire.config.kv_config import KVConfig
from quire.errors import ConfigError
from quire.policies.recommended import RECOMMENDED

FULL = "full"
UNIFORM = "uniform"


@dataclass(frozen=True, slots=True, order=True)
class SearchCandidate:
    """One configuration."""

    codec: str  # in the syntax of `--kv-codec`
    evict: str  # in the syntax of `--evict`

    def applied(self, kv: KVConfig) -> KVConfig:
        return replace(kv, codec=self.codec, evict=self.evict)

    def __str__(self) -> str:
        return f"--kv-codec {self.codec} --evict {self.evict}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The values that are combined."""

    codecs: tuple[str, ...] = (
        *("none", "int8", "int8/int4+residual=16", "int8/int4"),
        *("int4_hadamard+residual=32", "int4_outliers+residual=32", "int4_hadamard", "int4"),
        "int3_hadamard+residual=32",
    )  # the first is the baseline's
    # without cap; `full` retains all tokens
    rules: tuple[str, ...] = (FULL, *RECOMMENDED, "keydiff", "snapkv")
    # in tokens or as fractions of the prompt such as 50%
    caps: tuple[str, ...] = ("75%", "50%", "25%")
    schedules: tuple[str, ...] = ("prefill_end", "prefill_and_decode")  # values of `when`
    # of a cap over layers and heads; `uniform` for equal caps
    budgets: tuple[str, ...] = (UNIFORM,)

    def __post_init__(self) -> None:
        for name in ("codecs", "rules", "caps", "schedules", "budgets"):
            if not getattr(self, name):
                raise ConfigError(f"--{name} has no values: name at least one, or leave it out")

    @property
    def baseline(self) -> SearchCandidate:
        return SearchCandidate(self.codecs[0], FULL)

    def candidates(self) -> list[SearchCandidate]:
        rules = [text for rule in self.rules for text in self._rules(rule)]
        found = [SearchCandidate(codec, rule) for codec in self.codecs for rule in rules]
        return list(dict.fromkeys((self.baseline, *found)))

    def parts(self, one: SearchCandidate) -> tuple[SearchCandidate, SearchCandidate]:
        """The codec of a candidate with all tokens, and its rule with the first codec."""
        return SearchCandidate(one.codec, FULL), SearchCandidate(self.codecs[0], one.evict)

    def _rules(self, rule: str) -> Iterator[str]:
        if rule == FULL:
            yield FULL
            return
        separator = "," if ":" in rule else ":"
        for cap in self.caps:
            for when in self.schedules:
                for budget in self.budgets:
                    own = budget == UNIFORM or "budget=" in rule
                    share = "" if own else f",budget=({budget})"
                    yield f"{rule}{separator}cap={cap},when={when}{share}"
