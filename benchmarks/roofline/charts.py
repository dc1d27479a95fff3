"""Charts of the roofline page: shares of components over the floor, and achieved rates."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from benchmarks.roofline.measured import (
    DECODE,
    ENGINE,
    KINDS,
    PARTS,
    SAMPLING,
    Cell,
    StepMeasure,
    part_rows,
)
from quire.sim.plots import drawn_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = dict(
    zip(
        (*PARTS, SAMPLING, ENGINE),
        (
            *("#1f5f99", "#b3261e", "#5b9bd5", "#1a7f5a", "#c9a227"),
            *("#7a5195", "#9aa3ad", "#e07b39", "#444444"),
        ),
        strict=True,
    )
)
_MARKERS = dict(zip(KINDS, ("o", "^"), strict=True))
_DASHES = ("-", "--", ":")


def shares_svg(cells: Iterable[Cell]) -> str:
    """Bars of steps: time over floor, divided into components; a panel per instruction set.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    return _svg(lambda figure: _draw_shares(figure, tuple(cells)))


def rates_svg(cells: Iterable[Cell]) -> str:
    """Roofline plot: achieved rates of components, and the limits; a panel per instruction set.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    return _svg(lambda figure: _draw_rates(figure, tuple(cells)))


def _svg(draw: Any) -> str:
    text = drawn_figure(draw).decode()
    return text[text.index("<svg") :]


def _sections(cells: Sequence[Cell]) -> list[tuple[str, list[Cell]]]:
    return [(key, list(found)) for key, found in groupby(cells, lambda cell: cell.instruction_set)]


def _draw_shares(figure: "Figure", cells: Sequence[Cell]) -> None:
    sections = _sections(cells)
    bars = [[(cell, step) for cell in found for step in cell.steps] for _, found in sections]
    heights = [len(found) + 2 for found in bars]
    figure.set_size_inches(10, 0.22 * sum(heights) + 1)
    panels = figure.subplots(len(sections), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (name, _), found in zip(panels, sections, bars, strict=True):
        left = [0.0] * len(found)
        rows = [{row.cost.name: row for row in part_rows(s, c.rates)} for c, s in found]
        names = [_bar_name(cell, step) for cell, step in found]
        for part, colour in _COLOURS.items():
            # the bar of a step is as long as its time over its floor
            widths = [
                row[part].share * step.over_floor
                for row, (_, step) in zip(rows, found, strict=True)
            ]
            axes.barh(names, widths, left=left, color=colour, label=part, height=0.75)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.axvline(1.0, color="#000000", linewidth=1, linestyle="--")
        axes.invert_yaxis()
        axes.tick_params(labelsize=7)
        axes.set_title(name, fontsize=9, loc="left")
    panels[-1].set_xlabel("time of the step over its floor (dashed: the floor)", fontsize=8)
    panels[0].legend(
        frameon=False, fontsize=7, ncols=5, loc="lower center", bbox_to_anchor=(0.4, 1.02)
    )


def _bar_name(cell: Cell, step: StepMeasure) -> str:
    kv_codec = "" if cell.kv_codec == "none" else f" KV {cell.kv_codec}"
    return (
        f"{cell.model} {cell.implementation} {cell.weight_codec}{kv_codec}, {step.kind} {step.rows}"
    )


def _draw_rates(figure: "Figure", cells: Sequence[Cell]) -> None:
    """Draw the first cell of each instruction set; components without FLOPs are left out."""
    first = [found[0] for _, found in _sections(cells)]
    figure.set_size_inches(10, 3.6)
    panels = figure.subplots(1, len(first), squeeze=False, sharey=True)[0]
    for axes, cell in zip(panels, first, strict=True):
        _draw_roof(axes, cell)
        axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte")
        axes.set_title(cell.instruction_set, fontsize=9, loc="left")
        axes.tick_params(labelsize=7)
    panels[0].set_ylabel("FLOP/s")
    panels[-1].legend(frameon=False, fontsize=6, loc="lower right")


def _draw_roof(axes: Any, cell: Cell) -> None:
    intensities = [1.0]
    decode = [step.rows for step in cell.steps if step.kind == DECODE]
    for step in cell.steps:
        if step.kind == DECODE and step.rows not in (min(decode), max(decode)):
            continue
        rows = [row for row in part_rows(step, cell.rates) if row.cost.flops and row.measured_s]
        for row in rows[:-1]:  # the last row is the total
            intensities.append(row.cost.intensity)
            colour, marker = _COLOURS[row.cost.name], _MARKERS[step.kind]
            axes.scatter(row.cost.intensity, row.flops_per_s, color=colour, marker=marker, s=18)
    for (arithmetic, peak), dashes in zip(cell.rates.flops_per_s.items(), _DASHES, strict=False):
        read = cell.rates.read_bytes_per_s
        ends = sorted([min(intensities) / 2, peak / read, max(*intensities, peak / read) * 2])
        roof = [min(x * read, peak) for x in ends]
        axes.plot(ends, roof, dashes, color="#444444", linewidth=1, label=arithmetic)
    for part in PARTS[:4]:
        axes.scatter([], [], color=_COLOURS[part], label=part, s=18)
    for kind, marker in _MARKERS.items():
        axes.scatter([], [], color="#444444", marker=marker, label=kind, s=18)
