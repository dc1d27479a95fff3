"""Render results as text and pictures.

Tables become Markdown or CSV; pages come from Jinja2 templates; lines and bars become SVG.
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchmarks.common.result import Cell, Chart, Table
from quire.sim.plots import drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes


SHARED_TEMPLATES = Path(__file__).resolve().parent / "templates"


def shown(cell: Cell) -> str:
    """Format a cell for display."""
    if cell is None:
        return ""
    if isinstance(cell, int):
        return f"{cell:,}"
    if isinstance(cell, str):
        return cell
    return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"


def environment(folder: Path = SHARED_TEMPLATES, *, autoescape: bool = False) -> Environment:
    """Environment with the templates of a folder and the shared ones; undefined names are errors.

    Args:
        folder: searched before the shared templates.
        autoescape: whether values are escaped for HTML.
    """
    templates = Environment(
        loader=FileSystemLoader([folder, SHARED_TEMPLATES]),
        autoescape=autoescape,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    templates.filters["shown"] = shown
    return templates


def report(bench: str, tables: Sequence[Table]) -> str:
    """Render the Markdown page of one run: each table below its caption."""
    return environment().get_template("report.md.j2").render(bench=bench, found=tables)


def as_csv(table: Table) -> str:
    """Format a table as CSV with all digits."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows(table.rows)
    return file.getvalue()


_COLOURS = ("#1f5fa8", "#d1662b", "#1a7f5a", "#8a3ea8", "#444444")


def svg(chart: Chart) -> bytes:
    """Render a chart as an SVG file.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    return drawn(lambda axes: _draw(axes, chart))


def _draw(axes: "Axes", chart: Chart) -> None:
    for i, (label, points) in enumerate(chart.lines.items()):
        xs, ys = [x for x, _ in points], [y for _, y in points]
        colour = _COLOURS[i % len(_COLOURS)]
        if any(isinstance(x, str) for x in xs):
            width = 0.8 / len(chart.lines)
            places = [place + i * width for place in range(len(xs))]
            axes.bar(places, ys, width=width, label=label, color=colour)
            middle = [place + 0.4 - width / 2 for place in range(len(xs))]
            axes.set_xticks(middle, [str(x) for x in xs])
        else:
            axes.plot(xs, ys, label=label, color=colour, marker="o")
    if chart.log_x:
        axes.set_xscale("log", base=2)
    if chart.log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
    if len(chart.lines) > 1:
        axes.legend(frameon=False)
