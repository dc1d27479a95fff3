"""The roofline page: cost, measured time and least time of each component of a step.

The page is rendered from the JSON object of `python -m benchmarks throughput`, so a stored run can
be rendered again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.rendering import environment
from benchmarks.throughput.measured import KINDS, StepMeasure, part_rows
from quire.errors import ConfigError
from quire.sim.plots import drawn_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = (
    "part", "MB", "GFLOP", "FLOP/B", "floor ms", "measured ms", "over floor", "share"
)  # fmt: skip
_STYLES = dict(zip(KINDS, (("#b3261e", "o"), ("#1a7f5a", "^")), strict=True))
_NAME_OFFSETS = (((6, -3), "left"), ((6, 6), "left"), ((-6, 4), "right"), ((-6, -10), "right"))
_TEMPLATES = Path(__file__).resolve().parent / "templates"


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Contents of the page.

    Attributes:
        measures: measurements by kind of step.
        read_bytes_per_s, flops_per_s: machine limits, medians of the run.
        claims: claims of the run; empty for a `--quick` run.
        about: hardware, versions and workload as text.
    """

    measures: tuple[StepMeasure, ...]
    read_bytes_per_s: float
    flops_per_s: float
    claims: Mapping[str, int | float]
    about: str


def roofline_from(run: Mapping[str, Any]) -> Roofline:
    """Parse the JSON object of `python -m benchmarks throughput`.

    Raises:
        ConfigError: not such an object.
    """
    try:
        claims, work = run["claims"], run["config"]["workload"]
        figures = claims or run["quick_figures"]
        hardware, versions = run["hardware"], run["versions"]
        return Roofline(
            measures=tuple(StepMeasure.from_json(part) for part in run["arms"]["parts"]),
            read_bytes_per_s=figures["read_bytes_per_s"],
            flops_per_s=figures["product_flops_per_s"],
            claims=claims,
            about=(
                f"{work['prompts']} prompts of {work['prompt_tokens']} tokens, "
                f"{work['new_tokens']} new, random-weight Llama ({work['model']}), bfloat16; "
                f"{hardware['cpu']}, {run['config']['threads']} threads; "
                f"torch {versions['torch']}, Transformers {versions['transformers']}; "
                f"Quire {versions['quire']} at commit {run['commit']}"
            ),
        )
    except (KeyError, TypeError) as error:
        raise ConfigError(
            "expected the JSON object of `python -m benchmarks throughput --json`; "
            f"{error!r} is missing"
        ) from error


def page(roofline: Roofline) -> str:
    """Render the page as one self-contained HTML file.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    claims = [(name, f"{value:,.6g}") for name, value in roofline.claims.items()]
    template = environment(_TEMPLATES, autoescape=True).get_template("roofline.html.j2")
    return template.render(
        roofline=roofline,
        ceilings=ceiling_words(roofline),
        picture=svg(roofline),
        columns=COLUMNS,
        cells=cells,
        claims=claims,
    )


def cells(measure: StepMeasure, roofline: Roofline) -> list[tuple[str, ...]]:
    """Table of one kind of step, as texts for COLUMNS; the last row is the whole step."""
    return [
        (
            row.cost.name,
            f"{row.cost.num_bytes / 1e6:,.1f}",
            f"{row.cost.flops / 1e9:,.2f}",
            f"{row.cost.intensity:,.1f}",
            f"{row.floor_s * 1e3:,.2f}",
            f"{row.measured_s * 1e3:,.2f}",
            "" if row.over_floor is None else f"{row.over_floor:,.1f}",
            f"{row.share:.0%}",
        )
        for row in part_rows(measure, roofline.read_bytes_per_s, roofline.flops_per_s)
    ]


def ceiling_words(roofline: Roofline) -> str:
    """Text that states the machine limits and defines a floor."""
    return (
        f"Measured in the same run: memory bandwidth {roofline.read_bytes_per_s / 1e9:.1f} GB/s, "
        f"bfloat16 products {roofline.flops_per_s / 1e9:,.0f} GFLOP/s. A floor is the "
        "larger of bytes over the first and FLOPs over the second. Bytes are weights and KV; "
        "activations, which can stay in caches, are not counted."
    )


def svg(roofline: Roofline) -> str:
    """The roofline plot: achieved rates of the components, and the machine limits.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    text = drawn_figure(lambda figure: _draw(figure, roofline)).decode()
    return text[text.index("<svg") :]


def _draw(figure: "Figure", roofline: Roofline) -> None:
    """Draw components with FLOPs; `rest` and `engine` have none."""
    figure.set_size_inches(9, 5)
    axes = figure.add_subplot()
    corner = roofline.flops_per_s / roofline.read_bytes_per_s
    intensities = [corner]
    for measure in roofline.measures:
        rows = part_rows(measure, roofline.read_bytes_per_s, roofline.flops_per_s)
        shown = [row for row in rows if row.cost.flops and row.measured_s]
        xs = [row.cost.intensity for row in shown]
        ys = [row.flops_per_s for row in shown]
        intensities += xs
        colour, marker = _STYLES[measure.kind]
        axes.scatter(xs, ys, label=measure.kind, zorder=3, color=colour, marker=marker)
        for i, (row, x, y) in enumerate(zip(shown, xs, ys, strict=True)):
            # points of equal intensity are close: their names are placed around them
            offset, side = _NAME_OFFSETS[i % len(_NAME_OFFSETS)]
            axes.annotate(
                row.cost.name, (x, y), offset, textcoords="offset points", fontsize=8, ha=side
            )
    ends = [min(intensities) / 2, corner, max(intensities) * 2]
    roof = [min(x * roofline.read_bytes_per_s, roofline.flops_per_s) for x in ends]
    axes.plot(ends, roof, color="#444444", linewidth=1.5, label="ceilings")
    axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte", ylabel="FLOP/s")
    axes.legend(frameon=False, loc="lower right")
