"""Formats that outlive a process: files as they were written once, which must still be read.

    stored/NAME/...     committed bytes, written by `python -m tests.golden --write-stored NAME`

For each there is a golden case `stored_NAME`: how today's code writes the same, and what it reads
from the committed files.
"""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from golden.cases import CASES, Case
from golden.shape import Rule, Shape, shape_of
from golden.workshop import Workshop

FILES = Path(__file__).parent / "stored"
MAX_BYTES = 20_000

Write = Callable[[Workshop, Path], None]
Describe = Callable[[Path], object]
Read = Callable[[Workshop, Path], object]


@dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
        name: of the folder with its files.
        write: puts files into a folder with today's code.
        describe: what is in such a folder, read without Quire.
        read: what today's code finds there; may change the files.
        rule: what of both is kept beside types.
    """

    name: str
    write: Write
    describe: Describe
    read: Read
    rule: Rule

    @property
    def folder(self) -> Path:
        """The committed files."""
        return FILES / self.name

    def make(self, workshop: Workshop) -> object:
        """The value of the golden case."""
        return {
            "written": self.describe(self.written(workshop)),
            "read": self.read(workshop, self.copied(workshop)),
        }

    def written(self, workshop: Workshop) -> Path:
        """A folder that today's code has written."""
        folder = workshop.folder_for(f"{self.name}_written")
        self.write(workshop, folder)
        return folder

    def copied(self, workshop: Workshop) -> Path:
        """A copy of the committed files."""
        folder = workshop.folder_for(f"{self.name}_copied")
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        return folder

    def shape(self, folder: Path) -> Shape:
        """Of the files in a folder."""
        return shape_of({"written": self.describe(folder)}, self.rule)

    def rewrite(self) -> None:
        """Replace the committed files."""
        with tempfile.TemporaryDirectory() as folder:
            workshop = Workshop(Path(folder))
            written = self.written(workshop)
            shutil.rmtree(self.folder, ignore_errors=True)
            shutil.copytree(written, self.folder)


STORED: dict[str, Format] = {}


def stored(
    describe: Describe,
    read: Read,
    *,
    exact: tuple[str, ...] = (),
    loose: tuple[str, ...] = (),
) -> Callable[[Write], Write]:
    """Make a function that writes files a format under its own name, with its golden case."""

    def register(write: Write) -> Write:
        name, rule = write.__name__, Rule(exact, loose)
        found = STORED[name] = Format(name, write, describe, read, rule)
        CASES[f"stored_{name}"] = Case(f"stored_{name}", found.make, rule)
        return write

    return register
