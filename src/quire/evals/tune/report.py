"""Files of a search: the configuration as TOML, a page, and a chart of quality against requests."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from quire.config.kv_config import KVConfig
from quire.evals.intervals import Mean
from quire.evals.tune.run import Tuned
from quire.evals.tune.search import pareto
from quire.evals.tune.space import SearchCandidate
from quire.layout.sparse import OFF
from quire.sim.plots import drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CONFIG_FILE, PAGE_FILE, CHART_FILE = "tuned.toml", "tuned.md", "tuned.svg"
AUTO = "auto"
_MAX_REFUSED = 20


def config_toml(tuned: Tuned, model: str, kv: KVConfig, dtype: str) -> str:
    """The chosen options, for `--config` of every command."""
    quality = tuned.held_out[tuned.chosen]
    lines = [
        f"# Written by `quire tune`: {tuned.config.metric} {quality} on {quality.count} held-out",
        f"# prompts; {tuned.gain:.2f} times the requests of {tuned.baseline}.",
        f"model = {json.dumps(model)}",
        *([] if dtype == AUTO else [f"dtype = {json.dumps(dtype)}"]),
        "",
        "[kv]",
        f"memory = {kv.memory}",
        f"page_tokens = {kv.page_tokens}",
        f"codec = {json.dumps(tuned.chosen.codec)}",
        f"evict = {json.dumps(tuned.chosen.evict)}",
        *([] if kv.sparse == OFF else [f"sparse = {json.dumps(kv.sparse)}"]),
        *([f"policy_file = {json.dumps(kv.policy_file)}"] if kv.policy_file else []),
    ]
    return "\n".join(lines) + "\n"


def page(tuned: Tuned, model: str, *, has_chart: bool) -> str:
    """The result as Markdown."""
    return "\n".join(_page_lines(tuned, model, has_chart=has_chart)) + "\n"


def _page_lines(tuned: Tuned, model: str, *, has_chart: bool) -> Iterator[str]:
    config, chosen = tuned.config, tuned.chosen
    quality, missed = tuned.held_out[chosen], list(tuned.held_out).index(chosen)
    tried = f" Before it {missed} others missed that on these prompts." if missed else ""
    yield f"# Tuned KV memory of {model}"
    yield ""
    yield (
        f"`{chosen}` holds {tuned.predicted[chosen].rows:,} requests of {tuned.prompt_tokens} "
        f"prompt tokens and {config.max_tokens} output tokens, {tuned.gain:.2f} times the "
        f"{tuned.predicted[tuned.baseline].rows:,} of `{tuned.baseline}`. Its {config.metric} is "
        f"{quality} on {quality.count} prompts that the search did not use (95 % interval); at "
        f"least {config.min_quality} was required.{tried}"
    )
    yield ""
    if has_chart:
        yield f"![Quality against requests]({CHART_FILE})"
        yield ""
    yield "| configuration | requests | KV of a request | prompts | quality | |"
    yield "| --- | ---: | ---: | ---: | ---: | --- |"
    unbeaten = set(pareto_of(tuned))
    for one, (prompts, found) in measured_of(tuned).items():
        predicted = tuned.predicted[one]
        notes = [
            name
            for name, is_so in (("chosen", one == chosen), ("Pareto", one in unbeaten))
            if is_so
        ]
        yield (
            f"| `{one}` | {predicted.rows:,} | {predicted.row_bytes:,} B | {prompts} | {found} | "
            f"{', '.join(notes)} |"
        )
    yield from _held_out_lines(tuned)
    yield from _run_lines(tuned)
    yield from _refused_lines(tuned)


def _held_out_lines(tuned: Tuned) -> Iterator[str]:
    yield ""
    yield "## Held-out prompts"
    yield ""
    for one, found in tuned.held_out.items():
        verdict = "reached" if found.mean >= tuned.config.min_quality else "missed"
        yield f"* `{one}`: {found}, {verdict} on these prompts"
    if tuned.doubt:
        yield ""
        yield tuned.doubt


def _run_lines(tuned: Tuned) -> Iterator[str]:
    if not tuned.runs:
        return
    yield ""
    yield "## Measured in the KV memory"
    yield ""
    yield "| configuration | prompts | at once | output tokens/s | peak KV |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for one, run in tuned.runs.items():
        yield (
            f"| `{one}` | {run.requests} | {run.running_at_once} | {run.tokens_per_s:.0f} | "
            f"{run.kv_peak_bytes:,} B |"
        )


def _refused_lines(tuned: Tuned) -> Iterator[str]:
    if not tuned.refused:
        return
    yield ""
    yield f"## Refused ({len(tuned.refused)})"
    yield ""
    for one, why in list(tuned.refused.items())[:_MAX_REFUSED]:
        yield f"* `{one}`: {why}"


def measured_of(tuned: Tuned) -> dict[SearchCandidate, tuple[int, Mean]]:
    """Number of prompts and quality of each candidate in its last round, by descending requests."""
    last = {
        one: (each.prompts, found)
        for each in tuned.rounds
        for one, found in each.quality.items()
        if one not in tuned.refused
    }
    order = sorted(last, key=lambda one: -tuned.predicted[one].rows)
    return {one: last[one] for one in order}


def pareto_of(tuned: Tuned) -> list[SearchCandidate]:
    """Candidates of the last round that no other beats in quality and requests."""
    quality = tuned.rounds[-1].quality
    rows = {one: found.rows for one, found in tuned.predicted.items()}
    return pareto([one for one in quality if one not in tuned.refused], quality, rows)


def chart(tuned: Tuned) -> bytes:
    """Quality against requests as SVG."""
    return drawn(lambda axes: _draw(axes, tuned))


def _draw(axes: "Axes", tuned: Tuned) -> None:
    quality = tuned.rounds[-1].quality
    early = {
        o: q for each in tuned.rounds[:-1] for o, q in each.quality.items() if o not in quality
    }
    for found, label, colour in (
        (early, "removed early, fewer prompts", "#b0b0b0"),
        (quality, f"{tuned.rounds[-1].prompts} prompts", "#1f5fa8"),
    ):
        shown = [one for one in found if one not in tuned.refused]
        rows = [tuned.predicted[one].rows for one in shown]
        axes.scatter(rows, [found[one].mean for one in shown], label=label, color=colour, s=18)
    unbeaten = pareto_of(tuned)
    rows = [tuned.predicted[one].rows for one in unbeaten]
    axes.plot(rows, [quality[one].mean for one in unbeaten], color="#1f5fa8", linewidth=1)
    axes.axhline(tuned.config.min_quality, color="#444444", linewidth=1, linestyle=":")
    chosen = tuned.predicted[tuned.chosen].rows
    axes.scatter([chosen], [quality[tuned.chosen].mean], color="#d1662b", s=60, label="chosen")
    axes.set(xlabel="requests in the KV memory", ylabel=tuned.config.metric)
    axes.legend(frameon=False)
