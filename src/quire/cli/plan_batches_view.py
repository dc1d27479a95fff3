"""What `quire plan --maximize-batch` prints: a row for each way of evicting, and the verdict."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from quire.cli.plan_batches import LABELS, ArmPlan, BatchReport
from quire.layout.sizes import format_size
from quire.plan.batch_verdict import BlockVerdict

_ANSWERS = {True: "yes", False: "no", None: "not known"}


def render_batches(report: BatchReport) -> RenderableType:
    """The whole answer for a terminal."""
    requested = report.question
    title = Text(
        f"Rows of {requested.prompt_tokens:,} tokens and {requested.new_tokens:,} new in "
        f"{format_size(requested.kv_bytes)} of KV ({requested.kv_codec}, pages of "
        f"{requested.page_tokens})",
        style="bold",
    )
    notes = [Text(f"tokens/s: {reason}") for reason in report.missing]
    verdict = verdict_text(report.verdict)
    return Group(title, batches_table(report), _rules_text(report), *notes, verdict)


def batches_table(report: BatchReport) -> Table:
    """Batches, bytes of a row and predicted tokens a second."""
    table = Table("", "batch", "KV of a row", "prefill s", "decode s", "tokens/s")
    for column in table.columns[1:]:
        column.justify = "right"
    for arm in report.arms:
        table.add_row(LABELS[arm.arm], f"{arm.rows:,}", format_size(arm.row_bytes), *_times(arm))
    return table


def _rules_text(report: BatchReport) -> Text:
    """What `--evict` takes for each arm, on lines of their own: no terminal is to cut a rule."""
    lines = [f"{LABELS[arm.arm]}: --evict '{arm.evict}'" for arm in report.arms]
    return Text("\n".join(lines), overflow="fold")


def verdict_text(verdict: BlockVerdict) -> Text:
    """Whether evicting while prompts are read pays, and why."""
    text = Text("evicting while prompts are read pays: ")
    text.append(_ANSWERS[verdict.pays], style="bold")
    for reason in verdict.reasons:
        text.append(f"\n  - {reason}")
    return text


def _times(arm: ArmPlan) -> tuple[str, str, str]:
    found = arm.seconds
    if found is None:
        return "-", "-", "-"
    return f"{found.prefill_s:.2f}", f"{found.decode_s:.2f}", f"{found.tokens_per_s:,.1f}"
