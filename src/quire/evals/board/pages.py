"""Files of a leaderboard: a Markdown table, a chart, and an interactive page."""

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from quire.evals.board.grid import FULL, QUIRE
from quire.evals.board.result import BoardResult, Row, best_rules
from quire.evals.intervals import Mean
from quire.layout.eviction import PREFILL_END
from quire.layout.extras import require_extra
from quire.sim.plots import drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE_FILE, CHART_FILE, INTERACTIVE_FILE = "board.md", "board.svg", "board.html"
WANTED = 0.975
"""Quality over full KV that the list of rules requires, as in Batch-Max's evaluation."""

_BEFORE_QUESTION = {
    None: "With `prefill_end` the context is evicted before the question is computed; a cap is a "
    "fraction of the context. With other schedules the prompt ends with the question.",
    True: "Every rule evicts the context before the question is computed; a cap is a fraction of "
    "the context.",
    False: "The prompt ends with the question. With `prefill_end` the first output token is that "
    "of full KV, so tasks whose answers are one token (`majority`, `topics`, `labels`) show no "
    "loss there, and of other answers the first token is free.",
}

_COLOURS = ("#1f5fa8", "#d1662b", "#3a8a4d", "#8a4da8", "#707070")


def page(result: BoardResult, model: str, *, has_chart: bool, section: Sequence[str] = ()) -> str:
    """The leaderboard as Markdown."""
    lines = [*_intro(result, model, has_chart=has_chart), *_rule_lines(result.rows), *section]
    return "\n".join([*lines, *_table(result), *_refused_lines(result)]) + "\n"


def _intro(result: BoardResult, model: str, *, has_chart: bool) -> Iterator[str]:
    reference = result.reference
    yield f"# Leaderboard of {model}"
    yield ""
    yield (
        f"{result.num_prompts} prompts of at most {result.tokens} tokens for each task, "
        f"{len(result.seeds)} "
        f"seeds. Quality: mean over the tasks of score over full KV's, with the 95 % interval "
        f"(bootstrap over prompts). KV: mean peak bytes of a request, statistics and page tables "
        f"included, over those of full KV with codec `{reference.entry.codec}`. Tokens/s: prompt "
        f"and output, all prompts at once in the KV memory. Pareto: no entry has both a higher "
        f"quality and fewer bytes."
    )
    if result.evict_before_question or any(r.entry.schedule == PREFILL_END for r in result.rows):
        yield ""
        yield _BEFORE_QUESTION[result.evict_before_question]
    if result.entries_left:
        yield ""
        yield f"**{result.entries_left} entries did not run before the time limit.**"
    yield ""
    scores = ", ".join(f"`{task}` {reference.scores[task]:.3g}" for task in result.tasks)
    judged = ", ".join(result.judged)
    yield f"Scores with full KV: {scores}. Quality is over {judged or 'all tasks'}."
    if not result.sanity.passed:
        whole = not result.sanity.cases or not judged
        what = "This model may not judge a rule" if whole else "Sanity check failed on some tasks"
        yield ""
        yield f"**{what}**: {result.sanity.reason}."
    yield ""
    if has_chart:
        yield f"![Quality over full KV against KV bytes]({CHART_FILE})"
        yield ""


def _rule_lines(rows: Sequence[Row]) -> Iterator[str]:
    yield f"## Rules that keep a quality of {WANTED}"
    yield ""
    yield (
        "Means with 95 % intervals; those in bold have the whole interval at or above "
        f"{WANTED}. The fewest bytes first."
    )
    yield ""
    for budget, good in best_rules(rows, WANTED).items():
        names = "; ".join(map(_rule_text, good))
        yield f"* Cap {budget} of the prompt: {names or 'none'}"
    yield ""


def _rule_text(row: Row) -> str:
    entry, mark = row.entry, "**" if row.quality.low >= WANTED else ""
    return (
        f"`{entry.rule}` ({entry.schedule}, {entry.codec}) {mark}{_interval(row.quality)}{mark}, "
        f"KV {row.kv_share:.3f}"
    )


def _interval(found: Mean) -> str:
    return f"{found.mean:.3f} ({found.low:.3f} to {found.high:.3f})"


def _table(result: BoardResult) -> Iterator[str]:
    tasks = result.tasks
    yield "## All entries"
    yield ""
    yield (
        "| rule | cap | when | codec | quality | KV | tokens/s | "
        + " | ".join(tasks)
        + " | Pareto |"
    )
    yield "| --- | ---: | --- | --- | ---: | ---: | ---: |" + " ---: |" * len(tasks) + " --- |"
    for row in result.rows:
        entry, scores = row.entry, " | ".join(f"{row.scores[task]:.2f}" for task in tasks)
        yield (
            f"| `{entry.rule}` | {entry.budget or '100%'} | {entry.schedule} | `{entry.codec}` | "
            f"{_interval(row.quality)} | "
            f"{row.kv_share:.3f} | {row.tokens_per_s:,.0f} | {scores} | "
            f"{'yes' if row.is_unbeaten else ''} |"
        )


def _refused_lines(result: BoardResult) -> Iterator[str]:
    if not result.refused:
        return
    yield ""
    yield f"## Refused ({len(result.refused)})"
    yield ""
    for entry, why in result.refused.items():
        yield f"* `{entry}`: {why}"


def chart(result: BoardResult) -> bytes:
    """Quality against KV bytes as SVG."""
    return drawn(lambda axes: _draw(axes, result.rows))


def _draw(axes: "Axes", rows: Sequence[Row]) -> None:
    groups: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row.entry.source != QUIRE, row.entry.schedule)):
        source = f"{row.entry.source}, " * (row.entry.source != QUIRE)
        groups.setdefault(source + (row.entry.schedule or "full KV"), []).append(row)
    for (label, own), colour in zip(groups.items(), cycle(_COLOURS), strict=False):
        shares = [row.kv_share for row in own]
        axes.scatter(shares, [r.quality.mean for r in own], label=label, color=colour, s=14)
    best = sorted((row for row in rows if row.is_unbeaten), key=lambda row: row.kv_share)
    axes.plot(
        [row.kv_share for row in best],
        [row.quality.mean for row in best],
        color="#444444",
        linewidth=1,
        label="Pareto-optimal",
    )
    axes.set(xlabel="peak KV bytes of a request, over full KV", ylabel="quality over full KV")
    axes.legend(frameon=False)


def interactive(result: BoardResult, model: str) -> str:
    """A page without other files: points that show their configuration."""
    require_extra("eval", "the interactive page of quire board")
    import plotly.graph_objects as go

    rows = result.rows
    groups: dict[str, list[Row]] = {}
    for row in rows:
        source = row.entry.codec if row.entry.source == QUIRE else row.entry.source
        groups.setdefault(f"{source}, {row.entry.schedule or FULL}", []).append(row)
    figure = go.Figure()
    for name, own in sorted(groups.items()):
        figure.add_trace(go.Scatter(**_points(own, name)))
    best = sorted((row for row in rows if row.is_unbeaten), key=lambda row: row.kv_share)
    figure.add_trace(
        go.Scatter(
            x=[row.kv_share for row in best],
            y=[row.quality.mean for row in best],
            mode="lines",
            name="Pareto-optimal",
            line={"color": "#444444", "width": 1},
            hoverinfo="skip",
        )
    )
    figure.update_layout(
        title=f"Leaderboard of {model}",
        xaxis_title="peak KV bytes of a request, over full KV",
        yaxis_title="quality over full KV",
        template="plotly_white",
    )
    return str(figure.to_html(include_plotlyjs=True, full_html=True))


def _points(rows: Sequence[Row], name: str) -> dict[str, Any]:
    return {
        "x": [row.kv_share for row in rows],
        "y": [row.quality.mean for row in rows],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [row.quality.high - row.quality.mean for row in rows],
            "arrayminus": [row.quality.mean - row.quality.low for row in rows],
            "thickness": 0.5,
            "width": 0,
        },
        "text": [
            f"{row.entry}<br>{row.tokens_per_s:,.0f} tokens/s<br>"
            + "<br>".join(f"{task}: {score:.2f}" for task, score in row.scores.items())
            for row in rows
        ],
        "mode": "markers",
        "name": name,
        "hovertemplate": "%{text}<br>quality %{y:.3f}, KV %{x:.3f}<extra></extra>",
    }
