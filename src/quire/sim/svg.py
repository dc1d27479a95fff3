"""Draws one picture as an SVG file: the same bytes for the same drawing."""

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZE_INCHES = (8, 4)


def drawn(draw: Callable[["Axes"], None]) -> bytes:
    """An SVG file of what `draw` puts on a pair of axes; see `drawn_figure`."""
    return drawn_figure(lambda figure: draw(figure.add_subplot()))


def drawn_figure(draw: Callable[["Figure"], None]) -> bytes:
    """An SVG file of what `draw` puts on a figure.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "pictures are drawn with matplotlib, which is not installed: "
            'pip install "quire[report]", or leave --out out'
        ) from error
    with mpl.rc_context({"svg.hashsalt": "quire", "svg.fonttype": "none"}):
        figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
        draw(figure)
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None}, facecolor="white")
    return file.getvalue()
