"""Draws docs/memory-measured.md and its pictures from runs of the memory bench, and keeps them.

    quire bench memory --json > memory.out       or --parts swap,beam
    python docs/make_memory.py memory.out        needs quire[report]

The last line of each file is a run, perhaps of some parts: they replace those that are kept, and
the last run says with what it was measured. What is kept, without its repeats, is
docs/results/memory.json; with no file given, the page is made again from that.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.bench.memory.charts import svg
from quire.bench.memory.result import PartResult
from quire.bench.memory.tables import markdown

DOCS = Path(__file__).resolve().parent
HEADER = "<!-- Written by docs/make_memory.py. Run it again, do not change this file. -->\n\n"
TITLES = {
    "waste": "Waste, by store",
    "pages": "The size of pages",
    "watermarks": "Watermarks",
    "beam": "Beams",
    "swap": "Swap or recompute",
    "prefix": "A system prompt in front of many requests",
    "cache": "With and without a KV cache",
    "allocator": "What the allocator costs",
    "reuse": "Prefixes in a recorded trace",
    "fairness": "Two tenants",
}
TARGETS = {
    "paged_waste_fraction": "at most 0.02",
    "contiguous_waste_fraction_4096": "",
    "contiguous_waste_fraction_8192": "",
    "contiguous_waste_fraction_own": "",
    "watermark_best": "",
    "throughput_best_over_98": "",
    "beam4_memory_ratio": "at most 1.10",
    "swap_recompute_breakeven_tokens": "",
    "prefix_prefill_saved_fraction": "at least 0.95",
    "cache_speedup_4096": "",
    "allocator_step_share": "under 0.02",
    "mooncake_hit_fraction_unbounded": "within 0.01 of what the trace repeats",
    "mooncake_reusable_block_fraction": "",
    "mooncake_reusable_token_fraction": "",
    "fairness_jain": "at least 0.98",
    "small_tenant_p99_queue_over_limit": "at most 1",
}


def main(arguments: list[str], docs: Path = DOCS) -> None:
    """Keep the numbers of runs, if any are given, and write the page."""
    kept = docs / "results" / "memory.json"
    if arguments:
        before = [json.loads(kept.read_text(encoding="utf-8"))] if kept.exists() else []
        runs = [*before, *(_last_line(Path(name)) for name in arguments)]
        kept.write_text(json.dumps(merged(runs), indent=2) + "\n", encoding="utf-8")
    run = json.loads(kept.read_text(encoding="utf-8"))
    parts = {
        name: PartResult.from_json(run["arms"][name]) for name in TITLES if name in run["arms"]
    }
    for part in parts.values():
        for chart in part.charts:
            (docs / "images" / f"measured-{chart.name}.svg").write_bytes(svg(chart))
    (docs / "memory-measured.md").write_text(document(run, parts), encoding="utf-8")


def merged(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One run with the parts of all, the last one's where several have it; without repeats."""
    arms: dict[str, Any] = {}
    claims: dict[str, Any] = {}
    for run in runs:
        for name, part in run["arms"].items():
            arms[name] = {key: value for key, value in part.items() if key != "raw"}
            claims |= part["claims"]
    return runs[-1] | {"claims": claims, "arms": arms}


def document(run: dict[str, Any], parts: dict[str, PartResult]) -> str:
    """The page as Markdown."""
    return "".join(
        (HEADER, "# KV memory, measured\n\n", _about(run), *_claims(run), *_parts(parts))
    )


def _about(run: dict[str, Any]) -> str:
    return (
        f"`quire bench memory`, Quire {run['versions']['quire']} at commit {run['commit']}, torch "
        f"{run['versions']['torch']}, {run['hardware']['cpu']}, {run['config']['threads']} "
        "threads. Simulated parts (waste, watermarks, prefixes of a trace, tenants) run the "
        "engine's scheduler and memory with a timing model; the others run the engine.\n\n"
    )


def _claims(run: dict[str, Any]) -> Iterator[str]:
    yield "| claim | reached | wanted |\n| --- | ---: | --- |\n"
    for name, wanted in TARGETS.items():
        if name in run["claims"]:
            yield f"| `{name}` | {run['claims'][name]:.4g} | {wanted} |\n"


def _parts(parts: dict[str, PartResult]) -> Iterator[str]:
    for name, part in parts.items():
        yield f"\n## {TITLES[name]}\n\n"
        yield "\n".join(markdown(table) for table in part.tables)
        for chart in part.charts:
            yield f"\n![{chart.title}](images/measured-{chart.name}.svg)\n"


def _last_line(path: Path) -> dict[str, Any]:
    run: dict[str, Any] = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
    return run


if __name__ == "__main__":
    main(sys.argv[1:])
