"""Output of `quire plan --maximize-batch`: a table row per eviction variant, and the verdict."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from quire.cli.plan_batches import LABELS, ArmPlan, BatchReport
from quire.layout.sizes import format_size
from quire.plan.batch_verdict import BlockVerdict

_VERDICTS = {True: "yes", False: "no", None: "unknown"}


def render_batches(report: BatchReport) -> RenderableType:
    """Render the whole result for a terminal."""
    requested = report.question
    title = Text(
        f"Largest batch for {requested.prompt_tokens:,} input and {requested.new_tokens:,} output "
        f"tokens in {format_size(requested.kv_bytes)} of KV memory (codec {requested.kv_codec}, "
        f"{requested.page_tokens} tokens per page)",
        style="bold",
    )
    notes = [Text(f"tokens/s: {reason}") for reason in report.missing]
    verdict = verdict_text(report.verdict)
    return Group(title, batches_table(report), _rules_text(report), *notes, verdict)


def batches_table(report: BatchReport) -> Table:
    """Batch size, KV bytes per row and predicted tokens per second."""
    table = Table("eviction in", "batch", "KV per row", "prefill s", "decode s", "tokens/s")
    for column in table.columns[1:]:
        column.justify = "right"
    for arm in report.arms:
        table.add_row(LABELS[arm.arm], f"{arm.rows:,}", format_size(arm.row_bytes), *_times(arm))
    return table


def _rules_text(report: BatchReport) -> Text:
    """The rule of each variant on a separate line, so that no rule is truncated."""
    lines = [f"{LABELS[arm.arm]}: --evict '{arm.evict}'" for arm in report.arms]
    return Text("\n".join(lines), overflow="fold")


def verdict_text(verdict: BlockVerdict) -> Text:
    """Whether eviction in prefill improves throughput, with reasons."""
    text = Text("eviction in prefill improves throughput: ")
    text.append(_VERDICTS[verdict.pays], style="bold")
    for reason in verdict.reasons:
        text.append(f"\n  - {reason}")
    return text


def _times(arm: ArmPlan) -> tuple[str, str, str]:
    found = arm.seconds
    if found is None:
        return "-", "-", "-"
    return f"{found.prefill_s:.2f}", f"{found.decode_s:.2f}", f"{found.tokens_per_s:,.1f}"
