"""Draws docs/offload-measured.md and its pictures from runs of `python -m benchmarks offload`.

    python -m benchmarks offload --parts arms --out DIR --json > arms.out
    python docs/make_offload.py arms.out ...       needs quire[report]

The last line of each file is a run; with several files, later ones replace the parts they hold.
What is kept, without its repeats, is docs/results/offload.json; with no file given, the page is
made again from that.
"""

import sys
from pathlib import Path

from benchmarks.common.measured_page import MeasuredPage, Run, last_line, program

DOCS = Path(__file__).resolve().parent
TITLES = {
    "arms": "Arms beside each other",
    "sweep": "Every rho and xi",
    "host": "Attention on the host",
    "refit": "A link that changes",
    "restore": "Bringing a prefix back",
    "engine_restore": "Bringing a prefix back, in an engine",
    "latency": "Whole models, weights on the device",
    "weights": "Weights on the link too",
    "codec": "Codes on the wire",
    "position": "Splits over a generation",
    "engine": "In the engine",
}
TARGETS = {
    "gain_lB_over_prefetch": "at least 1.46",
    "gain_lB_over_prefetch_formula": "",
    "latency_cut_lA": "at least 0.28",
    "latency_cut_lA_formula": "",
    "gain_lB_over_lA": "at least 1.1",
    "device_busy_fraction": "at least 0.95",
    "model_error_p95": "at most 0.15",
    "staging_bytes_over_prefetch": "at most 1.05",
    "output_error": "",
    "never_slower": "1",
    "slowest_over_prefetch": "at most 1.05",
    "slowest_over_prefetch_virtual": "at most 1",
    "gain_host_attention": "",
    "gain_host_attention_off_formula": "at most 0.1",
    "host_merge_error": "at most 1e-5",
    "refit_steps": "at most 10",
    "restore_gain_vs_load": "",
    "restore_gain_vs_load_10gb": "",
    "restore_over_alone": "at most 1.02",
    "restore_over_alone_10gb": "at most 1.02",
    "engine_restore_gain_vs_load": "",
    "engine_restore_gain_vs_load_10gb": "",
    "engine_restore_over_alone": "",
    "engine_restore_over_alone_10gb": "",
    "h200_gain_lB_over_prefetch": "",
    "rtx5000_gain_lB_over_prefetch": "",
    "prefill_overhead_fraction": "at most 0.02",
    "engine_auto_over_off": "",
    "engine_hosted_bytes": "",
}


def about(run: Run) -> str:
    """What was run."""
    return (
        f"`python -m benchmarks offload`, {program(run)}. "
        "On threads products and copies are real; link and "
        "device are padded until their ratios are those of larger machines, so gains carry over "
        "and times do not. Tables of whole models are arithmetic on data sheets, carried out by "
        "the same schedules on a virtual clock. How all this works: [offload.md](offload.md)."
    )


PAGE = MeasuredPage(
    name="offload",
    heading="KV that is not on the device, measured",
    script="docs/make_offload.py",
    about=about,
    titles=TITLES,
    targets=TARGETS,
)


def main(arguments: list[str], docs: Path = DOCS) -> None:
    """Keep the numbers of runs, if any are given, and write the page."""
    PAGE.make([last_line(Path(name)) for name in arguments], docs)


if __name__ == "__main__":
    main(sys.argv[1:])
