"""The golden cases by name, and formats that outlive a process.

    stored/NAME/...     committed bytes, written by `python -m tests.golden --write-stored NAME`

For each format there is a golden case `stored_NAME`: how today's code writes the same, and what it
reads from the committed files.
"""

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from golden.shape import Rule, Shape, differences, shape_of
from golden.workshop import Workshop

VALUES = Path(__file__).parent / "values"
Make = Callable[[Workshop], object]


@dataclass(frozen=True)
class Case:
    """One golden file."""

    name: str  # of the file
    make: Make  # the value, from today's code
    rule: Rule  # what of it is kept beside types

    @property
    def path(self) -> Path:
        return VALUES / f"{self.name}.json"

    def read(self) -> Shape:
        if not self.path.exists():
            return {}
        shape: Shape = json.loads(self.path.read_text(encoding="utf-8"))
        return shape

    def found(self, workshop: Workshop) -> Shape:
        return shape_of(self.make(workshop), self.rule)

    def write(self, shape: Shape) -> None:
        self.path.write_text(json.dumps(shape, indent=1) + "\n", encoding="utf-8")

    def explain(self, shape: Shape) -> str:
        lines = differences(self.read(), shape)
        if not lines:
            return ""
        again = f"python -m tests.golden --write {self.name}"
        return "\n".join(
            [
                f"{self.path.name}: {len(lines)} lines differ (- committed, + now)",
                *lines,
                f"If users and programs are to see this: {again}",
            ]
        )


CASES: dict[str, Case] = {}


def case(
    *, exact: tuple[str, ...] = (), loose: tuple[str, ...] = (), maps: tuple[str, ...] = ()
) -> Callable[[Make], Make]:
    """Make a function a case under its own name; see `Rule` for the patterns."""

    def register(make: Make) -> Make:
        CASES[make.__name__] = Case(make.__name__, make, Rule(exact, loose, maps))
        return make

    return register


# ---- formats: files as they were written once, which must still be read --------------------------

STORED_FILES = Path(__file__).parent / "stored"
MAX_BYTES = 20_000

Write = Callable[[Workshop, Path], None]
Describe = Callable[[Path], object]
Read = Callable[[Workshop, Path], object]


@dataclass(frozen=True)
class Format:
    """One format."""

    name: str  # of the folder with its files
    write: Write  # puts files into a folder with today's code
    describe: Describe  # what is in such a folder, read without Quire
    read: Read  # what today's code finds there; may change the files
    rule: Rule  # what of both is kept beside types

    @property
    def folder(self) -> Path:
        return STORED_FILES / self.name

    def make(self, workshop: Workshop) -> object:
        return {
            "written": self.describe(self.written(workshop)),
            "read": self.read(workshop, self.copied(workshop)),
        }

    def written(self, workshop: Workshop) -> Path:
        folder = workshop.folder_for(f"{self.name}_written")
        self.write(workshop, folder)
        return folder

    def copied(self, workshop: Workshop) -> Path:
        folder = workshop.folder_for(f"{self.name}_copied")
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        return folder

    def shape(self, folder: Path) -> Shape:
        return shape_of({"written": self.describe(folder)}, self.rule)

    def rewrite(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            written = self.written(Workshop(Path(folder)))
            shutil.rmtree(self.folder, ignore_errors=True)
            shutil.copytree(written, self.folder)


STORED: dict[str, Format] = {}


def stored(
    describe: Describe, read: Read, *, exact: tuple[str, ...] = (), loose: tuple[str, ...] = ()
) -> Callable[[Write], Write]:
    """Make a function that writes files a format under its own name, with its golden case."""

    def register(write: Write) -> Write:
        name, rule = write.__name__, Rule(exact, loose)
        found = STORED[name] = Format(name, write, describe, read, rule)
        CASES[f"stored_{name}"] = Case(f"stored_{name}", found.make, rule)
        return write

    return register
