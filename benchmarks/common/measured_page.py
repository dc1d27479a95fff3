"""Pages of measured results: from runs of a bench to Markdown and pictures, and again from JSON.

Of several runs, later ones replace the parts they hold. What is kept, without its repeats, is
results/NAME.json; the page is made of that and of nothing else.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.charts import svg
from benchmarks.common.result import PartResult
from benchmarks.common.tables import markdown

Run = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPage:
    """One page.

    Attributes:
        name: of the kept numbers, results/NAME.json, and of the page, NAME-measured.md.
        heading: its first line.
        script: that writes it, named in the page.
        about: says under the heading what was run.
        titles: part to its heading, in the order of reading.
        targets: claim to what is wanted of it, "" for nothing; others are not listed.
    """

    name: str
    heading: str
    script: str
    about: Callable[[Run], str]
    titles: Mapping[str, str]
    targets: Mapping[str, str]

    def make(self, runs: Sequence[Run], docs: Path) -> None:
        """Keep the numbers of runs, if any are given, and write the page.

        Args:
            runs: what benches printed last.
            docs: folder of the page.
        """
        kept = docs / "results" / f"{self.name}.json"
        if runs:
            before = [json.loads(kept.read_text(encoding="utf-8"))] if kept.exists() else []
            runs = [*before, *runs]
            kept.write_text(json.dumps(merged(runs), indent=2) + "\n", encoding="utf-8")
        run = json.loads(kept.read_text(encoding="utf-8"))
        parts = {
            name: PartResult.from_json(run["arms"][name])
            for name in self.titles
            if name in run["arms"]
        }
        for part in parts.values():
            for picture in part.pictures:
                (docs / "images" / f"measured-{picture.name}.svg").write_bytes(svg(picture))
        (docs / f"{self.name}-measured.md").write_text(self.document(run, parts), encoding="utf-8")

    def document(self, run: Run, parts: Mapping[str, PartResult]) -> str:
        """The page as Markdown."""
        header = f"<!-- Written by {self.script}. Run it again, do not change this file. -->"
        top = f"{header}\n\n# {self.heading}\n\n{self.about(run)}\n\n"
        return "".join((top, *self._claims(run), *self._parts(run, parts)))

    def _claims(self, run: Run) -> Iterator[str]:
        reached = {name: run["claims"][name] for name in self.targets if name in run["claims"]}
        if reached:
            yield "| claim | reached | wanted |\n| --- | ---: | --- |\n"
        for name, value in reached.items():
            yield f"| `{name}` | {value:.4g} | {self.targets[name]} |\n"

    def _parts(self, run: Run, parts: Mapping[str, PartResult]) -> Iterator[str]:
        for name, part in parts.items():
            made = run["arms"][name].get("made", _made(run))
            threads = _threads(made["threads"])
            yield f"\n## {self.titles[name]}\n\nCommit {made['commit'][:7]}, {threads}."
            yield "".join(_measured_again(made.get("rows", {}))) + "\n\n"
            yield "\n".join(markdown(table) for table in part.tables)
            for picture in part.pictures:
                yield f"\n![{picture.title}](images/measured-{picture.name}.svg)\n"


def merged(runs: Sequence[Run]) -> Run:
    """One run with the parts of all, the last one's where several have it; without repeats."""
    arms: Run = {}
    claims: Run = {}
    for run in runs:
        for name, part in run["arms"].items():
            kept = {key: value for key, value in part.items() if key != "raw"}
            arms[name] = {"made": _made(run)} | kept  # a part that was kept says so itself
            claims |= part["claims"]
    return runs[-1] | {"claims": claims, "arms": arms}


def program(run: Run) -> str:
    """Which Quire, on what: for the words under a heading. Each part says which commit."""
    return (
        f"Quire {run['versions']['quire']}, torch {run['versions']['torch']}, "
        f"{run['hardware']['cpu']}"
    )


def _made(run: Run) -> dict[str, Any]:
    return {"commit": run["commit"], "threads": run["config"]["threads"]}


def _measured_again(rows: Mapping[str, str]) -> Iterator[str]:
    """Names the rows that were measured on another commit than the rest of their part.

    Args:
        rows: label of a row to its commit.
    """
    for label, commit in rows.items():
        yield f" Row `{label}`: commit {commit[:7]}."


def _threads(number: int) -> str:
    return f"{number} thread{'s' * (number != 1)}"


def last_line(path: Path) -> Run:
    """The run that a file with the output of a bench ends with."""
    run: Run = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
    return run
