"""The roofline page: for each instruction set, times of steps, their floors and their components.

The page is rendered from the JSON object of `python -m benchmarks roofline`, so a stored run can be
rendered again.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from matplotlib.figure import Figure

from benchmarks.roofline.measured import (
    DECODE,
    ENGINE,
    PARTS,
    PREFILL,
    SAMPLING,
    Cell,
    Claims,
    StepMeasure,
    claims_of,
    part_rows,
)
from quire.errors import ConfigError
from quire.sim.plots import drawn_figure

PART_COLUMNS = (
    *("part", "arithmetic", "MB", "GFLOP", "floor ms"),
    *("measured ms", "over floor", "share"),
)
SHARES = (*PARTS, SAMPLING, ENGINE)
TARGETS = {
    "decode_step_over_floor": "at most 1.5",
    "small_batch_step_over_floor": "at most 1.5",
    "prefill_over_product_rate": "at least 0.85 (1.1B)",
}
_SHOWN_S = 5e-6  # a shorter floor is shown as 0.00 ms, without a ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Contents of the page.

    Attributes:
        cells: measured cells, the highest instruction set first.
        claims: claims of the cells; without values for a `--quick` run.
        about: hardware, versions and workload as text.
    """

    cells: tuple[Cell, ...]
    claims: Claims
    about: str

    @property
    def sections(self) -> list[tuple[str, list[Cell]]]:
        """Cells by instruction set."""
        return _sections(self.cells)


def roofline_from(run: Mapping[str, Any]) -> Roofline:
    """Parse the JSON object of `python -m benchmarks roofline`.

    Raises:
        ConfigError: not such an object.
    """
    try:
        cells = tuple(Cell.from_json(cell) for cell in run["arms"]["cells"])
        hardware, versions, config = run["hardware"], run["versions"], run["config"]
        found = claims_of(cells)
        return Roofline(
            cells=cells,
            claims=found if run["claims"] else Claims(values={}, refused=found.refused),
            about=(
                f"Random-weight Llama, prompts of {config['prompt_tokens']} tokens, bfloat16; "
                f"{hardware['cpu']}, {config['threads']} threads; torch {versions['torch']}, "
                f"Transformers {versions['transformers']}; Quire {versions['quire']} at commit "
                f"{run['commit']}. Medians of {config['rounds']} rounds"
            ),
        )
    except (KeyError, TypeError, IndexError) as error:
        raise ConfigError(
            "expected the JSON object of `python -m benchmarks roofline --json`; "
            f"{error!r} is missing"
        ) from error


def values(roofline: Roofline) -> dict[str, Any]:
    """Values that the templates of the page use."""
    claims = roofline.claims
    return {
        "roofline": roofline,
        "reached": reached(claims),
        "refused": [(refused.claim, refused.reason) for refused in claims.refused],
        "ceilings": ceilings,
        "step_columns": step_columns,
        "step_rows": step_rows,
        "share_columns": ("steps", *SHARES),
        "share_rows": share_rows,
        "part_columns": PART_COLUMNS,
        "part_cells": part_cells,
        "shown_steps": shown_steps,
    }


def reached(claims: Claims) -> list[tuple[str, str, str]]:
    """Rows of the table of claims: name, value, target."""
    rows = []
    for name, value in claims.values.items():
        target = next((text for start, text in TARGETS.items() if name.startswith(start)), None)
        if target is not None:
            rows.append((name, f"{value:.2f}", target))
    return rows


def ceilings(cells: Iterable[Cell]) -> list[tuple[str, ...]]:
    """Rows of the table of machine limits: cell, read rate, product rates."""
    return [
        (
            title(cell),
            f"{cell.weight_bytes / 1e6:,.0f}",
            f"{cell.rates.read_bytes_per_s / 1e9:,.1f}",
            ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in cell.rates.flops_per_s.items()),
        )
        for cell in cells
    ]


def title(cell: Cell) -> str:
    """Name of a cell within its section."""
    kv_codec = "" if cell.kv_codec == "none" else f", KV {cell.kv_codec}"
    return f"{cell.model} {cell.implementation}, weights {cell.weight_codec}{kv_codec}"


def step_columns(cells: Iterable[Cell]) -> tuple[str, ...]:
    """Columns of the table of steps, of all steps of the cells."""
    return ("cell", *(_step_title(kind, rows) for kind, rows in _kinds(cells)))


def step_rows(cells: Iterable[Cell]) -> Iterator[tuple[str, ...]]:
    """Times of steps in milliseconds, with the ratio to the floor."""
    found = list(cells)
    for cell in found:
        steps = {(step.kind, step.rows): step for step in cell.steps}
        texts = (_time(steps.get(kind)) for kind in _kinds(found))
        yield (title(cell), *texts)


def share_rows(cells: Iterable[Cell]) -> Iterator[tuple[str, ...]]:
    """Percentages of the time of steps by component."""
    for cell in cells:
        for step in shown_steps(cell):
            shares = {row.cost.name: row.share for row in part_rows(step, cell.rates)}
            name = f"{title(cell)}: {_step_title(step.kind, step.rows)}"
            yield (name, *(f"{shares[part]:.0%}" for part in SHARES))


def part_cells(measure: StepMeasure, cell: Cell) -> list[tuple[str, ...]]:
    """Table of one step, as texts for PART_COLUMNS; the last row is the whole step."""
    return [
        (
            row.cost.name,
            row.arithmetic,
            f"{row.cost.num_bytes / 1e6:,.1f}",
            f"{row.cost.flops / 1e9:,.2f}",
            f"{row.floor_s * 1e3:,.2f}",
            f"{row.measured_s * 1e3:,.2f}",
            "" if row.over_floor is None or row.floor_s < _SHOWN_S else f"{row.over_floor:,.1f}",
            f"{row.share:.0%}",
        )
        for row in part_rows(measure, cell.rates)
    ]


def shown_steps(cell: Cell) -> list[StepMeasure]:
    """Steps shown by component: prefill, and the smallest and largest batch of decode steps."""
    prefill = [step for step in cell.steps if step.kind == PREFILL]
    decode = [step for step in cell.steps if step.kind == DECODE]
    return [*prefill, *decode[:1], *(decode[-1:] if len(decode) > 1 else ())]


def _kinds(cells: Iterable[Cell]) -> list[tuple[str, int]]:
    return list(dict.fromkeys((step.kind, step.rows) for cell in cells for step in cell.steps))


def _step_title(kind: str, rows: int) -> str:
    return f"{kind} {rows}"


def _time(step: StepMeasure | None) -> str:
    return "" if step is None else f"{step.step_s * 1e3:,.1f} ({step.over_floor:.2f})"


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


def shares_svg(cells: Iterable[Cell]) -> str:
    """Bars of steps: time over floor, divided into components; a panel per instruction set.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    text = drawn_figure(lambda figure: _draw_shares(figure, tuple(cells))).decode()
    return text[text.index("<svg") :]


def _sections(cells: Iterable[Cell]) -> list[tuple[str, list[Cell]]]:
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
