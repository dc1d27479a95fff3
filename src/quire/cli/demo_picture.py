"""The picture of `quire demo`: running requests over time in the same KV memory, as SVG."""

import math
from collections.abc import Mapping, Sequence
from html import escape

Samples = Sequence[tuple[float, int]]
"""Seconds since the start, and the number of running requests."""

WIDTH, HEIGHT = 720, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 220, 48, 44
_COLOURS = ("#6b7280", "#1d4ed8", "#1a7f5a", "#b45309")
_LEAST_TICKS, _ROUND = 3, (1, 2, 5, 10)


def draw(title: str, series: Mapping[str, Samples]) -> str:
    """Draw one line for each series, with its name at the right.

    Args:
        title: heading of the picture.
        series: name to samples, in the order of the legend.
    """
    last_s = max((samples[-1][0] for samples in series.values() if samples), default=1.0)
    most = max((count for samples in series.values() for _, count in samples), default=1)
    times = ticks(last_s)
    counts = ticks(max(most, _LEAST_TICKS))  # steps of whole requests
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(_LEFT, 24, title, size=14),
        _text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 8, "time (s)", anchor="middle"),
        _text(8, _TOP - 10, "running requests"),
        *_grid(times, counts),
    ]
    for index, (name, samples) in enumerate(series.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        parts.append(_line(samples, times[-1], counts[-1], colour))
        parts.append(_text(WIDTH - _RIGHT + 12, _TOP + 14 + 20 * index, name, colour=colour))
    return "\n".join([*parts, "</svg>", ""])


def ticks(highest: int | float) -> list[float]:
    """Round values from 0 to the first one that is not below `highest`, three or more steps."""
    exact = max(highest, 1e-9) / _LEAST_TICKS
    power = 10.0 ** math.floor(math.log10(exact))
    step = power * max(factor for factor in _ROUND if factor * power <= exact)
    return [step * index for index in range(math.ceil(highest / step - 1e-9) + 1)]


def _grid(times: Sequence[float], counts: Sequence[float]) -> list[str]:
    """A line for each number of requests, and the labels of both axes."""
    parts = []
    for count in counts:
        y = _y(count / counts[-1])
        parts.append(
            f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#e5e7eb"/>'
        )
        parts.append(_text(_LEFT - 8, y + 4, f"{count:g}", anchor="end"))
    for second in times:
        x = _x(second / times[-1])
        parts.append(_text(x, HEIGHT - _BOTTOM + 16, f"{second:g}", anchor="middle"))
    return parts


def _line(samples: Samples, last_s: float, most: float, colour: str) -> str:
    points = " ".join(
        f"{_x(second / last_s):.1f},{_y(count / most):.1f}" for second, count in samples
    )
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'


def _x(share: float) -> float:
    return _LEFT + share * (WIDTH - _LEFT - _RIGHT)


def _y(share: float) -> float:
    return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)


def _text(
    x: int | float,
    y: int | float,
    text: str,
    *,
    size: int = 12,
    anchor: str = "start",
    colour: str = "#111827",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
        f'fill="{colour}">{escape(text)}</text>'
    )
