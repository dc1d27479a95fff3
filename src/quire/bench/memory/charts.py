"""Draws the pictures of the memory bench."""

from typing import TYPE_CHECKING

from quire.bench.memory.result import Chart
from quire.sim.svg import drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#1f5fa8", "#d1662b", "#1a7f5a", "#8a3ea8", "#444444")


def svg(chart: Chart) -> bytes:
    """A chart as an SVG file.

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
