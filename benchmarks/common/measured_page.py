"""Pages of measured results: render benchmark runs as Markdown and pictures.

A part of a later run replaces the same part of an earlier run. The stored results, without single
repeats, are in results/NAME.json; the page is rendered from that file only.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment

from benchmarks.common.rendering import svg
from benchmarks.common.result import PartResult
from quire.cli.report import write_files

Run = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPage:
    """Contents of a page.

    Attributes:
        heading: first line of the page.
        parts: headings by part name, in page order.
        targets: target value by claim, "" for no target; other claims are not listed.
        prefixes: prefix of the part names by run name, for pages shared by several benchmarks.
        labels: texts of claims; a claim without one is shown by its name.
    """

    heading: str
    parts: Mapping[str, str]
    targets: Mapping[str, str]
    prefixes: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    def named(self, run: Run) -> Run:
        """Rename a run's parts to their names on the page."""
        if run.get("name") not in self.prefixes:
            return run
        prefix = self.prefixes[run["name"]]
        return run | {"arms": {f"{prefix}-{name}": part for name, part in run["arms"].items()}}

    def values(self, run: Run) -> dict[str, Any]:
        """Values that a template renders from a stored run."""
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
        name: names results/NAME.json, the template NAME.md.j2 and the page NAME-measured.md.
        page: contents of the page.
        runs: JSON objects printed by benchmarks.
        docs: folder of the page.
        templates: environment with NAME.md.j2.
    """
    stored = docs / "results" / f"{name}.json"
    if runs:
        before = [json.loads(stored.read_text(encoding="utf-8"))] if stored.exists() else []
        store(merged([*before, *map(page.named, runs)]), stored)
    values = page.values(json.loads(stored.read_text(encoding="utf-8")))
    for part in values["parts"]:
        for picture in part["result"].charts:
            (docs / "images" / f"measured-{picture.name}.svg").write_bytes(svg(picture))
    text = templates.get_template(f"{name}.md.j2").render(name=name, **values)
    (docs / f"{name}-measured.md").write_text(text, encoding="utf-8")


def merged(runs: Sequence[Run]) -> Run:
    """Merge the parts of all runs, without repeats; a later part replaces an earlier one."""
    arms: Run = {}
    claims: Run = {}
    for run in runs:
        for name, part in run["arms"].items():
            kept = {key: value for key, value in part.items() if key != "raw"}
            arms[name] = {"made": _made(run)} | kept  # a stored part keeps its own "made"
            claims |= part["claims"]
    config = {key: _without_folder(value) for key, value in runs[-1]["config"].items()}
    return runs[-1] | {"config": config, "claims": claims, "arms": arms}


def _without_folder(value: Any) -> Any:
    """The last part of an absolute path, which is of one machine; other values as they are."""
    is_place = isinstance(value, str) and Path(value).is_absolute()
    return Path(value).name if is_place else value


def program(run: Run) -> str:
    """Versions and hardware of a run, for the line below a heading; each part states its commit."""
    return (
        f"Quire {run['versions']['quire']}, torch {run['versions']['torch']}, "
        f"{run['hardware']['cpu']}"
    )


def _made(run: Run) -> dict[str, Any]:
    return {"commit": run["commit"], "threads": run["config"]["threads"]}


def store(run: Run, path: Path) -> None:
    """Write a run as JSON, atomically."""
    write_files(path.parent, {path.name: (json.dumps(run, indent=2) + "\n").encode()})


def last_line(path: Path) -> Run:
    """Parse the run in the last line of a file with a benchmark's output."""
    run: Run = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
    return run
