"""`python -m benchmarks.claims`: compare the figures of the documents with their measurements.

The registry is docs/claims.toml. The exit code is 1 if a figure disagrees, 2 if the registry is
wrong. With --json the last line of output is one JSON object with all comparisons.
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

from benchmarks.claims.checks import Row, check_quick, check_stored
from benchmarks.claims.registry import read_registry
from benchmarks.common.measured_page import last_line, store
from quire.cli.tables import show_table
from quire.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = ("claim", "document", "stated", "measured", "agrees", "source")


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Run the comparisons; the exit code of the command."""
    chosen = _parse(arguments)
    if chosen.store:
        name, output = chosen.store
        store(last_line(Path(output)), root / "docs" / "results" / f"{name}.json")
        return 0
    try:
        registry = read_registry(root / "docs" / "claims.toml")
        claims = [one for one in registry.claims if one.name.startswith(tuple(chosen.only or [""]))]
        if not claims:
            known = ", ".join(registry.claim)
            raise ConfigError(f"expected the name of a claim, got {chosen.only}; known: {known}")
    except ConfigError as error:
        print(f"docs/claims.toml: {error}", file=sys.stderr)
        return 2
    started_s = perf_counter()
    rows = list(check_stored(claims, root))
    for name, form in () if chosen.stored else registry.quick.items():
        its_claims = [claim for claim in claims if claim.quick == name]
        if its_claims:
            print(f"{name}: {' '.join(form.command)}", file=sys.stderr)
            rows += check_quick(form, its_claims, root)
    report(rows, perf_counter() - started_s, as_json=chosen.json)
    return int(not all(row.agrees for row in rows))


def report(rows: Sequence[Row], duration_s: float, *, as_json: bool) -> None:
    """Print all comparisons, then those that disagree, or one JSON object."""
    wrong = [row for row in rows if not row.agrees]
    if as_json:
        found = {"name": "claims", "compared": len(rows), "disagree": len(wrong)}
        print(json.dumps(found | {"seconds": duration_s, "rows": [asdict(row) for row in rows]}))
        return
    show_table("Claims of the documents", COLUMNS, [_cells(row) for row in rows])
    for row in wrong:
        print(row.text, file=sys.stderr)
    print(f"{len(rows)} comparisons, {len(wrong)} disagree, {duration_s:.0f} s")


def _cells(row: Row) -> tuple[str, ...]:
    value = "" if row.measured is None else f"{row.measured:,.6g}"
    return (row.claim, row.document, row.stated, value, "yes" if row.agrees else "NO", row.source)


def _parse(arguments: Sequence[str]) -> Namespace:
    parser = ArgumentParser(prog="python -m benchmarks.claims")
    parser.add_argument(
        "--only", action="append", default=[], help="claims whose name begins with this text"
    )
    parser.add_argument("--stored", action="store_true", help="run no quick form")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--store", nargs=2, metavar=("NAME", "OUTPUT"), help="store the last line of OUTPUT"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
