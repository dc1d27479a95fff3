"""Draws docs/eviction-measured.md and its pictures from runs of the eviction and Batch-Max benches.

    python -m benchmarks batch-max --json > batch-max.out
    python -m benchmarks eviction --json > eviction.out
    python docs/make_eviction.py batch-max.out eviction.out       needs quire[report]

The last line of each file is a run; with several files, later ones replace the parts they hold.
What is kept, without its repeats, is docs/results/eviction.json; with no file given, the page is
made again from that. Parts of the two benches that have one name are told apart here.
"""

import sys
from pathlib import Path

from benchmarks.common.measured_page import MeasuredPage, Run, last_line, program

DOCS = Path(__file__).resolve().parent
BENCHES = {"bench batch-max": "batch-max", "bench eviction": "rules"}
TITLES = {
    "batch-max-speed": "Batch-Max: tokens a second in equal KV memory",
    "batch-max-quality": "Batch-Max: quality over full KV",
    "batch-max-paper": "Batch-Max: the paper's protocol",
    "rules-quality": "Rules, budgets, tasks",
    "rules-perplexity": "Perplexity of texts read on under a cap",
    "rules-kept": "What is kept, by layer and head",
    "rules-cost": "What eviction costs",
    "rules-ready": "What being ready to evict adds to a layer",
}
TARGETS = {
    "bm_over_ed_throughput": "at least 1.5",
    "bm_over_fkv_throughput": "at least 2.2",
    "bm_over_ed_throughput_b1": "",
    "bm_over_fkv_throughput_b1": "",
    "bm_over_ed_throughput_b4": "",
    "bm_over_fkv_throughput_b4": "",
    "bm_quality_over_fkv": "at least 0.975",
    "bm_good_cap_share": "",
    "eviction_cost_share": "under 0.03",
    "statistics_cost_share": "",
    "pressure_recent_cost": "under 0.01",
    "pressure_rule_cost": "under 0.01",
    "equal_arms_difference": "",
    "ready_layer_us": "",
    "ready_equal_layer_us": "",
    "perplexity_full": "",
    "perplexity_random": "",
    "perplexity_recent": "",
    "perplexity_sinks": "",
    "perplexity_h2o": "",
    "perplexity_h2o_sinks": "",
}


def about(run: Run) -> str:
    """What was run."""
    return (
        f"`python -m benchmarks batch-max` and `python -m benchmarks eviction`, {program(run)}. "
        "Quality is that of "
        "quire-tiny, a model of 6 million parameters that reads its context; speed is that of "
        "random weights."
    )


PAGE = MeasuredPage(
    name="eviction",
    heading="Eviction, measured",
    script="docs/make_eviction.py",
    about=about,
    titles=TITLES,
    targets=TARGETS,
)


def named_apart(run: Run) -> Run:
    """A run whose parts say which bench they are of."""
    bench = BENCHES[run["name"]]
    return run | {"arms": {f"{bench}-{name}": part for name, part in run["arms"].items()}}


def main(arguments: list[str], docs: Path = DOCS) -> None:
    """Keep the numbers of runs, if any are given, and write the page."""
    PAGE.make([named_apart(last_line(Path(name))) for name in arguments], docs)


if __name__ == "__main__":
    main(sys.argv[1:])
