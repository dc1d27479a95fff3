"""Draws docs/memory-measured.md and its pictures from runs of the memory bench, and keeps them.

    python -m benchmarks memory --json > memory.out       or --parts swap,beam
    python docs/make_memory.py memory.out        needs quire[report]

The last line of each file is a run, perhaps of some parts: they replace those that are kept, and
the last run says with what it was measured. What is kept, without its repeats, is
docs/results/memory.json; with no file given, the page is made again from that.
"""

import sys
from pathlib import Path

from benchmarks.common.measured_page import MeasuredPage, Run, last_line, program

DOCS = Path(__file__).resolve().parent
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


def about(run: Run) -> str:
    """What was run."""
    return (
        f"`python -m benchmarks memory`, {program(run)}. "
        "Simulated parts (waste, watermarks, prefixes of a "
        "trace, tenants) run the engine's scheduler and memory with a timing model; the others run "
        "the engine."
    )


PAGE = MeasuredPage(
    name="memory",
    heading="KV memory, measured",
    script="docs/make_memory.py",
    about=about,
    titles=TITLES,
    targets=TARGETS,
)


def main(arguments: list[str], docs: Path = DOCS) -> None:
    """Keep the numbers of runs, if any are given, and write the page."""
    PAGE.make([last_line(Path(name)) for name in arguments], docs)


if __name__ == "__main__":
    main(sys.argv[1:])
