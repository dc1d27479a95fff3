"""Pictures of a simulation: memory over time, the queue, and how long first tokens take."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from quire.sim.gauges import Reading
from quire.sim.simulator import SimResult
from quire.sim.svg import drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GIB = 1 << 30


def pictures(result: SimResult) -> Mapping[str, bytes]:
    """SVG files of a run by name: `use.svg`, `queue.svg`, `ttft.svg`.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    samples = result.gauges.samples
    ttft_s = [record.ttft_s for record in result.records if record.finished]
    return {
        "use.svg": drawn(lambda axes: _draw_use(axes, samples, result.memory_bytes)),
        "queue.svg": drawn(lambda axes: _draw_queue(axes, samples)),
        "ttft.svg": drawn(lambda axes: _draw_ttft(axes, ttft_s)),
    }


def _draw_use(axes: "Axes", samples: Sequence[Reading], total_bytes: int) -> None:
    minutes = [reading.time_s / 60 for reading in samples]
    used = [reading.used_bytes / _GIB for reading in samples]
    named = [reading.allocated_bytes / _GIB for reading in samples]
    axes.step(minutes, used, where="post", label="used", color="#1f5fa8", linewidth=1)
    axes.step(minutes, named, where="post", label="running", color="#d1662b", linewidth=1)
    if max(used, default=0) > total_bytes / _GIB / 4:
        axes.axhline(total_bytes / _GIB, color="#444444", linewidth=1, linestyle=":", label="all")
    axes.set(xlabel="minutes", ylabel="KV memory, GiB")
    axes.legend(frameon=False)


def _draw_queue(axes: "Axes", samples: Sequence[Reading]) -> None:
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
