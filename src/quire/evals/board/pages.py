"""Files of a leaderboard: a Markdown table and a chart."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.evals.board.grid import FULL, QUIRE, BoardEntry
from quire.evals.board.result import BYTE_CLASSES, BoardResult, Row, best_of_classes, best_rules
from quire.evals.intervals import Mean, prompts_to_show
from quire.evals.suite.perplexity import PERPLEXITY, SUMMARY, window_overlap
from quire.layout.eviction import DECODE, PREFILL_AND_DECODE, PREFILL_END
from quire.layout.sparse import OFF
from quire.sim.plots import drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE_FILE, CHART_FILE = "board.md", "board.svg"
WANTED = 0.975
"""Quality over full KV that the list of rules requires."""

_BEFORE_QUESTION = {
    None: "With `prefill_end` the context is evicted before the question is computed; a cap is a "
    "fraction of the context. With other schedules the prompt ends with the question.",
    True: "Every rule evicts the context before the question is computed; a cap is a fraction of "
    "the context.",
    False: "The prompt ends with the question. With `prefill_end` the first output token is that "
    "of full KV, so tasks whose answers are one token (`majority`, `topics`, `labels`) show no "
    "loss there, and of other answers the first token is free.",
}
_DECODE = (
    "With `decode` the first output token is that of full KV: of tasks with short answers "
    "(`labels`, `facts`) little or nothing can be lost, which raises the quality of these entries."
)
_MORE_THAN_FULL = (
    " A KV above 1 is more than full KV's: the statistics of a rule, a scoring pass over the "
    "prompt (`kvzip`), or a budget that evicts after the last layer."
)

_COLOURS = {
    "": "#707070",
    PREFILL_END: "#1f5fa8",
    PREFILL_AND_DECODE: "#d1662b",
    DECODE: "#8a4da8",
}
_OTHER, _PARETO = "#3a8a4d", "#444444"


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Tokens/s over full KV's in one KV memory, measured apart from a leaderboard.

    Attributes:
        ratios: median, lowest and highest of the rounds, by the text of an entry.
        about: what was measured, and how.
    """

    ratios: Mapping[str, tuple[float, float, float]]
    about: str


def page(
    result: BoardResult,
    model: str,
    *,
    has_chart: bool,
    confirmed: Sequence[BoardResult] = (),
    section: Sequence[str] = (),
    speeds: Speeds | None = None,
) -> str:
    """The leaderboard as Markdown.

    Args:
        result: the leaderboard.
        model: its model.
        has_chart: whether a chart is beside the page.
        confirmed: leaderboards of the best entries with new prompts.
        section: further lines before the table of all entries.
        speeds: tokens/s over full KV's in the same KV memory.
    """
    kept: tuple[str, ...] = ()
    if result.judged:
        kept = *_class_lines(result, confirmed, speeds), *_rule_lines(result.rows)
    again = confirmed_lines(confirmed) if confirmed else ()
    lines = [*_intro(result, model, has_chart=has_chart), *kept, *again, *section]
    return "\n".join([*lines, *_table(result), *_refused_lines(result)]) + "\n"


def _intro(result: BoardResult, model: str, *, has_chart: bool) -> Iterator[str]:
    reference = result.reference
    speed = "Tokens/s: prompt and output, all prompts at once in the KV memory. "
    shared = (
        "Entries shared the prefill of a prompt. KV is that of the first prompt of each task, in "
        "pages that serve all rules with this codec: entries that need fewer tables, such as "
        "codecs without eviction, have fewer bytes in an engine of their own. "
    )
    speed = speed if _has_speed(result) else shared
    yield f"# Leaderboard of {model}"
    yield ""
    yield (
        f"{result.num_prompts} prompts of at most {result.tokens:,} tokens for each task, "
        f"{len(result.seeds)} seed{'s' * (len(result.seeds) > 1)}. "
        f"Quality: mean over the tasks of score over full KV's, with the 95 % interval over "
        f"prompts (Bayesian bootstrap). KV: mean peak bytes of a request, statistics and page "
        f"tables included, over those of full KV with codec `{reference.entry.codec}`. {speed}"
        f"Pareto: no entry has both a higher quality and fewer bytes."
        f"{_MORE_THAN_FULL * any(row.kv_share > 1 for row in result.rows)}"
    )
    schedules = {row.entry.schedule for row in result.rows}
    early = result.evict_before_question
    notes = [_BEFORE_QUESTION[early]] * bool(early or PREFILL_END in schedules)
    notes += [_DECODE] * (DECODE in schedules and not early)
    if notes:
        yield ""
        yield " ".join(notes)
    if result.entries_left:
        yield ""
        yield f"**{result.entries_left} entries did not run before the time limit.**"
    yield ""
    scores = ", ".join(f"`{task}` {reference.scores[task]:.3g}" for task in result.tasks)
    judged = ", ".join(result.judged)
    over = f"Quality is over {judged}." if judged else f"**{result.why_no_quality}**"
    what = f" That of {PERPLEXITY} is the mean probability of a token."
    yield f"Scores with full KV: {scores}.{what * (PERPLEXITY in result.tasks)} {over}"
    yield from _overlap_lines([result])
    if not result.sanity.passed:
        whole = not result.sanity.cases or not judged
        what = "This model may not judge a rule" if whole else "Sanity check failed on some tasks"
        yield ""
        yield f"**{what}**: {result.sanity.reason}."
    yield ""
    if has_chart:
        yield f"![Quality over full KV against KV bytes]({CHART_FILE})"
        yield ""


def _has_speed(result: BoardResult) -> bool:
    """Whether entries other than full KV have tokens/s."""
    return any(row.tokens_per_s is not None for row in result.rows if not row.is_reference)


def confirmed_lines(boards: Sequence[BoardResult]) -> Iterator[str]:
    """The best entries of each class of bytes, with more prompts and other lengths."""
    yield "## Confirmed"
    yield ""
    yield (
        f"The best entries of each class of bytes ({_classes()} of full KV), with "
        f"{', '.join(f'{each.num_prompts * len(each.tasks):,}' for each in boards)} prompts of "
        f"{', '.join(f'{each.tokens:,}' for each in boards)} tokens in all tasks together, and the "
        "quality over full KV with its paired 95 % interval."
    )
    yield ""
    for each in boards:
        if list(each.judged) != list(each.tasks):  # full KV fails on the others at this length
            judged = ", ".join(each.judged) or "no task"
            yield f"At {each.tokens:,} tokens, quality is over {judged} only."
            yield ""
    yield from _overlap_lines(boards)
    sizes = " | ".join(f"{each.tokens:,} tokens" for each in boards)
    yield f"| rule | cap | when | codec | KV | {sizes} |"
    yield "| --- | ---: | --- | --- | ---: |" + " ---: |" * len(boards)
    found = [{row.entry: row for row in each.rows} for each in boards]
    listed = [
        row
        for index, each in enumerate(boards)
        for row in each.rows
        if not any(row.entry in rows for rows in found[:index])
    ]
    for row in listed:
        entry = row.entry
        cells = [
            _interval(rows[entry].quality)
            if entry in rows
            else "refused"
            if str(entry) in each.refused
            else "not run"
            for rows, each in zip(found, boards, strict=True)
        ]
        yield (
            f"| `{entry.name}` | {entry.budget or '100%'} | {entry.schedule} | `{entry.codec}` | "
            f"{row.kv_share:.3f} | {' | '.join(cells)} |"
        )
    yield ""


def _overlap_lines(boards: Sequence[BoardResult]) -> Iterator[str]:
    """How far prompts that are windows of one text overlap: their intervals are too narrow then."""
    found = {one.tokens: window_overlap(one.tokens, one.num_prompts) for one in boards}
    shares = ", ".join(f"{share:.0%} ({tokens:,} tokens)" for tokens, share in found.items())
    names = [task for task in boards[0].tasks if task in (PERPLEXITY, SUMMARY)]
    if names and any(found.values()):
        yield ""
        yield (
            f"Prompts of {' and '.join(names)} are windows of one text, of which neighbours share "
            f"{shares}: they are not independent, and intervals of these tasks are too narrow."
        )
        yield ""


def _classes() -> str:
    return ", ".join(f"at most {share:g}" for share in BYTE_CLASSES)


LISTED = 3
"""Entries of each class of bytes that the page lists first."""


def _class_lines(
    result: BoardResult, confirmed: Sequence[BoardResult], speeds: Speeds | None
) -> Iterator[str]:
    """The best entries of each class of bytes, between marks for pages that include them.

    The best of many are chosen by scores that are a little too high: those of new prompts are not.
    """
    same = [each for each in confirmed if each.tokens == result.tokens][:1]
    new = {row.entry: row.quality for each in same for row in each.rows}
    yield "## Best of each class of KV bytes"
    yield ""
    yield "Chosen by these prompts, whose scores are therefore a little too high."
    yield ""
    yield "<!-- --8<-- [start:classes] -->"
    tasks = f"{len(result.judged)} task{'s' * (len(result.judged) > 1)}"
    yield (
        f"The {LISTED} entries of the highest quality in each class of bytes, the best first. KV: "
        "mean peak bytes of a request over full KV's. Requests in the same memory: the inverse of "
        f"KV. Quality: mean of score over full KV's on {tasks} of {result.num_prompts} prompts, "
        "with its 95 % interval. Pareto: no entry of any class has both a higher quality and fewer "
        f"bytes.{'' if speeds is None else f' {speeds.about}'}"
    )
    yield ""
    head = (
        "| class | KV over full KV | options | requests in the same memory | quality over full KV"
    )
    columns = " with new prompts |" * len(same)
    columns += " tokens/s over full KV (lowest to highest) |" * (speeds is not None)
    yield f"{head} |{columns} Pareto |"
    numbers = len(same) + (speeds is not None)
    yield "| --- | ---: | --- | ---: | ---: |" + " ---: |" * numbers + " --- |"
    rows = {row.entry: row for row in result.rows}
    for entry in best_of_classes(result.rows, LISTED):
        row = rows[entry]
        again = f" {_interval(new[entry])} |" if entry in new else " none |" * len(same)
        most = next(most for most in BYTE_CLASSES if row.kv_share <= most)
        yield (
            f"| at most {most:.2f} | {row.kv_share:.3f} | `{entry.shell_options}` | "
            f"{1 / row.kv_share:.1f} times | {_interval(row.quality)} |{again}"
            f"{_ratio(speeds, entry)} {'yes ' * row.is_unbeaten}|"
        )
    yield "<!-- --8<-- [end:classes] -->"
    yield ""


def _ratio(speeds: Speeds | None, entry: BoardEntry) -> str:
    """The cell of tokens/s, if the table has this column."""
    if speeds is None:
        return ""
    median, low, high = speeds.ratios.get(str(entry), (None, None, None))
    return " none |" if median is None else f" {median:.2f} ({low:.2f} to {high:.2f}) |"


def _rule_lines(rows: Sequence[Row]) -> Iterator[str]:
    kept = [row for row in rows if row.quality.mean >= WANTED and not row.is_reference]
    plain = sorted((row for row in kept if row.entry.rule == FULL), key=lambda row: row.kv_share)
    is_shown = any(row.quality.low >= WANTED for row in kept)
    yield f"## Rules and codecs that keep a quality of {WANTED}"
    yield ""
    yield (
        "Means with 95 % intervals, the fewest bytes first. Those in bold have the whole interval "
        f"at or above {WANTED}, which needs at least {prompts_to_show(WANTED)} prompts in all "
        f"tasks together.{'' if is_shown else ' Here none has.'}"
    )
    yield ""
    yield f"* No eviction: {'; '.join(map(_rule_text, plain)) or 'none'}"
    for budget, good in best_rules(rows, WANTED).items():
        names = "; ".join(map(_rule_text, good))
        yield f"* Cap {budget} of the prompt: {names or 'none'}"
    yield ""


def _rule_text(row: Row) -> str:
    entry, mark = row.entry, "**" if row.quality.low >= WANTED else ""
    name = f"`{entry.name}` ({entry.schedule}, {entry.codec})"
    if entry.rule == FULL:
        name = f"`{entry.codec}`" + f" (`{entry.sparse}`)" * (entry.sparse != OFF)
    more = ", more than full KV's" * (row.kv_share > 1)
    return f"{name} {mark}{_interval(row.quality)}{mark}, KV {row.kv_share:.3f}{more}"


def _interval(found: Mean) -> str:
    return f"{found.mean:.3f} ({found.low:.3f} to {found.high:.3f})" if found.count else "none"


def _table(result: BoardResult) -> Iterator[str]:
    tasks, has_speed = result.tasks, _has_speed(result)
    yield "## All entries"
    yield ""
    yield (
        "| rule | cap | when | codec | quality | KV | "
        + "tokens/s | " * has_speed
        + " | ".join(tasks)
        + " | Pareto |"
    )
    numbers = 2 + has_speed + len(tasks)
    yield "| --- | ---: | --- | --- |" + " ---: |" * numbers + " --- |"
    for row in result.rows:
        entry = row.entry
        scores = " | ".join(f"{row.scores[t]:.{4 if t == PERPLEXITY else 2}f}" for t in tasks)
        speed = "" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}"
        speed = f"{speed} | " * has_speed
        yield (
            f"| `{entry.name}` | {entry.budget or '100%'} | {entry.schedule} | `{entry.codec}` | "
            f"{_interval(row.quality)} | "
            f"{row.kv_share:.3f} | {speed}{scores} | "
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
    for label, own in _groups(rows).items():
        entry = own[0].entry
        colour = _COLOURS.get(entry.schedule, _OTHER)
        axes.scatter(
            [row.kv_share for row in own],
            [row.quality.mean for row in own],
            label=label,
            edgecolors=colour,
            facecolors=colour if entry.source == QUIRE else "none",
            s=14,
        )
    best = sorted((row for row in rows if row.is_unbeaten), key=lambda row: row.kv_share)
    axes.plot(
        [row.kv_share for row in best],
        [row.quality.mean for row in best],
        color=_PARETO,
        linewidth=1,
        label="Pareto-optimal",
    )
    names: dict[tuple[float, float], str] = {}
    for row in best:
        place = (row.kv_share, row.quality.mean)
        names[place] = f"{names[place]}; {_name(row)}" if place in names else _name(row)
    for number, (place, _) in enumerate(names.items(), start=1):
        axes.annotate(f"{number}", place, (-7, 3), textcoords="offset points", fontsize=8)
    listed = [f"{number}  {name}" for number, name in enumerate(names.values(), start=1)]
    axes.text(1.02, 0.02, "\n".join(listed), transform=axes.transAxes, fontsize=7)
    axes.set(xlabel="peak KV bytes of a request, over full KV", ylabel="quality over full KV")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)


def _groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by source and schedule, with the name of the group."""
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row.entry.source != QUIRE, row.entry.schedule)):
        source = f"{row.entry.source}, " * (row.entry.source != QUIRE)
        found.setdefault(source + (row.entry.schedule or "full KV"), []).append(row)
    return found


def _name(row: Row) -> str:
    rule = row.entry.name if row.entry.rule == FULL else f"{row.entry.name} {row.entry.budget}"
    return f"{rule}, {row.entry.codec}" if row.entry.source == QUIRE else rule
