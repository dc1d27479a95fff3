"""Plots of a simulation: memory over time, queue length, time to first token."""

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from quire.layout.extras import require_extra
from quire.sim.engine import SimResult
from quire.sim.records import RequestRecord, SimulatedReading

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GIB = 1 << 30


def pictures(result: SimResult) -> Mapping[str, bytes]:
    """SVG files of a run by name: `use.svg`, `queue.svg`, `ttft.svg`."""
    samples = result.gauges.samples
    return {
        "use.svg": drawn(lambda axes: _draw_use(axes, samples, result.memory_bytes)),
        "queue.svg": drawn(lambda axes: _draw_queue(axes, samples)),
    } | ttft_picture(result.records)


def ttft_picture(records: Iterable[RequestRecord]) -> dict[str, bytes]:
    """The SVG file `ttft.svg` of some requests."""
    ttft_s = [record.ttft_s for record in records if record.finished]
    return {"ttft.svg": drawn(lambda axes: _draw_ttft(axes, ttft_s))}


def _draw_use(axes: "Axes", samples: Sequence[SimulatedReading], total_bytes: int) -> None:
    minutes = [reading.time_s / 60 for reading in samples]
    used = [reading.used_bytes / _GIB for reading in samples]
    named = [reading.allocated_bytes / _GIB for reading in samples]
    axes.step(minutes, used, where="post", label="used", color="#1f5fa8", linewidth=1)
    axes.step(minutes, named, where="post", label="running", color="#d1662b", linewidth=1)
    if max(used, default=0) > total_bytes / _GIB / 4:
        axes.axhline(total_bytes / _GIB, color="#444444", linewidth=1, linestyle=":", label="all")
    axes.set(xlabel="minutes", ylabel="KV memory, GiB")
    axes.legend(frameon=False)


def _draw_queue(axes: "Axes", samples: Sequence[SimulatedReading]) -> None:
    minutes = [reading.time_s / 60 for reading in samples]
    for name, colour in (("running", "#1f5fa8"), ("waiting", "#d1662b")):
        values = [getattr(reading, name) for reading in samples]
        axes.step(minutes, values, where="post", label=name, color=colour, linewidth=1)
    axes.set(xlabel="minutes", ylabel="requests")
    axes.legend(frameon=False)


def _draw_ttft(axes: "Axes", ttft_s: Sequence[float]) -> None:
    found = np.sort(np.asarray(ttft_s, dtype=np.float64))
    axes.step(found, np.arange(1, len(found) + 1) / max(1, len(found)), where="post")
    axes.set(xscale="log", xlabel="time to first token, s", ylabel="part of requests")
    axes.set_ylim(0, 1)


# Draw one plot as an SVG file; equal plots give equal bytes.

_SIZE_INCHES = (8, 4)


def drawn(draw: Callable[["Axes"], None]) -> bytes:
    """Return an SVG file of the axes that `draw` fills; see `drawn_figure`."""
    return drawn_figure(lambda figure: draw(figure.add_subplot()))


def drawn_figure(draw: Callable[["Figure"], None]) -> bytes:
    """Return an SVG file of the figure that `draw` fills."""
    require_extra("report", "--out")
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "quire", "svg.fonttype": "none"}):
        figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
        draw(figure)
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None}, facecolor="white")
    return file.getvalue()
