"""Output of `quire plan`: memory bar, memory table and capacity table."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from quire.cli.plan_report import PlanReport
from quire.layout.sizes import format_size
from quire.plan.capacity import MemoryLayout, Verdict

_BAR_CELLS = 64
_STYLES = {
    "weights": "blue",
    "activations": "yellow",
    "KV": "green",
    "headroom": "magenta",
    "unassigned": "bright_black",
}
# letters make the bar readable without colour
_LETTERS = {"weights": "W", "activations": "A", "KV": "K", "headroom": "H", "unassigned": "."}


def render(report: PlanReport) -> RenderableType:
    """Render the whole result for a terminal."""
    coded = report.weight_codec != "auto"
    weights = f"{report.dtype}, quantized to {report.weight_codec}" if coded else report.dtype
    title = Text(
        f"{report.model_name}: {report.model.num_parameters:,} parameters,"
        f" {report.model.num_layers} layers, {report.model.num_kv_heads} KV heads of"
        f" {report.model.head_dim}, weights {weights}, KV {report.kv_codec}",
        style="bold",
    )
    parts: list[RenderableType] = [
        title,
        memory_bar(report.memory),
        memory_table(report.memory),
        capacity_table(report),
    ]
    if report.weights.offloaded_layers:
        size = format_size(report.weights.host_bytes)
        parts.append(Text(f"{report.weights.text}: {size} transferred to the device per step"))
    if report.verdict is not None:
        parts.append(verdict_text(report.verdict))
    return Group(*parts)


def memory_bar(memory: MemoryLayout) -> Text:
    """One line of 64 cells in proportion; a part above 0 bytes gets at least one cell."""
    cells = {
        name: max(1, round(_BAR_CELLS * size / memory.total_bytes)) if size else 0
        for name, size in _parts(memory).items()
    }
    largest = max(cells, key=lambda name: cells[name])
    cells[largest] += _BAR_CELLS - sum(cells.values())
    bar = Text("[")
    for name, count in cells.items():
        bar.append(_LETTERS[name] * count, style=_STYLES[name])
    return bar.append("]")


def memory_table(memory: MemoryLayout) -> Table:
    """Size and share of each part of the device memory."""
    table = Table("memory", "", "bytes", "size", "share", title_justify="left")
    for column in table.columns[2:]:
        column.justify = "right"
    for name, size in _parts(memory).items():
        table.add_row(
            Text(name, style=_STYLES[name]),
            _LETTERS[name],
            f"{size:,}",
            format_size(size),
            f"{size / memory.total_bytes:.1%}",
        )
    total = memory.total_bytes
    table.add_row("total", "", f"{total:,}", format_size(total), "100.0%", style="bold")
    return table


def capacity_table(report: PlanReport) -> Table:
    """Capacity of the KV memory, and the batch at which KV reads dominate."""
    fits = report.capacity
    table = Table("KV", "", show_header=False)
    per_token = report.kv_bytes_per_token
    table.add_row("bytes per token", f"{per_token:,} ({format_size(per_token)})")
    table.add_row(
        "page size", f"{fits.page_bytes:,} B: {fits.page_tokens} tokens of one layer, all KV heads"
    )
    table.add_row("pages", f"{fits.pool_pages:,}")
    possible = fits.limit != "context"
    table.add_row(f"sequences of {fits.sequence_tokens:,} tokens", _sequences(report))
    if possible:
        table.add_row(f"batch of {report.batch:,}", _limit(report))
    table.add_row(
        "longest sequence", f"{fits.longest_tokens:,} tokens, limited by {fits.longest_limit}"
    )
    if report.disk_kv_bytes:
        size = format_size(report.disk_kv_bytes)
        table.add_row("prefixes on disk", f"up to {report.disk_tokens:,} tokens in {size}")
    if possible:
        table.add_row(
            "KV reads exceed weight reads",
            f"from batch {report.crossover_batch:,}; at batch {report.batch:,} KV is"
            f" {report.step.kv_share:.1%} of the bytes read by a decode step",
        )
    return table


def verdict_text(verdict: Verdict) -> Text:
    """The assessment of a workload with its reasons."""
    text = Text("benefit of KV management: ")
    text.append(verdict.impact, style="bold")
    for reason in verdict.reasons:
        text.append(f"\n  - {reason}")
    return text


def _sequences(report: PlanReport) -> str:
    fits = report.capacity
    if fits.limit == "context":
        return f"impossible: the model's context is {report.model.max_positions:,} tokens"
    return f"{fits.sequences:,} ({fits.pages_per_sequence:,} pages each)"


def _limit(report: PlanReport) -> str:
    return "fits" if report.capacity.limit == "none" else "does not fit: limited by memory"


def _parts(memory: MemoryLayout) -> dict[str, int]:
    parts = {
        "weights": memory.weights_bytes,
        "activations": memory.activation_peak_bytes,
        "KV": memory.kv_bytes,
        "headroom": memory.headroom_bytes,
        "unassigned": memory.unassigned_bytes,
    }
    return {name: size for name, size in parts.items() if size or name != "unassigned"}
