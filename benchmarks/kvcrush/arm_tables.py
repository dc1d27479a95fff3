"""Which arms stand in which table: one base configuration, one thing at a time changed.

Every arm stands beside the two it is compared with, the rule as it is and the rule with one set for
the heads of a layer; no table is a product of more than two lists.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from benchmarks.eviction.cells import CellKey
from benchmarks.eviction.rules import Rule
from benchmarks.kvcrush.arms import (
    CRUSH,
    PAGES,
    Arm,
    ArmTable,
    Compared,
    Row,
    around,
    base_arm,
    by_page,
    by_token,
    crushed,
    full_key,
    key_of,
    one_set,
    paper_rows,
    with_options,
)
from benchmarks.kvcrush.config import QualityConfig
from quire.policies.signatures.anchors import ALTERNATING, MEAN, RANDOM


def tables(config: QualityConfig) -> tuple[ArmTable, ...]:
    """The requested tables; tables without variants are left out."""
    made = (TABLES[name](config) for name in config.tables)
    return tuple(table for table in made if table.rows)


def keys(config: QualityConfig, model: str, commit: str | None) -> list[CellKey]:
    """All cells, each once, task by task, full KV first.

    Raises:
        ConfigError: a budget is too small for a rule.
    """
    arms = [arm for table in tables(config) for row in table.rows for arm in row.arms]
    unique = dict.fromkeys(arms)
    return [
        key
        for task in config.tasks
        for key in (
            full_key(config, task, model, commit),
            *(key_of(config, arm, task, model, commit) for arm in unique),
        )
    ]


def _three(label: str, alone: Arm, shared: Arm, crushing: Arm) -> Iterator[Row]:
    yield Row(label=label, arm=alone)
    yield Row(label=f"{label}, one set a layer", arm=shared, against=alone)
    yield Row(label=f"{label} + KVCrush", arm=crushing, against=alone, one_set=shared)


def _compared(
    config: QualityConfig, base: Rule, label: str, made: Callable[[Rule], Arm]
) -> Iterator[Row]:
    rules = (base, one_set(base), crushed(base, config.share))
    return _three(label, *map(made, rules))


def _rows(compared: Compared) -> Iterator[Row]:
    alone, shared = compared.alone, compared.one_set
    label = alone.rule.text.removesuffix(f",{PAGES}").removesuffix(f":{PAGES}")
    yield from _three(label, alone, shared, compared.crushing)
    if compared.openvino is not None:
        form = compared.openvino
        yield Row(label=f"{label} + OpenVINO's form", arm=form, against=alone, one_set=shared)


def _bases(config: QualityConfig) -> ArmTable:
    return ArmTable(
        name="bases",
        caption=f"Rules without KVCrush and with it, share {config.share:g}, at equal caps",
        rows=tuple(row for compared in by_token(config) for row in _rows(compared)),
    )


def _pages(config: QualityConfig) -> ArmTable:
    return ArmTable(
        name="pages",
        caption=(
            f"The same by pages of {config.page_tokens}; OpenVINO's form keeps {config.blocks} "
            "pages beyond its cap, which is lower by as many"
        ),
        rows=tuple(row for compared in by_page(config) for row in _rows(compared)),
    )


def _paper(config: QualityConfig) -> ArmTable:
    paper = config.paper
    sizes = [paper.scaled(n) for n in (paper.initial, paper.middle, paper.recent)]
    return ArmTable(
        name="paper",
        caption=(
            f"The paper's table I, divided by {paper.divisor}: {sizes[0]} initial, {sizes[1]} "
            f"middle and {sizes[2]} recent tokens in pages of {config.page_tokens}"
        ),
        rows=paper_rows(paper, config.when, (0.75, 0.25), (RANDOM, MEAN, ALTERNATING)),
    )


def _sweep(config: QualityConfig, name: str, caption: str, *changes: tuple[str, str]) -> ArmTable:
    """KVCrush with other options, against the base rule.

    Args:
        config: of all tables.
        name: of this one.
        caption: of this one.
        changes: labels, and options behind `kvcrush:base=(...)`.
    """
    rows = []
    for base in config.swept:
        alone, shared = base_arm(config, base), base_arm(config, one_set(base))
        rows.append(Row(label=base.text, arm=alone))
        for label, options in changes:
            arm = base_arm(config, around(CRUSH, base, options))
            shown = f"{base.text}, {label}"
            none = None if arm == shared else shared
            rows.append(Row(label=shown, arm=arm, against=alone, one_set=none))
    return ArmTable(name=name, caption=caption, rows=tuple(rows))


def _shares(config: QualityConfig) -> ArmTable:
    changes = [(f"share {share:g}", f"share={share:g}") for share in config.shares]
    return _sweep(config, "shares", "Share of representatives", *changes)


def _additive(config: QualityConfig) -> ArmTable:
    rows: list[Row] = []
    for base in config.swept:
        added = base_arm(config, crushed(base, config.share, "representatives=additive"))

        def made(rule: Rule, cap: int = added.tokens) -> Arm:
            return replace(base_arm(config, rule), cap=cap)

        rows.append(Row(label=f"{base.text}, cap {added.cap}", arm=base_arm(config, base)))
        rows += _compared(config, base, f"{base.text}, cap {added.tokens}", made)
        label = f"{base.text} + KVCrush, {added.cap} and {added.tokens - added.cap} more"
        rows.append(replace(rows[-1], label=label, arm=added))
    return ArmTable(
        name="additive",
        caption="Representatives on top of the cap, beside rules with a cap so much larger",
        rows=tuple(rows),
    )


def _anchors(config: QualityConfig) -> ArmTable:
    share = f"share={config.share:g}"
    changes = [(anchor, f"{share},anchor={anchor}") for anchor in config.anchors]
    changes += [
        (f"{count} {kind}", f"{share},anchor={kind},anchors={count}")
        for kind in config.several_kinds
        for count in config.several
    ]
    # the default is written as in the base configuration: one cell, not two
    changes = [(label, text.removesuffix(f",anchor={MEAN}")) for label, text in changes]
    return _sweep(config, "anchors", "Anchor, and several of them", *changes)


def _granularity(config: QualityConfig) -> ArmTable:
    rows: list[Row] = []
    chunk = f"granularity=chunk,chunk_tokens={config.chunk_tokens}"
    for label, pieces in (
        ("token", ""),
        (f"chunk {config.chunk_tokens}", chunk),
        (f"page {config.page_tokens}", PAGES),
    ):

        def made(rule: Rule, pieces: str = pieces) -> Arm:
            return base_arm(config, with_options(rule, pieces))

        for base in config.swept:
            rows += _compared(config, base, f"{base.text}, {label}", made)
    return ArmTable(name="granularity", caption="What stays or goes together", rows=tuple(rows))


def _forms(config: QualityConfig) -> ArmTable:
    share = f"share={config.share:g}"
    rows: list[Row] = []
    for base in config.swept:
        static = base_arm(config, crushed(base, config.share))
        rows.append(Row(label=f"{base.text} + KVCrush", arm=static))
        for label, rule in (
            (DYNAMIC, crushed(base, config.share, "dynamic=true")),
            ("random pick", crushed(base, config.share, "pick=random")),
            (KMEANS, around("kmeans", base, share)),
            ("k-means on keys", around("kmeans", base, share, "on=keys")),
        ):
            arm = base_arm(config, rule)
            rows.append(Row(label=f"{base.text}, {label}", arm=arm, against=static))
    return ArmTable(
        name="forms",
        caption="Other ways to choose representatives; gains are over KVCrush as it is",
        rows=tuple(rows),
    )


DYNAMIC, KMEANS = "dynamic share", "k-means on signatures"


def _schedule(config: QualityConfig) -> ArmTable:
    def made(rule: Rule) -> Arm:
        return replace(base_arm(config, rule), when=config.other_when)

    rows: list[Row] = []
    for base in config.swept[:1]:
        rows += _compared(config, base, base.text, made)
        # only where tokens leave more than once do stored signatures differ
        kept = made(crushed(base, config.share, "signatures=stored"))
        rows.append(replace(rows[-1], label=f"{rows[-1].label}, stored signatures", arm=kept))
    return ArmTable(
        name="schedule",
        caption=f"The same with when={config.other_when}, {config.every} leave at a time",
        rows=tuple(rows),
    )


def _budgets(config: QualityConfig) -> ArmTable:
    rows: list[Row] = []
    for budget in config.other_budgets:

        def made(rule: Rule, budget: float = budget) -> Arm:
            return replace(base_arm(config, rule), cap=config.cap(budget))

        for base in config.swept:
            rows += _compared(config, base, f"{base.text}, {100 * budget:g} %", made)
    return ArmTable(name="budgets", caption="Other budgets", rows=tuple(rows))


TABLES: Mapping[str, Callable[[QualityConfig], ArmTable]] = MappingProxyType(
    {
        "bases": _bases,
        "pages": _pages,
        "paper": _paper,
        "shares": _shares,
        "additive": _additive,
        "anchors": _anchors,
        "granularity": _granularity,
        "forms": _forms,
        "schedule": _schedule,
        "budgets": _budgets,
    }
)
