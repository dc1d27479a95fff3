"""`quire policies` and `quire codecs`: what can be named in `--evict` and how KV can be stored."""

import json
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import TYPE_CHECKING, Any

import typer

from quire.cli.common import AsJson
from quire.spec.eviction import DEFAULT_EVERY_TOKENS

if TYPE_CHECKING:
    from quire.policies.base import EvictionPolicy

_SHOWN_HEAD_DIM = 128  # of the vector whose bytes are shown


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRow:
    """One eviction policy.

    Attributes:
        name: as in `--evict name:option=value`.
        options: of the rule, name to default; None where one must be given.
        summary: what stays.
        source: where the rule comes from.
    """

    name: str
    options: dict[str, object]
    summary: str
    source: str

    def as_dict(self) -> dict[str, object]:
        """JSON values."""
        return {
            "name": self.name,
            "options": self.options,
            "summary": self.summary,
            "source": self.source,
        }


def policies(*, as_json: AsJson = False) -> None:
    """List the eviction policies, their options and defaults."""
    rows = policy_rows()
    if as_json:
        typer.echo(json.dumps({"name": "policies", "policies": [row.as_dict() for row in rows]}))
        return
    schedule = f"cap=TOKENS (must be given), every={DEFAULT_EVERY_TOKENS}"
    shown = [(row.name, _listed(row.options), row.summary, row.source) for row in rows]
    _print_table(("policy", "options", "what stays", "source"), shown)
    typer.echo(f"Every policy but full also takes {schedule}: --evict 'recent:cap=512,sinks=4'")


def codecs(*, as_json: AsJson = False) -> None:
    """List the formats KV can be stored in, and their bytes."""
    rows = codec_rows()
    if as_json:
        typer.echo(json.dumps({"name": "codecs", "codecs": rows}))
        return
    shown = [tuple(str(value) for value in row.values()) for row in rows]
    _print_table(("codec", "bits", "bytes beside", f"bytes of {_SHOWN_HEAD_DIM} numbers"), shown)
    typer.echo(
        "--kv-codec none, the default, stores KV in the model's own format; quantized codecs count "
        "in `quire plan` only"
    )


def policy_rows() -> list[PolicyRow]:
    """`full` and all registered policies."""
    from quire.policies.registry import FULL, registered  # brings torch

    full = PolicyRow(name=FULL, options={}, summary="Keep every token.", source="no eviction")
    return [full, *(_policy_row(name, policy) for name, policy in registered().items())]


def _policy_row(name: str, policy: "type[EvictionPolicy]") -> PolicyRow:
    import sys

    module = sys.modules[policy.__module__].__doc__ or ""
    return PolicyRow(
        name=name,
        options={f.name: _default(f) for f in fields(policy)},  # type: ignore[arg-type]
        summary=_first_paragraph(policy.__doc__ or ""),
        source=_first_paragraph(module),
    )


def _default(field: "Field[Any]") -> object:
    if field.default is not MISSING:
        default = field.default
        return default if isinstance(default, int | float | str | bool) else str(default)
    return None if field.default_factory is MISSING else str(field.default_factory())


def _first_paragraph(docstring: str) -> str:
    return " ".join(docstring.strip().split("\n\n", maxsplit=1)[0].split())


def _listed(options: dict[str, object]) -> str:
    return ", ".join(f"{name}={'...' if v is None else v}" for name, v in options.items())


def codec_rows() -> list[dict[str, object]]:
    """All codecs with their byte arithmetic."""
    from quire.spec.pages import CODECS

    return [
        {
            "name": codec.name,
            "code_bits": codec.code_bits,
            "metadata_bytes": codec.metadata_bytes,
            "vector_bytes": codec.block_bytes(1, _SHOWN_HEAD_DIM),
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
