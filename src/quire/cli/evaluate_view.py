"""Tables of `quire eval`: scores with intervals, KV bytes and tokens/s, and verdicts."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import typer

from quire.cli.tables import show_table
from quire.layout.sizes import format_size

if TYPE_CHECKING:
    from quire.evals.intervals import Mean
    from quire.evals.suite.cells import CellResult
    from quire.evals.suite.runner import Evaluation, Verdict

_SCORES = ("task", "KV", "prompts", "score", "mean", "95 % interval", "KV peak", "output tokens/s")


def show_evaluation(found: "Evaluation") -> None:
    """Print scores, the result of the sanity check, and verdicts if there are any."""
    show_table("Scores", _SCORES, _rows(found))
    typer.echo(f"Sanity check: {found.sanity.status}.")
    if not found.verdicts:
        return
    if not found.sanity.passed:
        typer.echo(f"No verdict about the configuration: {found.sanity.reason}.")
        return
    rows = [_verdict_row(verdict) for verdict in found.verdicts]
    show_table("Compared with full KV", ("task", "score", "difference", "verdict"), rows)


def show_means(title: str, means: "Mapping[str, Mean]") -> None:
    """Print means with their intervals."""
    rows = [(name, *_mean_cells(mean)) for name, mean in means.items()]
    show_table(title, ("measure", "mean", "95 % interval"), rows)


def _rows(found: "Evaluation") -> list[tuple[str, ...]]:
    count = max(len(cells) for cells in found.cells.values())
    return [
        row
        for index in range(count)
        for arm, cells in found.cells.items()
        for row in _cell_rows(arm, cells[index])
    ]


def _cell_rows(arm: str, cell: "CellResult") -> list[tuple[str, ...]]:
    resources = (format_size(cell.kv_peak_bytes), f"{cell.output_tokens_per_s:,.0f}")
    count = str(len(cell.prompts))
    return [
        (cell.name, arm, count, metric, *_mean_cells(mean), *resources)
        for metric, mean in cell.means().items()
    ]


def _mean_cells(mean: "Mean") -> tuple[str, str]:
    return f"{mean.mean:.4g}", f"{mean.low:.4g} to {mean.high:.4g}"


def _verdict_row(verdict: "Verdict") -> tuple[str, str, str, str]:
    if verdict.difference is None:
        return verdict.cell, verdict.metric, "", f"none: {verdict.reason}"
    return verdict.cell, verdict.metric, str(verdict.difference), verdict.verdict
