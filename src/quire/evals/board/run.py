"""Runs the entries of a leaderboard on its tasks; every entry gets the same prompts.

A cell is one entry on one task. All prompts of a cell are submitted at once to an engine with the
KV memory of the leaderboard, so its tokens/s are those of a fixed memory. Finished cells are
stored.

With `shares_prefill`, the entries of a codec run in one engine with a prefix cache. Entries whose
rules use the same statistics, apart from those of the newest queries, then compute a prompt once,
up to its first eviction or these queries. Their quality is that of requests of their own; bytes are
measured with the first prompt of a cell, which also runs without cached prefixes, and there are no
tokens/s. The pages of this engine serve all its rules: a rule that needs no one-head pages has
slightly fewer bytes in an engine of its own. The bytes of an entry without eviction are those of
such an engine. Full KV runs alone, unless all entries differ in `--sparse` only. Then it shares
their prefills too.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from quire.api.llm import LLM
from quire.config.kv_config import KVConfig
from quire.errors import ConfigError, QuireError, UnsoundCombination
from quire.evals.board.grid import FULL, QUIRE, BoardEntry
from quire.evals.pace import Pace
from quire.evals.suite.base import EvalTask, Sample, SampleOptions
from quire.evals.suite.cells import CellFolder, CellResult
from quire.evals.suite.engines import Engines
from quire.evals.suite.runner import SampleRunner, further_parts
from quire.evals.suite.sanity import SKIPPED, Sanity, sanity_of
from quire.evals.tune.scores import fingerprint_of
from quire.layout.kv_format import fill_plain, read_format
from quire.layout.sparse import OFF
from quire.policies.eviction import make_eviction


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardConfig:
    """What is compared."""

    entries: tuple[BoardEntry, ...]  # full KV first: the reference of quality
    tasks: tuple[EvalTask, ...]
    tokens: int = 256
    count: int = 10  # prompts of each task and seed
    seeds: tuple[int, ...] = (1, 2)
    shares_prefill: bool = False
    sanity: bool = True  # whether the sanity check runs
    evict_before_question: bool | None = None  # as in `SampleRunner`

    def __post_init__(self) -> None:
        if not self.entries or self.entries[0].name != FULL:
            raise ConfigError(
                "expected full KV, which reads all pages, as the first entry of a leaderboard: "
                "list off in --sparse"
            )
        if not self.tasks:
            raise ConfigError("expected at least one task, got none: add --tasks")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"expected --seeds with different numbers, got {list(self.seeds)}")
        for name, value in (("tokens", self.tokens), ("num-prompts", self.count)):
            if value < 1:
                raise ConfigError(f"expected --{name} of 1 or more, got {value}")

    @property
    def reference(self) -> BoardEntry:
        return self.entries[0]

    @property
    def shares_reference(self) -> bool:
        """Whether full KV shares its prefills: all entries differ in `--sparse` only."""
        kinds = {(entry.evict, entry.codec) for entry in self.entries}
        return self.shares_prefill and len(self.entries) > 1 and len(kinds) == 1

    def shares(self, entry: BoardEntry) -> bool:
        """Whether the entry runs in an engine with others, which computes each prompt once."""
        if entry == self.reference:
            return self.shares_reference
        return self.shares_prefill and entry.source == QUIRE


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """All cells of a leaderboard."""

    config: BoardConfig
    cells: Mapping[BoardEntry, Sequence[CellResult]]  # of each entry, in the order of the tasks
    refused: Mapping[BoardEntry, str]  # why entries do not run, by entry
    sanity: Sanity  # whether the model may judge a rule
    entries_left: int = 0  # that did not run before the time limit


def check_names(entries: Sequence[BoardEntry]) -> None:
    """Check rules and codecs before any entry runs: those at the end would fail after hours."""
    for evict in dict.fromkeys(entry.evict for entry in entries):
        with suppress(UnsoundCombination):  # shown in the table
            make_eviction(evict)
    for codec in dict.fromkeys(entry.codec for entry in entries):
        read_format(fill_plain(codec, "float32"))


class BoardRunner:
    """Runs a leaderboard of one model; `identity` is that of the model of stored cells."""

    def __init__(
        self,
        engines: Engines,
        kv: KVConfig,
        config: BoardConfig,
        *,
        identity: Sequence[object],
        stored: CellFolder,
        pace: Pace,
    ) -> None:
        self._engines, self._kv, self._config = engines, kv, config
        self._identity, self.stored, self._pace = identity, stored, pace
        self._samples: dict[str, list[Sample]] = {}
        # of each codec and value of --sparse of an engine
        self._engine_rules: dict[tuple[str, str], list[list[str]]] = {}
        # of entries without eviction, in an engine of their own
        self._alone_kv_bytes: dict[BoardEntry, dict[str, int]] = {}

    def reference(self) -> LLM:
        return self._engines.of(self._config.reference.applied(self._kv))

    def refuse_long(self, option: str, lengths: Iterable[int]) -> None:
        """Refuse lengths of later runs beyond the context, before this one takes hours."""
        for tokens in lengths:
            self.reference()
            self._engines.refuse_long(tokens, option)

    def run(self) -> Board:
        check_names(self._config.entries)
        entries, tasks = self._config.entries, self._config.tasks
        listed = [self._key(entry, task) for entry in entries for task in tasks]
        for line in self.stored.resumption(listed):
            self._pace.report(line)
        sanity = self._sanity()
        cells: dict[BoardEntry, dict[str, CellResult]] = {entry: {} for entry in entries}
        refused: dict[BoardEntry, str] = {}
        number = 0
        for group in self._groups():
            for task in tasks:
                for entry in group:
                    late = number and self._pace.is_over
                    if late and self.stored.cell(*self._key(entry, task)) is None:
                        continue  # later entries may be stored
                    number += 1
                    if entry in refused:
                        continue
                    try:
                        full = cells[self._config.reference].get(task.name)
                        cells[entry][task.name] = found = self._cell(entry, task, full)
                    except QuireError as error:
                        if entry == self._config.reference:
                            raise
                        refused[entry] = str(error)
                        self._pace.report(f"{number}/{len(listed)} {entry}: {error}")
                        continue
                    left = self._pace.left(len(listed) - number)
                    metric, mean = next(iter(found.means().items()))
                    done = f"{task.name}, {metric} {mean.mean:.3f}"
                    self._pace.report(f"{number}/{len(listed)} {entry}: {done}{left}")
        return self._board(cells, refused, sanity)

    def _groups(self) -> list[list[BoardEntry]]:
        """Entries in the order in which they run: a group computes each prompt once.

        The reference comes first. An entry that shares no prefill is a group.
        """
        groups: dict[object, list[BoardEntry]] = {}
        for entry in self._config.entries:
            shared: tuple[object, ...] = ()
            with suppress(ConfigError):  # shown in the table when the entry runs
                rule = make_eviction(entry.evict)
                # statistics of the newest queries start from any cached prefix: they need no copies
                names = tuple(one.name for one in rule.statistics if one.newest is None)
                shared = (rule.policy is not None and rule.policy.rerotates_keys, names)
            key = (
                (entry.codec, self._bounds(entry), shared) if self._config.shares(entry) else entry
            )
            groups.setdefault(key, []).append(entry)
        return list(groups.values())

    def _board(
        self,
        cells: Mapping[BoardEntry, Mapping[str, CellResult]],
        refused: Mapping[BoardEntry, str],
        sanity: Sanity,
    ) -> Board:
        """The entries that have all cells."""
        entries, tasks = self._config.entries, self._config.tasks
        complete = {
            entry: [found[task.name] for task in tasks]
            for entry, found in cells.items()
            if entry not in refused and len(found) == len(tasks)
        }
        left = len(entries) - len(complete) - len(refused)
        if self._config.reference not in complete:
            raise ConfigError(
                "the time limit was over before full KV ran on all tasks: the same command with "
                "the same --out continues"
            )
        if left:
            self._pace.report(
                f"time limit: {len(entries) - left} of {len(entries)} entries are done; the same "
                "command with the same --out continues"
            )
        return Board(
            config=self._config, cells=complete, refused=refused, sanity=sanity, entries_left=left
        )

    def _sanity(self) -> Sanity:
        if not self._config.sanity:
            return SKIPPED
        return sanity_of(
            self._engines,
            self._config.reference.applied(self._kv),
            tasks=[task.name for task in self._config.tasks],
            seed=self._config.seeds[0],
            identity=self._identity,
            stored=self.stored,
            report=self._pace.report,
            make_prompts=lambda: [self.samples(task) for task in self._config.tasks],
        )

    def _cell(self, entry: BoardEntry, task: EvalTask, full: CellResult | None) -> CellResult:
        key = self._key(entry, task)
        found = self.stored.cell(*key)
        if found is None:
            found = self._measured(entry, task, full)
            self.stored.write(*key, asdict(found))
        return found

    def _key(self, entry: BoardEntry, task: EvalTask) -> tuple[str, str]:
        """Name and fingerprint of a stored cell."""
        kv, config = entry.applied(self._kv), self._config
        options = (config.tokens, config.count, config.seeds, config.evict_before_question)
        shared = ("shared",) if self._config.shares(entry) else ()
        more = further_parts(task, kv, config.reference.applied(self._kv))
        fingerprint = fingerprint_of(*self._identity, kv, task, options, *shared, *more)
        return f"{task.name}-{fingerprint}", fingerprint

    def _measured(self, entry: BoardEntry, task: EvalTask, full: CellResult | None) -> CellResult:
        kv, config = entry.applied(self._kv), self._config
        shares, before = self._config.shares(entry), config.evict_before_question
        with self._pace.measuring():
            alone = self._alone(entry)[task.name] if shares and entry.evict == FULL else None
            llm = self._engines.of(self._shared(entry) if shares else kv)
            runner = SampleRunner(
                llm,
                kv,
                evict_before_question=before,
                shares_prefill=shares,
                alone_kv_bytes=alone,
            )
            prompts, seconds = runner.run(task, self.samples(task), full)
        return CellResult(
            task=task.name,
            tokens=config.tokens,
            arm=str(entry),
            prompts=prompts,
            seconds=seconds,
        )

    def _alone(self, entry: BoardEntry) -> dict[str, int]:
        """Bytes of each task's first prompt in an engine whose pages serve no rule."""
        if entry not in self._alone_kv_bytes:
            kv = entry.applied(self._kv)
            own = SampleRunner(self._engines.of(kv), kv)  # which runs all tasks once
            self._alone_kv_bytes[entry] = {
                one.name: own.kv_bytes(one, self.samples(one)[0]) for one in self._config.tasks
            }
        return self._alone_kv_bytes[entry]

    def _bounds(self, entry: BoardEntry) -> str:
        """`--sparse` of the engine that runs an entry with others: whether pages have bounds."""
        if entry.sparse == OFF and not self._config.shares_reference:
            return OFF
        return next((one.sparse for one in self._config.entries if one.sparse != OFF), OFF)

    def _shared(self, entry: BoardEntry) -> KVConfig:
        """The configuration of the engine that runs all entries of a codec, with bounds or without.

        A rule that an engine cannot serve beside the others, or not at all, has one of its own.
        """
        kind = (entry.codec, self._bounds(entry))
        if kind not in self._engine_rules:
            self._engine_rules[kind] = self._rules_by_engine(entry)
        rules = next(own for own in self._engine_rules[kind] if entry.rule in own)
        return self._serving(entry, rules)

    def _rules_by_engine(self, entry: BoardEntry) -> list[list[str]]:
        alike = (one for one in self._config.entries if one.codec == entry.codec)
        bounds = self._bounds(entry)
        rules = list(dict.fromkeys(one.rule for one in alike if self._bounds(one) == bounds))
        if self._opens(entry, rules):
            return [rules]
        self.reference()  # the model is loaded once
        found: list[list[str]] = []
        for rule in rules:
            own = next((own for own in found if self._opens(entry, [*own, rule])), None)
            if own is None:
                found.append(own := [])
            own.append(rule)
        return found

    def _opens(self, entry: BoardEntry, rules: Sequence[str]) -> bool:
        try:
            self._engines.of(self._serving(entry, rules))
        except QuireError:
            return False
        return True

    def _serving(self, entry: BoardEntry, rules: Sequence[str]) -> KVConfig:
        allow = "; ".join(rule for rule in rules if rule != FULL)
        return replace(
            entry.applied(self._kv),
            evict=FULL,
            sparse=self._bounds(entry),
            evict_allow=allow or self._kv.evict_allow,
            prefix_cache=replace(self._kv.prefix_cache, enabled=True),
        )

    def samples(self, task: EvalTask) -> list[Sample]:
        """The prompts of a task for all seeds; an engine must be open."""
        if task.name not in self._samples:
            config = self._config
            self._engines.refuse_long(config.tokens)
            self._samples[task.name] = [
                sample
                for seed in config.seeds
                for sample in task.samples(
                    SampleOptions(
                        count=config.count,
                        measure=self._engines.measure,
                        tokens=config.tokens,
                        seed=seed,
                    )
                )
            ]
        return self._samples[task.name]
