"""The first error record of `quire batch`, and whether a repeated run can help."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import typer

from quire.batch.lines import BatchError, LineFormat, parse_line

MOST_REASON_CHARACTERS = 300
_RETRY = "--retry-failed runs them again, for example with more memory"


@dataclass(frozen=True, slots=True)
class FirstFailure:
    """The error record with the lowest line number.

    Attributes:
        line: number of the input line.
        reason: its error, shortened.
    """

    line: int
    reason: str


def report_failures(
    source: Path, target: Path, failed: Collection[int], requests: int, form: LineFormat | None
) -> None:
    """Print the number of error records, and the first with its reason, on standard error.

    Args:
        source: the input file.
        target: the output file, with all records.
        failed: numbers of the lines with an error record.
        requests: number of lines that are not blank.
        form: format of plain lines; None: a server parsed the lines, and may accept them later.
    """
    first = first_failure(target)
    typer.echo(f"error records: {len(failed)} of {requests} lines, in {target}", err=True)
    typer.echo(f"first error: line {first.line}: {first.reason}", err=True)
    hint = "correct the lines in the input, and use --overwrite or another output file"
    if form is None or _any_request(source, failed, form):
        hint = _RETRY
    typer.echo(hint, err=True)


def first_failure(target: Path) -> FirstFailure:
    """Read the error record with the lowest line number; the file has at least one."""
    with target.open("rb") as lines:
        records = (json.loads(line) for line in lines)
        errors = ((record["line"], record["error"]) for record in records if record["error"])
        number, error = min(errors, key=lambda found: found[0])
    text = error.get("message", error) if isinstance(error, dict) else error
    reason = " ".join(str(text).split())
    if len(reason) > MOST_REASON_CHARACTERS:
        reason = reason[:MOST_REASON_CHARACTERS] + "..."
    return FirstFailure(number, reason)


def _any_request(source: Path, failed: Collection[int], form: LineFormat) -> bool:
    """Whether one of the failed lines is a request, so that other options may help."""
    with source.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number in failed and _is_request(line, number, form):
                return True
    return False


def _is_request(line: bytes, number: int, form: LineFormat) -> bool:
    try:
        parse_line(line, number, form)
    except BatchError:
        return False
    return True
