"""Draws docs/roofline.md and its picture from a run of the throughput bench, and keeps that run.

    python -m benchmarks throughput --json > throughput.out
    python docs/make_roofline.py throughput.out        needs quire[report]

The last line of the file is the run. It is kept, without its rounds, as
docs/results/throughput.json; with no file given, the page is made again from what was kept.
"""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.throughput.page import COLUMNS, Roofline, ceiling_words, cells, roofline_from, svg

DOCS = Path(__file__).resolve().parent
HEADER = "<!-- Written by docs/make_roofline.py. Run it again, do not change this file. -->\n\n"
ARMS = {
    "quire": "Quire",
    "hf_static": "Transformers, static batch",
    "hf_cb": "Transformers, continuous batching, best settings found",
    "hf_cb_default": "Transformers, continuous batching, default settings",
}
TARGETS = {
    "total_ratio_vs_hf_static": "at most 0.7",
    "total_ratio_vs_hf_cb": "at most 0.2",
    "decode_step_over_floor": "at most 2.5",
    "attention_over_read_ceiling": "at least 0.6",
    "statistics_overhead": "at most 0.15",
    "gathered_over_native": "",
}


def main(arguments: list[str], docs: Path = DOCS) -> None:
    """Keep the numbers of a run, if one is given, and write the page."""
    kept = docs / "results" / "throughput.json"
    if arguments:
        run = json.loads(Path(arguments[0]).read_text(encoding="utf-8").splitlines()[-1])
        run["arms"] = {"parts": run["arms"]["parts"]}
        kept.write_text(json.dumps(run, indent=2) + "\n", encoding="utf-8")
    run = json.loads(kept.read_text(encoding="utf-8"))
    roofline = roofline_from(run)
    (docs / "images" / "roofline.svg").write_text(svg(roofline), encoding="utf-8")
    (docs / "roofline.md").write_text(document(run, roofline), encoding="utf-8")


def document(run: dict[str, Any], roofline: Roofline) -> str:
    """The page as Markdown."""
    claims = run["claims"]
    arms = [
        (
            words,
            f"{claims[f'{arm}_total_s']:.2f}",
            f"{claims[f'{arm}_prefill_s']:.2f}",
            f"{claims[f'{arm}_decode_step_s'] * 1e3:.1f}",
            f"{claims[f'{arm}_tokens_per_s']:,.0f}",
            f"{claims[f'{arm}_kv_bytes'] / 1e6:,.1f}",
            f"{claims[f'{arm}_mean_regret']:.4f}",
        )
        for arm, words in ARMS.items()
        if f"{arm}_total_s" in claims
    ]
    reached = [
        (f"`{name}`", f"{claims[name]:.3f}", target)
        for name, target in TARGETS.items()
        if name in claims
    ]
    parts = [
        f"\n## {measure.kind.capitalize()}: {measure.tokens:,.0f} tokens in a step\n\n"
        + table(COLUMNS, cells(measure, roofline))
        for measure in roofline.measures
    ]
    return (
        f"{HEADER}# Where the time of a step goes\n\n{roofline.about}. Medians of "
        f"{run['config']['repeats']} rounds in which all arms take turns.\n\n"
        + table(
            ("arm", "total s", "prefill s", "decode step ms", "tokens/s", "KV MB", "regret"), arms
        )
        + "\nRegret: how far the chosen tokens' logits lie below the best ones when the same\n"
        "weights in float32 read the answers; in bfloat16 right programs part at near ties, so\n"
        "that texts cannot be compared.\n\n"
        + table(("claim", "reached", "wanted"), reached)
        + f"\n{ceiling_words(roofline)}\n\n"
        "![Rates reached by each part, under the ceilings](images/roofline.svg)\n"
        + "".join(parts)
        + "\nThe parts are timed in a run of their own; `rest` is norms, rotations and residuals,\n"
        "`engine` is scheduler, tables and sampling.\n"
    )


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


if __name__ == "__main__":
    main(sys.argv[1:])
