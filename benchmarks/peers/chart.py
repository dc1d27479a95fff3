"""The README's chart: requests at once and tokens per second of engines in equal KV bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.sim.plots import drawn_figure

PART = "125m fixed:32x512+256"
NAMES = {
    "hf_static": "Transformers",
    "vllm": "vLLM",
    "openvino": "OpenVINO GenAI",
    "quire": "Quire",
    "openvino_evict": "OpenVINO GenAI,\neviction",
    "quire_evict": "Quire, eviction",
}
_OWN, _OTHER = "#1a7f5a", "#9aa3ad"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Numbers of one engine.

    Attributes:
        engine: name among the engines.
        at_once: requests between their first and their last token.
        tokens_per_s: generated tokens per second, prefill included.
        kv_bytes: KV memory.
    """

    engine: str
    at_once: int
    tokens_per_s: float
    kv_bytes: int


def bars(run: Mapping[str, Any]) -> list[Bar]:
    """Numbers of the engines with a fixed KV memory in a stored run, in the order of NAMES."""
    if PART not in run["arms"]:
        return []
    [table] = run["arms"][PART]["tables"]
    rows = {row[0]: dict(zip(table["columns"], row, strict=True)) for row in table["rows"]}
    return [
        Bar(
            engine=name,
            at_once=int(rows[name]["at once"]),
            tokens_per_s=rows[name]["tokens/s"],
            kv_bytes=round(rows[name]["KV MB"] * 1e6),
        )
        for name in NAMES
        if name in rows and not rows[name]["error"]
    ]


def chart_svg(found: Sequence[Bar]) -> bytes:
    """Draw two groups of bars."""
    return drawn_figure(lambda figure: _draw(figure, found))


def _draw(figure: Any, found: Sequence[Bar]) -> None:
    figure.set_size_inches(8, 0.6 + 0.38 * len(found))
    left, right = figure.subplots(1, 2, sharey=True)
    own = [bar.engine.startswith("quire") for bar in found]
    colours = [_OWN if is_own else _OTHER for is_own in own]
    names = [NAMES[bar.engine] for bar in found]
    for axes, title, values in (
        (left, "requests generating at once", [float(bar.at_once) for bar in found]),
        (right, "tokens per second", [bar.tokens_per_s for bar in found]),
    ):
        drawn = axes.barh(names, values, color=colours, height=0.62)
        axes.bar_label(drawn, [f"{value:,.0f}" for value in values], padding=3, fontsize=9)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlim(0, max(values) * 1.18)
        axes.set_xticks([])
        for side in ("top", "right", "bottom"):
            axes.spines[side].set_visible(False)
    left.invert_yaxis()
    left.tick_params(labelsize=9)
