"""Arms of each table: a base configuration with one change at a time.

Every arm is listed with the two arms that it is compared with: the base rule, and the base rule
with one retained set for the heads of a layer. No table is a product of more than two lists.

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
    of_heads,
    one_set,
    paper_rows,
    with_options,
)
from benchmarks.kvcrush.config import HEADS, QualityConfig
from quire.policies.signatures.anchors import ALTERNATING, MEAN, RANDOM


def tables(config: QualityConfig) -> tuple[ArmTable, ...]:
    """The configured tables; tables without rows are omitted."""
    made = (TABLES[name](config) for name in config.tables)
    return tuple(table for table in made if table.rows)


def keys(config: QualityConfig, model: str, commit: str | None) -> list[CellKey]:
    """Keys of all cells, each once, task by task, full KV first.

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
    yield Row(label=f"{label}, one set per layer", arm=shared, against=alone)
    yield Row(label=f"{label} + KVCrush", arm=crushing, against=alone, one_set=shared)


def _compared(
    config: QualityConfig, base: Rule, label: str, variant: Callable[[Rule], Arm]
) -> Iterator[Row]:
    rules = (base, one_set(base), crushed(base, config.share))
    return _three(label, *map(variant, rules))


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
        caption=f"Rules with and without KVCrush, share {config.share:g}, at equal caps",
        rows=tuple(row for compared in by_token(config) for row in _rows(compared)),
    )


def _pages(config: QualityConfig) -> ArmTable:
    return ArmTable(
        name="pages",
        caption=(
            f"The same by pages of {config.page_tokens}; OpenVINO's form retains {config.blocks} "
            "pages in addition to its cap, which is lowered by as many"
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
    """Table of KVCrush with other options, compared with the base rules.

    Args:
        config: configuration of the tables.
        name: name of the table.
        caption: caption of the table.
        changes: labels, and options after `kvcrush:base=(...)`.
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
    return _sweep(config, "shares", "Fraction of the budget for representatives", *changes)


def _additive(config: QualityConfig) -> ArmTable:
    rows: list[Row] = []
    for base in config.swept:
        added = base_arm(config, crushed(base, config.share, "representatives=additive"))

        def variant(rule: Rule, cap: int = added.tokens) -> Arm:
            return replace(base_arm(config, rule), cap=cap)

        rows.append(Row(label=f"{base.text}, cap {added.cap}", arm=base_arm(config, base)))
        rows += _compared(config, base, f"{base.text}, cap {added.tokens}", variant)
        label = f"{base.text} + KVCrush, {added.cap} and {added.tokens - added.cap} more"
        rows.append(replace(rows[-1], label=label, arm=added))
    return ArmTable(
        name="additive",
        caption="Representatives in addition to the cap, and base rules with a cap of equal size",
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
    # the default anchor is omitted as in the base configuration, so that its cell runs once
    changes = [(label, text.removesuffix(f",anchor={MEAN}")) for label, text in changes]
    return _sweep(config, "anchors", "Anchors, one or several", *changes)


def _granularity(config: QualityConfig) -> ArmTable:
    rows: list[Row] = []
    chunk = f"granularity=chunk,chunk_tokens={config.chunk_tokens}"
    for label, options in (
        ("token", ""),
        (f"chunk {config.chunk_tokens}", chunk),
        (f"page {config.page_tokens}", PAGES),
    ):

        def variant(rule: Rule, options: str = options) -> Arm:
            return base_arm(config, with_options(rule, options))

        for base in config.swept:
            rows += _compared(config, base, f"{base.text}, {label}", variant)
    return ArmTable(name="granularity", caption="Eviction granularity", rows=tuple(rows))


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
        caption="Other selections of representatives; gains are over default KVCrush",
        rows=tuple(rows),
    )


DYNAMIC, KMEANS = "dynamic share", "k-means on signatures"


def _schedule(config: QualityConfig) -> ArmTable:
    def variant(rule: Rule) -> Arm:
        return replace(base_arm(config, rule), when=config.other_when)

    rows: list[Row] = []
    for base in config.swept[:1]:
        rows += _compared(config, base, base.text, variant)
        # stored signatures make a difference only for schedules with repeated evictions
        stored = variant(crushed(base, config.share, "signatures=stored"))
        rows.append(replace(rows[-1], label=f"{rows[-1].label}, stored signatures", arm=stored))
    return ArmTable(
        name="schedule",
        caption=f"The same with when={config.other_when}, {config.every} tokens evicted at once",
        rows=tuple(rows),
    )


def _budgets(config: QualityConfig) -> ArmTable:
    rows: list[Row] = []
    for budget in config.other_budgets:

        def variant(rule: Rule, budget: float = budget) -> Arm:
            return replace(base_arm(config, rule), cap=config.cap(budget))

        for base in config.swept:
            rows += _compared(config, base, f"{base.text}, {100 * budget:g} %", variant)
    return ArmTable(name="budgets", caption="Other budgets", rows=tuple(rows))


def _heads(config: QualityConfig) -> ArmTable:
    rows: list[Row] = []
    for one in of_heads(config):
        label = f"{one.alone.rule.text}, {one.percent:g} %"
        rows.append(Row(label=label, arm=one.alone))
        rows += [
            Row(label=f"{label} + KVCrush, {form}", arm=arm, against=one.alone)
            for form, arm in one.forms.items()
        ]
    return ArmTable(
        name=HEADS,
        caption=f"One retained set per KV head, share {config.share:g}, at equal caps",
        rows=tuple(rows),
    )


TABLES: Mapping[str, Callable[[QualityConfig], ArmTable]] = MappingProxyType(
    {
        "bases": _bases,
        "pages": _pages,
        HEADS: _heads,
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
