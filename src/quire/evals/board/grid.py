"""The grids of a leaderboard: what is combined, and the entries that follow."""

import re
import shlex
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from quire.config.kv_config import KVConfig
from quire.errors import ConfigError, UnknownName
from quire.layout.eviction import PREFILL_AND_DECODE, PREFILL_END, SCHEDULES
from quire.layout.sparse import OFF

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
    sparse: str = OFF  # pages that a decode row reads

    @property
    def evict(self) -> str:
        """The eviction rule in the syntax of `--evict`; empty for another source."""
        if self.source != QUIRE:
            return ""
        if self.rule == FULL:
            return FULL
        separator = "," if ":" in self.rule else ":"
        return f"{self.rule}{separator}cap={self.budget},when={self.schedule}"

    @property
    def name(self) -> str:
        """The rule with the pages that are read of its tokens."""
        return self.rule if self.sparse == OFF else f"{self.rule}, {self.sparse}"

    def applied(self, kv: KVConfig) -> KVConfig:
        return replace(kv, codec=self.codec, evict=self.evict, sparse=self.sparse)

    def __str__(self) -> str:
        return self._options(self.evict)

    @property
    def shell_options(self) -> str:
        """The options as a shell reads them: parentheses of a rule are quoted."""
        return self._options(shlex.quote(self.evict))

    def _options(self, evict: str) -> str:
        if self.source != QUIRE:
            return f"{self.rule} {self.budget} {self.schedule}"
        sparse = "" if self.sparse == OFF else f" --sparse {self.sparse}"
        return f"--kv-codec {self.codec} --evict {evict}{sparse}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Values that are combined; a leaderboard has one or several grids."""

    rules: tuple[str, ...] = (
        *("recent:sinks=4", "h2o_sinks", "snapkv", "expected_attention", "keydiff", "lagkv"),
        *("kvcrush:base=snapkv", "random"),
    )  # without cap; empty: full KV only
    budgets: tuple[str, ...] = ("25%", "50%", "75%")  # caps as fractions of the prompt
    schedules: tuple[str, ...] = (PREFILL_END, PREFILL_AND_DECODE)  # values of `when`
    codecs: tuple[str, ...] = ("none", "int8")
    sparse: tuple[str, ...] = (OFF,)  # values of --sparse

    def __post_init__(self) -> None:
        for name in ("budgets", "schedules", "codecs", "sparse"):
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

    def entries(self) -> tuple[BoardEntry, ...]:
        """Full KV with each codec, then all combinations."""
        full = tuple(
            BoardEntry(FULL, "", "", codec, sparse=sparse)
            for sparse in self.sparse
            for codec in self.codecs
        )
        return full + tuple(
            BoardEntry(rule, budget, schedule, codec, sparse=sparse)
            for sparse in self.sparse
            for codec in self.codecs
            for schedule in self.schedules
            for budget in self.budgets
            for rule in self.rules
            if rule != FULL
        )


def entries_of(*grids: Grid) -> tuple[BoardEntry, ...]:
    """The entries of all grids, each once; full KV first: the first codec is the reference's."""
    found = dict.fromkeys(entry for grid in grids for entry in grid.entries())
    return tuple(sorted(found, key=lambda entry: (entry.rule != FULL, entry.sparse != OFF)))


def read_grids(path: Path) -> tuple[Grid, ...]:
    """The grids of a TOML file: tables `[[grid]]` with the fields of `Grid`.

    Raises:
        ConfigError: the file is missing or invalid.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read --grids {path}: {error}") from error
    tables = content.pop("grid", None)
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables or [0]):
        raise ConfigError(f"expected --grids {path} with tables [[grid]], got none")
    for name in content:
        raise UnknownName(f"table in {path}", name, ["grid"])
    return tuple(_grid(path, table) for table in tables)


def _grid(path: Path, table: dict[str, Any]) -> Grid:
    names = [field.name for field in fields(Grid)]
    for name, value in table.items():
        if name not in names:
            raise UnknownName(f"value of a grid in {path}", name, names)
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise ConfigError(f"expected {name} in {path} as a list of texts, got {value!r}")
    return Grid(**{name: tuple(value) for name, value in table.items()})
