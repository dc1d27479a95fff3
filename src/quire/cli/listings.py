"""`quire policies`: lists the eviction policies and budgets."""

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.common import json_option
from quire.cli.completion import complete_codec, complete_policy
from quire.cli.options import documented_attributes
from quire.cli.report import print_json
from quire.cli.settings import with_flags
from quire.cli.startup import fast_imports, status
from quire.config.kv_config import policy_file_option
from quire.errors import UnknownName
from quire.layout.codec_names import CODECS, PAIRS
from quire.layout.eviction import MAX_DEFAULT_EVERY
from quire.layout.packaged import PACKAGED_MODEL

if TYPE_CHECKING:
    from quire.policies.base import EvictionPolicy
    from quire.policies.budgets.base import Budget

_FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRow:
    """One eviction policy, with its default options."""

    name: str  # as in `--evict name:option=value`
    options: dict[str, object]  # name to default
    summary: str
    statistics: tuple[str, ...]
    scope: str  # `lane`: one retained set per KV head; `layer`: one per layer
    cost: str  # computation in addition to attention
    source: str  # such as a paper


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRow:
    """One budget, with its default options."""

    name: str  # as in `budget=(name:option=value)`
    options: dict[str, object]  # name to default
    summary: str  # which lanes get a larger cap
    statistics: tuple[str, ...]  # in addition to those of the policy
    needs: str  # caps are computed `never`, `once` after prefill, or `always`, at each eviction
    keeps_total: bool  # whether the caps add up to lanes * cap
    source: str  # such as a paper


PolicyName = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME",
        help="A policy or a budget to show in full. Default: one line for each.",
        show_default=False,
        autocompletion=complete_policy,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoliciesFlags:
    """Options of `quire policies`."""

    policy_file: str = policy_file_option()
    as_json: bool = json_option()


@with_flags
def policies(name: PolicyName = None, *, flags: PoliciesFlags) -> None:
    """List the eviction policies and budgets; with NAME show options, defaults and source."""
    with status("starting"), fast_imports():
        rules, budgets = policy_rows(), budget_rows()
    if name is not None:
        rules = [row for row in rules if row.name == name]
        budgets = [row for row in budgets if row.name == name]
        if not rules and not budgets:
            from quire.policies.registry import RULE_BY_FILE  # imports torch

            known = _names(policy_rows(), budget_rows())
            raise UnknownName("policy or budget", name, known, more=RULE_BY_FILE)
    path = flags.policy_file.removeprefix(f"{Path.cwd()}{os.sep}")
    file = f" --policy-file {shlex.quote(path)}" if path else ""
    if flags.as_json:
        found = {"policies": [asdict(row) for row in rules], "budgets": [*map(asdict, budgets)]}
        print_json({"name": "policies", **found})
    elif name is None:
        _list_policies(rules, budgets, file)
    else:
        rows: list[PolicyRow | BudgetRow] = [*rules, *budgets]
        for row in rows:
            _show_policy(row, file)


def _names(*listed: "Sequence[PolicyRow | BudgetRow]") -> Iterator[str]:
    for rows in listed:
        yield from (row.name for row in rows)


def _list_policies(rules: Sequence[PolicyRow], budgets: Sequence[BudgetRow], file: str) -> None:
    from quire.cli.tables import show_summaries, show_text

    show_summaries("Eviction policies, as in --evict NAME:cap=512", _summaries(rules))
    show_summaries(
        "\nBudgets divide a cap over layers and heads, as in --evict 'h2o:cap=512,budget=(NAME)'",
        _summaries(budgets),
    )
    show_text(f"\nquire policies NAME{file} shows options, defaults, source and an example.")


def _summaries(rows: "Sequence[PolicyRow | BudgetRow]") -> Iterator[tuple[str, str]]:
    yield from ((row.name, row.summary) for row in rows)


def _show_policy(row: PolicyRow | BudgetRow, file: str) -> None:
    from quire.cli.tables import show_entry
    from quire.policies.registry import registered_budgets

    facts = _option_facts(row)
    if isinstance(row, BudgetRow):
        facts["total"] = (
            "lanes * cap" if row.keeps_total else "not bounded: a lane may retain all tokens"
        )
        facts["needs statistics"] = row.needs
        given = registered_budgets()[row.name].example
        rule = f"h2o:cap=512,budget={f'({row.name}:{given})' if given else row.name}"
    else:
        facts["scope"], facts["cost"] = row.scope, row.cost
        rule = row.name if row.name == _FULL else f"{row.name}:cap=512"
    facts["statistics"] = ", ".join(row.statistics)
    facts["source"] = row.source
    facts["example"] = f"quire generate {PACKAGED_MODEL} PROMPT --evict {shlex.quote(rule)}{file}"
    show_entry(row.name, row.summary, facts)


def _option_facts(row: PolicyRow | BudgetRow) -> dict[str, str]:
    """Default and help text of each option; the options of the schedule of a policy last."""
    from quire.policies.registry import registered, registered_budgets

    known: Mapping[str, type] = registered() if isinstance(row, PolicyRow) else registered_budgets()
    made = known.get(row.name)
    helps = documented_attributes((made.__doc__ if made is not None else None) or "")
    facts = {
        f"{option}={default}": helps.get(option, "") or "option"
        for option, default in row.options.items()
    }
    if isinstance(row, PolicyRow) and row.name != _FULL:
        facts["cap="] = (
            "required: tokens that a lane retains, a fraction of the prompt such as 25%, or a "
            "size such as 2MiB"
        )
        facts["every="] = f"tokens evicted at once; default: cap / 8, at most {MAX_DEFAULT_EVERY}"
        facts["when=, budget=, granularity="] = (
            "when to evict (prefill_and_decode, prefill_end, decode, pressure), a budget of "
            "quire policies, and what is evicted together (token, chunk, page)"
        )
    return facts


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


_MODIFIERS = (
    ("+sinks=N", "The first N tokens stay in full precision."),
    ("+residual=N", "The newest N tokens stay in full precision."),
    ("+plain_layers=N", "The first N and the last N layers stay in full precision."),
    (
        "+promoted=N:CODEC",
        "N tokens with the highest scores of a rule are stored in CODEC as well.",
    ),
    ("+states=CODEC", "Recurrent states are stored in float32 (default), bfloat16 or int8."),
)
SHOWN_HEAD_DIM, SHOWN_PAGE_TOKENS = 128, 32  # head size and page size of the shown vector sizes

CodecName = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME",
        help="A codec to show in full. Default: one line for each.",
        show_default=False,
        autocompletion=complete_codec,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecsFlags:
    """Options of `quire codecs`."""

    as_json: bool = json_option()


@with_flags
def codecs(name: CodecName = None, *, flags: CodecsFlags) -> None:
    """List the KV codecs; with NAME show size, options, defaults and an example."""
    rows = codec_rows()
    if name is not None and name in PAIRS and not flags.as_json:
        from quire.cli.tables import show_entry

        show_entry(name, "A codec for keys and another one for values.", _pair_facts(name))
        return
    if name is not None:
        keys_and_values = [part.partition(":")[0] for part in PAIRS.get(name, (name,))]
        rows = [row for row in rows if row["name"] in keys_and_values]
        if not rows:
            raise UnknownName("codec", name, [*CODECS, *PAIRS])
    if flags.as_json:
        print_json({"name": "codecs", "codecs": rows})
        return
    from quire.cli.tables import show_entry, show_summaries, show_text

    if name is not None:
        show_entry(name, str(rows[0]["summary"]), _codec_facts(name, rows[0]))
        return
    show_summaries(
        "KV codecs, as in --kv-codec NAME, or KEYS/VALUES such as int8/int4 (default: none, the "
        "model's dtype)",
        [
            (str(row["name"]), f"{row['summary']} {row['effective_bits']:g} bits per element.")
            for row in rows
        ],
    )
    show_summaries(
        "\nPairs of codecs", [(pair, f"keys {k}, values {v}.") for pair, (k, v) in PAIRS.items()]
    )
    show_summaries("\nModifiers, as in --kv-codec int8+sinks=4+residual=128", _MODIFIERS)
    show_text("\nquire codecs NAME shows size, options, defaults and an example.")


def _pair_facts(name: str) -> dict[str, str]:
    keys, values = PAIRS[name]
    return {
        "keys": keys,
        "values": values,
        "details": f"quire codecs {keys.partition(':')[0]}, {values.partition(':')[0]}",
        "example": f"quire generate {PACKAGED_MODEL} PROMPT --kv-codec {name}+sinks=4+residual=128",
    }


def _codec_facts(name: str, row: Mapping[str, object]) -> dict[str, str]:
    codec = CODECS[name]
    helps = documented_attributes(type(codec).__doc__ or "")
    facts = {f"{option}={getattr(codec, option):g}": helps[option] for option in codec.options}
    facts["bits of a code"] = f"{codec.code_bits}"
    facts["bits per element"] = f"{row['effective_bits']:g}, scales and other data included"
    facts[f"{SHOWN_HEAD_DIM} elements"] = f"{row['vector_bytes']:g} bytes"
    facts["calibration"] = (
        f"needs quire calibrate MODEL --kv-codec {name}" if codec.constants else ""
    )
    with status("starting"), fast_imports():
        from quire.codecs.registry import registered  # imports torch

    documentation = sys.modules[registered()[codec.rule].__module__].__doc__ or ""
    _, _, source = documentation.partition("\nSource: ")
    facts["source"] = " ".join(source.split())
    facts["example"] = f"quire generate {PACKAGED_MODEL} PROMPT --kv-codec {name}"
    return facts


def codec_rows() -> list[dict[str, object]]:
    """All codecs with their sizes, including scales and other data stored with the codes."""
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
