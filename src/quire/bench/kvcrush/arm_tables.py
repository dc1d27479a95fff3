"""Which arms stand in which table: one base configuration, one thing at a time changed.

Every arm stands beside the one it is compared with; no table is a product of more than two lists.
"""

from collections.abc import Iterator
from dataclasses import replace

from quire.bench.eviction.cells import CellKey
from quire.bench.eviction.rules import Rule
from quire.bench.kvcrush.arms import (
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
    page_arm,
    with_options,
)
from quire.bench.kvcrush.config import PaperConfig, QualityConfig
from quire.policies.signatures.anchors import ALTERNATING, MEAN, RANDOM


def tables(config: QualityConfig) -> tuple[ArmTable, ...]:
    """All of them; those that would have no arm are left out."""
    made = (
        _bases(config),
        _pages(config),
        _paper(config),
        _shares(config),
        _anchors(config),
        _granularity(config),
        _forms(config),
        _schedule(config),
        _budgets(config),
    )
    return tuple(table for table in made if table.rows)


def keys(config: QualityConfig, model: str, commit: str | None) -> list[CellKey]:
    """All cells, each once, task by task, full KV first.

    Raises:
        ConfigError: a budget is too small for a rule.
    """
    arms = [arm for table in tables(config) for row in table.rows for arm in _both(row)]
    unique = dict.fromkeys(arms)
    return [
        key
        for task in config.tasks
        for key in (
            full_key(config, task, model, commit),
            *(key_of(config, arm, task, model, commit) for arm in unique),
        )
    ]


def _both(row: Row) -> Iterator[Arm]:
    if row.against is not None:
        yield row.against
    yield row.arm


def _pair(label: str, without: Arm, crushing: Arm) -> Iterator[Row]:
    yield Row(label=label, arm=without)
    yield Row(label=f"{label} + KVCrush", arm=crushing, against=without)


def _rows(compared: Compared) -> Iterator[Row]:
    alone, label = compared.alone, compared.alone.rule.text.removesuffix(f",{PAGES}")
    label = label.removesuffix(f":{PAGES}")
    yield Row(label=label, arm=alone)
    yield Row(label=f"{label}, one set a layer", arm=compared.one_set, against=alone)
    yield Row(label=f"{label} + KVCrush", arm=compared.crushing, against=alone)
    if compared.openvino is not None:
        yield Row(label=f"{label} + OpenVINO's form", arm=compared.openvino, against=alone)


def _bases(config: QualityConfig) -> ArmTable:
    return ArmTable(
        name="bases",
        caption=(
            f"Rules without KVCrush and with it, share {config.share:g}, at equal caps; KVCrush "
            "has one kept set for the heads of a layer, so the rule with one set stands beside it"
        ),
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


def paper_base(paper: PaperConfig) -> Rule:
    """H2O with the first and the newest tokens protected, a page's tokens in sum."""
    sinks, recent = paper.scaled(paper.initial), paper.scaled(paper.recent)
    return Rule(f"h2o:sinks={sinks},recent={recent}")


def _paper(config: QualityConfig) -> ArmTable:
    paper, base = config.paper, paper_base(config.paper)

    def made(rule: Rule) -> Arm:
        page_tokens = paper.scaled(paper.page_tokens)
        rule = with_options(rule, PAGES)
        return Arm(rule=rule, cap=paper.cap, when=config.when, page_tokens=page_tokens)

    without = made(base)
    rows = [Row(label="H2O", arm=without)]
    for share in (0.75, 0.25):
        for anchor in (RANDOM, MEAN, ALTERNATING):
            label = f"KVCrush {100 * (1 - share):.0f}/{100 * share:.0f}, {anchor}"
            arm = made(crushed(base, share, f"anchor={anchor}"))
            rows.append(Row(label=label, arm=arm, against=without))
    sizes = [paper.scaled(n) for n in (paper.initial, paper.middle, paper.recent)]
    return ArmTable(
        name="paper",
        caption=(
            f"The paper's table I, divided by {paper.divisor}: {sizes[0]} initial, {sizes[1]} "
            f"middle and {sizes[2]} recent tokens in pages of {paper.scaled(paper.page_tokens)}"
        ),
        rows=tuple(rows),
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
        without = base_arm(config, base)
        rows.append(Row(label=base.text, arm=without))
        for label, options in changes:
            arm = base_arm(config, around(CRUSH, base, options))
            rows.append(Row(label=f"{base.text}, {label}", arm=arm, against=without))
    return ArmTable(name=name, caption=caption, rows=tuple(rows))


def _shares(config: QualityConfig) -> ArmTable:
    changes = [(f"share {share:g}", f"share={share:g}") for share in config.shares]
    return _sweep(config, "shares", "Share of representatives", *changes)


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
    chunk = f"granularity=chunk,chunk_tokens={config.chunk_tokens}"
    rows: list[Row] = []
    for base in config.swept:
        crushing = crushed(base, config.share)
        rows += _pair(f"{base.text}, token", base_arm(config, base), base_arm(config, crushing))
        without = base_arm(config, with_options(base, chunk))
        label = f"{base.text}, chunk {config.chunk_tokens}"
        rows += _pair(label, without, base_arm(config, with_options(crushing, chunk)))
        label = f"{base.text}, page {config.page_tokens}"
        rows += _pair(label, page_arm(config, base), page_arm(config, crushing))
    return ArmTable(name="granularity", caption="What stays or goes together", rows=tuple(rows))


def _forms(config: QualityConfig) -> ArmTable:
    share = f"share={config.share:g}"
    rows: list[Row] = []
    for base in config.swept:
        static = base_arm(config, crushed(base, config.share))
        rows.append(Row(label=f"{base.text} + KVCrush", arm=static))
        for label, rule in (
            ("dynamic share", crushed(base, config.share, "dynamic=true")),
            ("random pick", crushed(base, config.share, "pick=random")),
            ("kept signatures", crushed(base, config.share, "signatures=kept")),
            ("k-means on signatures", around("kmeans", base, share)),
            ("k-means on keys", around("kmeans", base, share, "on=keys")),
        ):
            arm = base_arm(config, rule)
            rows.append(Row(label=f"{base.text}, {label}", arm=arm, against=static))
    return ArmTable(name="forms", caption="Other ways to choose representatives", rows=tuple(rows))


def _schedule(config: QualityConfig) -> ArmTable:
    rows: list[Row] = []
    for base in config.swept:
        without = replace(base_arm(config, base), when=config.other_when)
        crushing = replace(without, rule=crushed(base, config.share))
        rows += _pair(base.text, without, crushing)
    return ArmTable(
        name="schedule",
        caption=f"The same with when={config.other_when}, {config.every} leave at a time",
        rows=tuple(rows),
    )


def _budgets(config: QualityConfig) -> ArmTable:
    rows: list[Row] = []
    for budget in config.other_budgets:
        for base in config.swept:
            without = replace(base_arm(config, base), cap=config.cap(budget))
            crushing = replace(without, rule=crushed(base, config.share))
            rows += _pair(f"{base.text}, {100 * budget:g} %", without, crushing)
    return ArmTable(name="budgets", caption="Other budgets", rows=tuple(rows))
