"""The picture of `quire demo`: running requests over time in the same KV memory, as SVG."""

from collections.abc import Mapping, Sequence
from html import escape

Samples = Sequence[tuple[float, int]]
"""Seconds since the start, and the number of running requests."""

WIDTH, HEIGHT = 720, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 220, 48, 44
_COLOURS = ("#6b7280", "#1d4ed8", "#1a7f5a", "#b45309")
_TICKS = 4


def draw(title: str, series: Mapping[str, Samples]) -> str:
    """Draw one line for each series, with its name at the right.

    Args:
        title: heading of the picture.
        series: name to samples, in the order of the legend.
    """
    last_s = max((samples[-1][0] for samples in series.values() if samples), default=1.0)
    most = max((count for samples in series.values() for _, count in samples), default=1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(_LEFT, 24, title, size=14),
        _text(_LEFT, HEIGHT - 8, "seconds"),
        _text(8, _TOP - 8, "running requests"),
        *_grid(last_s, most),
    ]
    for index, (name, samples) in enumerate(series.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        parts.append(_line(samples, last_s, most, colour))
        parts.append(_text(WIDTH - _RIGHT + 12, _TOP + 14 + 20 * index, name, colour=colour))
    return "\n".join([*parts, "</svg>", ""])


def _grid(last_s: float, most: int) -> list[str]:
    """Axes with round labels."""
    parts = []
    for tick in range(_TICKS + 1):
        share = tick / _TICKS
        y, x = _y(share), _x(share)
        parts.append(
            f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#e5e7eb"/>'
        )
        parts.append(_text(_LEFT - 8, y + 4, f"{share * most:.0f}", anchor="end"))
        parts.append(_text(x, HEIGHT - _BOTTOM + 16, f"{share * last_s:.1f}", anchor="middle"))
    return parts


def _line(samples: Samples, last_s: float, most: int, colour: str) -> str:
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
