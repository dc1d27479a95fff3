"""The input file of `quire batch`: what is known of it before a line runs."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import typer

from quire.cli.batch_names import Names, RepeatedName
from quire.cli.batch_output import state_path
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Survey:
    """Summary of the input file, from one pass over it.

    Attributes:
        sha256: hash of the whole file.
        lines: number of lines.
        requests: number of lines that are not blank.
        repeated: the first duplicate name; None if all names are unique.
        num_repeated: number of lines with the name of an earlier line.
        models: names of models in lines, to the number of the first such line.
    """

    sha256: str
    lines: int
    requests: int
    repeated: RepeatedName | None
    num_repeated: int
    models: Mapping[str, int]


def refuse_one_file_for_two(source: Path, target: Path, kv_events: Path | None) -> None:
    """Refuse output files that are equal to each other or to the input, before writing."""
    if target.is_dir():
        raise ConfigError(
            f"expected a file for the records, got folder {target}: name a file in it, such as "
            f"{target / 'records.jsonl'}"
        )
    if _is_same(target, source):
        raise ConfigError(f"{target} is the input; give another file for the records")
    uses = {source: "the input", target: "for the records", state_path(target): "their state"}
    for path, use in uses.items():
        if kv_events is not None and _is_same(kv_events, path):
            raise ConfigError(f"{kv_events} is {use}; give another file to --kv-events")


def _is_same(one: Path, other: Path) -> bool:
    """Whether two paths name the same file, existing or not; follows links."""
    try:
        if one.exists() and other.exists():
            return one.samefile(other)
        return one.resolve() == other.resolve()
    except OSError:  # opening the file reports the error
        return False


def survey_of(source: Path) -> Survey:
    """Read the input file once.

    Raises:
        ConfigError: the file is missing or cannot be read.
    """
    digest, lines, requests, names = hashlib.sha256(), 0, 0, Names()
    try:
        if not source.is_file():
            wrong = "not a regular file" if source.exists() else "no such file"
            raise ConfigError(f"expected a file of requests, got {source}: {wrong}")
        with source.open("rb") as file:
            for line in file:
                digest.update(line)
                lines += 1
                requests += bool(line.strip())
                names.add(line, lines)
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror}") from error
    return Survey(
        digest.hexdigest(), lines, requests, names.first, names.num_repeated, names.models
    )


def warn_of_repeated(survey: Survey) -> None:
    """Warn on standard error of names that more than one line has."""
    found = survey.repeated
    if found is None:
        return
    more = survey.num_repeated - 1
    others = f"; {more:,} more lines have a duplicate" if more else ""
    typer.echo(
        f"warning: line {found.line} has the same {found.key} {found.name!r} as line "
        f"{found.earlier}{others}. All lines run; use `line` to distinguish their records",
        err=True,
    )


def warn_of_other_models(survey: Survey, model: str) -> None:
    """Warn on standard error of lines that name another model: the loaded model runs them too.

    Args:
        survey: summary of the input file.
        model: the model of the command: a name or a folder.
    """
    others = {name: line for name, line in survey.models.items() if not _is_model(name, model)}
    if others:
        name, line = next(iter(others.items()))
        more = f"; {len(others) - 1:,} more names in other lines" if len(others) > 1 else ""
        typer.echo(
            f"warning: line {line} names model {name!r}, but {model} runs all lines{more}",
            err=True,
        )


def _is_model(name: str, model: str) -> bool:
    return name == model or Path(name).name == Path(model).name
