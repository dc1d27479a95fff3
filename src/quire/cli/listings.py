"""`quire policies` and `quire codecs`: list the eviction policies, budgets and KV codecs."""

import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

import typer

from quire.cli.common import AsJson
from quire.layout.eviction import MOST_DEFAULT_EVERY

if TYPE_CHECKING:
    from quire.policies.base import EvictionPolicy
    from quire.policies.budgets.base import Budget

SHOWN_HEAD_DIM, SHOWN_PAGE_TOKENS = 128, 32  # head size and page size of the shown vector sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRow:
    """One eviction policy, with its default options.

    Attributes:
        name: as in `--evict name:option=value`.
        options: options of the policy, name to default.
        summary: which tokens are retained.
        statistics: attention statistics that the policy records.
        scope: `lane`: one retained set per KV head; `layer`: one per layer.
        cost: computation in addition to attention.
        source: origin of the policy, such as a paper.
    """

    name: str
    options: dict[str, object]
    summary: str
    statistics: tuple[str, ...]
    scope: str
    cost: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRow:
    """One budget, with its default options.

    Attributes:
        name: as in `budget=(name:option=value)`.
        options: name to default.
        summary: which lanes get a larger cap.
        statistics: statistics that it records in addition to those of the policy.
        needs: when caps are computed from statistics: `never`, `once` after prefill, or `always`,
            at each eviction.
        keeps_total: whether the caps add up to lanes * cap.
        source: origin of the budget, such as a paper.
    """

    name: str
    options: dict[str, object]
    summary: str
    statistics: tuple[str, ...]
    needs: str
    keeps_total: bool
    source: str


def policies(*, as_json: AsJson = False) -> None:
    """List the eviction policies and budgets: options, defaults, recorded statistics, sources."""
    rules, budgets = policy_rows(), budget_rows()
    if as_json:
        found = {"policies": [asdict(row) for row in rules], "budgets": [*map(asdict, budgets)]}
        typer.echo(json.dumps({"name": "policies", **found}))
        return
    for row in rules:
        _print_block(row, {"scope": row.scope, "cost": row.cost})
    typer.echo("Budgets divide a cap over layers and heads, as in budget=(pyramid:beta=20):\n")
    for budget in budgets:
        total = "lanes * cap" if budget.keeps_total else "not bounded: a lane may retain all tokens"
        _print_block(budget, {"needs statistics": budget.needs, "total": total})
    typer.echo(
        f"Every policy except full also takes cap=TOKENS (required; or a share such as 25%, or a "
        f"size such as 2MiB), every= (default: cap / 8, at most {MOST_DEFAULT_EVERY}), when=, "
        "budget= and granularity=. Example:\n--evict 'recent:cap=512,sinks=4'"
    )


def _print_block(row: PolicyRow | BudgetRow, more: dict[str, str]) -> None:
    listed = ", ".join(f"{name}={default}" for name, default in row.options.items())
    facts = {"options": listed, "statistics": ", ".join(row.statistics), **more}
    facts["source"] = row.source
    typer.echo(f"{row.name}\n{_indented(row.summary)}")
    for name, value in facts.items():
        if value:
            typer.echo(_indented(f"{name}: {value}"))
    typer.echo("")


def _indented(text: str) -> str:
    return textwrap.fill(text, 96, initial_indent="  ", subsequent_indent="    ")


def codecs(*, as_json: AsJson = False) -> None:
    """List the KV codecs and their size in bytes."""
    rows = codec_rows()
    if as_json:
        typer.echo(json.dumps({"name": "codecs", "codecs": rows}))
        return
    shown = [tuple(f"{v:g}" if isinstance(v, float) else str(v) for v in r.values()) for r in rows]
    header = ("codec", "bits", "effective bits", f"bytes per {SHOWN_HEAD_DIM} elements", "options")
    _print_table((*header, "format"), shown)
    typer.echo(
        "--kv-codec none (default) stores KV in the model's dtype; --kv-codec int8/int4 uses int8 "
        "for keys\nand int4 for values"
    )


def policy_rows() -> list[PolicyRow]:
    """`full` and all registered policies."""
    from quire.policies.base import LANE
    from quire.policies.registry import FULL, registered  # imports torch

    full = PolicyRow(
        name=FULL,
        options={},
        summary="Retain all tokens.",
        statistics=(),
        scope=LANE,
        cost="none",
        source="no eviction",
    )
    return [full, *(_policy_row(name, policy()) for name, policy in registered().items())]


def _policy_row(name: str, policy: "EvictionPolicy") -> PolicyRow:
    return PolicyRow(
        name=name,
        options=_defaults(policy),
        summary=_first_paragraph(type(policy).__doc__),
        statistics=tuple(statistic.name for statistic in policy.statistics),
        scope=policy.scope,
        cost=policy.cost,
        source=_source(policy),
    )


def budget_rows() -> list[BudgetRow]:
    """All registered budgets."""
    from quire.policies.registry import registered_budgets

    return [_budget_row(name, budget) for name, budget in registered_budgets().items()]


def _budget_row(name: str, budget: "type[Budget]") -> BudgetRow:
    needs = "always" if budget.ragged else "once" if budget.needs_prompt else "never"
    return BudgetRow(
        name=name,
        options=_defaults(budget),
        summary=_first_paragraph(budget.__doc__),
        statistics=() if needs == "never" else tuple(s.name for s in budget().statistics),
        needs=needs,
        keeps_total=budget.keeps_total,
        source=_source(budget),
    )


def _defaults(made: object) -> dict[str, object]:
    """Options and their defaults; a default that is a policy as its name."""
    from quire.policies.registry import registered

    names: dict[type, str] = {policy: name for name, policy in registered().items()}
    defaults = {field.name: field.default for field in fields(made)}  # type: ignore[arg-type]
    return {
        option: f"({names[type(default)]})" if type(default) in names else default
        for option, default in defaults.items()
    }


def _source(made: object) -> str:
    """The first paragraph of the docstring of the module that defines a policy or budget."""
    return _first_paragraph(sys.modules[made.__module__].__doc__)


def _first_paragraph(docstring: str | None) -> str:
    return " ".join((docstring or "").strip().split("\n\n", maxsplit=1)[0].split())


def codec_rows() -> list[dict[str, object]]:
    """All codecs with their sizes, including scales and other data stored with the codes."""
    from quire.layout.codec_names import CODECS

    return [
        {
            "name": codec.name,
            "code_bits": codec.code_bits,
            "effective_bits": codec.effective_bits(SHOWN_HEAD_DIM, SHOWN_PAGE_TOKENS),
            "vector_bytes": codec.vector_bytes(SHOWN_HEAD_DIM, SHOWN_PAGE_TOKENS),
            "options": ", ".join(codec.options),
            "summary": codec.summary,
        }
        for codec in CODECS.values()
    ]


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
