"""Draws docs/rebatch-measured.md and its pictures from runs of `python -m benchmarks rebatch`.

    python -m benchmarks rebatch --out DIR --json > rebatch.out
    python docs/make_rebatch.py rebatch.out ...       needs quire[report]

The last line of each file is a run; with several files, later ones replace the parts they hold.
What is kept, without its repeats, is docs/results/rebatch.json; with no file given, the page is
made again from that.
"""

import sys
from pathlib import Path

from benchmarks.common.measured_page import MeasuredPage, Run, last_line, program

DOCS = Path(__file__).resolve().parent
TITLES = {
    "w1": "Long and short queries (workload 1)",
    "w2": "Short queries (workload 2)",
    "trace": "A recorded trace, urgent requests, little memory",
}
_BOUND, _PEAK = "at least 0.9", "at most 1"
TARGETS = {
    "w1_batonpd_over_bound_b4": _BOUND,
    "w1_batonpd_over_bound_b8": _BOUND,
    "w1_bound_b4": "",
    "w1_bound_b8": "",
    "w1_batonpd_over_static_b4": "1.86 in the paper",
    "w1_batonpd_over_static_b8": "2.49 in the paper",
    "w1_batonpd_over_baton_shaping": "",
    "w1_baton_shaping_answered_b8": "",
    "w1_continuous_over_static_b8": "",
    "w1_batonpd_idle_fraction": "below 0.02",
    "w1_batonpd_peak_over_static_b4": _PEAK,
    "w1_batonpd_peak_over_static_b8": _PEAK,
    **{f"w2_batonpd_over_bound_b{batch}": _BOUND for batch in (2, 4, 6, 8, 10)},
    **{
        f"w2_batonpd_over_static_b{batch}": f"{paper} in the paper"
        for batch, paper in ((2, 1.94), (4, 1.89), (6, 1.66), (8, 1.61), (10, 1.31))
    },
    **{f"w2_bound_b{batch}": "" for batch in (2, 4, 6, 8, 10)},
    "w2_batonpd_idle_fraction": "below 0.02",
    **{f"w2_batonpd_peak_over_static_b{batch}": "" for batch in (2, 4, 6, 8, 10)},
    "trace_batonpd_over_static_first_p99": "",
}


def about(run: Run) -> str:
    """What was run."""
    config = run["config"]
    return (
        f"`python -m benchmarks rebatch`, {program(run)}. "
        f"Random weights ({config['model']}), float32; "
        "answers have fixed lengths. The bound is ideal first-come list scheduling of the same "
        "lengths on as many rows, at the costs measured in the same round: `over_bound` is its "
        "makespan over that of `baton_pd`, `bound` what it would gain over static batches. What "
        "the words mean and where this differs from the paper: [rebatching](rebatching.md)."
    )


PAGE = MeasuredPage(
    name="rebatch",
    heading="Batches that change, measured",
    script="docs/make_rebatch.py",
    about=about,
    titles=TITLES,
    targets=TARGETS,
)


def main(arguments: list[str], docs: Path = DOCS) -> None:
    """Keep the numbers of runs, if any are given, and write the page."""
    PAGE.make([last_line(Path(name)) for name in arguments], docs)


if __name__ == "__main__":
    main(sys.argv[1:])
