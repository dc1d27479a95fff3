"""The golden cases by name: what each makes, and the file that its shape is compared with."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from golden.shape import Rule, Shape, differences, shape_of
from golden.workshop import Workshop

VALUES = Path(__file__).parent / "values"
Make = Callable[[Workshop], object]


@dataclass(frozen=True)
class Case:
    """One golden file.

    Attributes:
        name: of the file.
        make: the value, from today's code.
        rule: what of it is kept beside types.
    """

    name: str
    make: Make
    rule: Rule

    @property
    def path(self) -> Path:
        """The committed file."""
        return VALUES / f"{self.name}.json"

    def read(self) -> Shape:
        """What is committed; nothing where there is no file yet."""
        if not self.path.exists():
            return {}
        shape: Shape = json.loads(self.path.read_text(encoding="utf-8"))
        return shape

    def found(self, workshop: Workshop) -> Shape:
        """What today's code makes."""
        return shape_of(self.make(workshop), self.rule)

    def write(self, shape: Shape) -> None:
        """Replace the committed file."""
        self.path.write_text(json.dumps(shape, indent=1) + "\n", encoding="utf-8")

    def explain(self, shape: Shape) -> str:
        """How a shape differs from the committed one; empty where it does not."""
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
