"""The command behind `python -m tests.golden`: compares golden files, or writes them again."""

import argparse
import tempfile
from pathlib import Path

from golden import of_commands, of_engine, of_formats, of_server  # noqa: F401 - they register
from golden.cases import CASES, STORED
from golden.workshop import Workshop


def main(arguments: list[str]) -> int:
    """Compare or write; return 1 if a file differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument(
        "--write", action="store_true", help="write the shapes of today's outputs, of NAME or all"
    )
    parser.add_argument(
        "--write-stored",
        action="store_true",
        help="write the files of format NAME again: only after an intended change of the format",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", choices=[*CASES, *STORED])
    options = parser.parse_args(arguments)
    if options.write_stored:
        if options.name not in STORED:
            parser.error(f"--write-stored needs one of {', '.join(STORED)}")
        STORED[options.name].rewrite()
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return _compare(Workshop(Path(folder)), options.name, write=options.write)


def _compare(workshop: Workshop, name: str | None, *, write: bool) -> int:
    differ = 0
    for case in CASES.values() if name is None else [CASES[name]]:
        shape = case.found(workshop)
        text = case.explain(shape)
        differ += bool(text)
        if text:
            print(text)
        if write:
            case.write(shape)
    return int(differ > 0 and not write)
