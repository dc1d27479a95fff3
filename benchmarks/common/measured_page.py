"""Pages of measured results: from runs of benchmarks to Markdown and pictures.

Of several runs, later ones replace the parts they hold. What is stored, without its repeats, is
results/NAME.json; the page is made of that and of nothing else.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment

from benchmarks.common.rendering import svg
from benchmarks.common.result import PartResult

Run = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPage:
    """What a page lists.

    Attributes:
        heading: its first line.
        parts: part to its heading, in the order of reading.
        targets: claim to what is wanted of it, "" for nothing; others are not listed.
        prefixes: name of a run to the prefix of its parts' names, where benchmarks share a page.
    """

    heading: str
    parts: Mapping[str, str]
    targets: Mapping[str, str]
    prefixes: Mapping[str, str] = field(default_factory=dict)

    def named(self, run: Run) -> Run:
        """A run whose parts are named as on the page."""
        if run.get("name") not in self.prefixes:
            return run
        prefix = self.prefixes[run["name"]]
        return run | {"arms": {f"{prefix}-{name}": part for name, part in run["arms"].items()}}

    def values(self, run: Run) -> dict[str, Any]:
        """What a template shows of a stored run."""
        claims = run["claims"]
        return {
            "page": self,
            "run": run,
            "program": program(run),
            "reached": {name: claims[name] for name in self.targets if name in claims},
            "parts": list(self._shown_parts(run)),
        }

    def _shown_parts(self, run: Run) -> Iterator[dict[str, Any]]:
        for name in self.parts:
            if name in run["arms"]:
                part = run["arms"][name]
                result = PartResult.from_json(part)
                yield {"name": name, "made": part.get("made", _made(run)), "result": result}


def write_measured_page(
    name: str, page: MeasuredPage, runs: Sequence[Run], docs: Path, templates: Environment
) -> None:
    """Store the numbers of runs, if any are given, and write the page and its pictures.

    Args:
        name: of the numbers, results/NAME.json, of the template and of the page, NAME-measured.md.
        page: what it lists.
        runs: what benchmarks printed last.
        docs: folder of the page.
        templates: with NAME.md.j2.
    """
    stored = docs / "results" / f"{name}.json"
    if runs:
        before = [json.loads(stored.read_text(encoding="utf-8"))] if stored.exists() else []
        store(merged([*before, *map(page.named, runs)]), stored)
    values = page.values(json.loads(stored.read_text(encoding="utf-8")))
    for part in values["parts"]:
        for picture in part["result"].pictures:
            (docs / "images" / f"measured-{picture.name}.svg").write_bytes(svg(picture))
    text = templates.get_template(f"{name}.md.j2").render(name=name, **values)
    (docs / f"{name}-measured.md").write_text(text, encoding="utf-8")


def merged(runs: Sequence[Run]) -> Run:
    """One run with the parts of all, the last one's where several have it; without repeats."""
    arms: Run = {}
    claims: Run = {}
    for run in runs:
        for name, part in run["arms"].items():
            kept = {key: value for key, value in part.items() if key != "raw"}
            arms[name] = {"made": _made(run)} | kept  # a part that was stored says so itself
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


def store(run: Run, path: Path) -> None:
    """Write a run as JSON."""
    path.write_text(json.dumps(run, indent=2) + "\n", encoding="utf-8")


def last_line(path: Path) -> Run:
    """The run that a file with the output of a benchmark ends with."""
    run: Run = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
    return run
