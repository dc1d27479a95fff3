"""Draws docs/kvcrush-measured.md and its pictures from runs of `python -m benchmarks kvcrush`.

    python -m benchmarks kvcrush --parts quality --out DIR --json > quality.out
    python docs/make_kvcrush.py quality.out ...       needs quire[report]

The last line of each file is a run; with several files, later ones replace the parts they hold.
What is kept, without its repeats, is docs/results/kvcrush.json; with no file given, the page is
made again from that.
"""

import sys
from pathlib import Path

from benchmarks.common.measured_page import MeasuredPage, Run, last_line, program

DOCS = Path(__file__).resolve().parent
TITLES = {
    "quality": "Rules, and KVCrush around them",
    "sweeps": "One option at a time",
    "fidelity": "Texts read on under a cap",
    "long": "The paper's budget of 2,048 tokens",
    "prompts": "Recorded prompts, in the paper's pages",
    "overhead": "What choosing representatives takes of a run",
    "bytes": "Signatures and keys",
}
TARGETS = {
    "overhead_fraction": "at most 0.005",
    "kmeans_overhead_fraction": "",
    "quality_gain_mean": "above 0",
    "quality_gain_low": "",
    "quality_gain_high": "",
    "quality_gain_one_set_mean": "above 0",
    "quality_gain_one_set_low": "",
    "quality_gain_one_set_high": "",
    "one_set_gain_mean": "",
    "page_gain_mean": "above 0",
    "page_gain_one_set_mean": "above 0",
    "openvino_gain_mean": "above 0",
    "openvino_gain_one_set_mean": "above 0",
    "quality_over_full_best": "at least 0.99",
    "dynamic_share_gain_mean": "",
    "kmeans_gain_mean": "",
    "fidelity_kl_gain_mean": "above 0",
    "fidelity_kl_gain_one_set_mean": "above 0",
    "long_kl_gain_mean": "above 0",
    "long_kl_gain_one_set_mean": "above 0",
    "gsm8k_kl_gain_one_set_mean": "above 0",
    "xsum_kl_gain_one_set_mean": "above 0",
    "key_bits_over_signature_bits": "64",
}


def about(run: Run) -> str:
    """What was run."""
    return (
        f"`python -m benchmarks kvcrush`, {program(run)}. "
        "Quality and fidelity are those of quire-tiny, a "
        "model of 6 million parameters that reads its context and was trained on 2,048 tokens at "
        "most; times are those of random weights. A gain is over the rule alone, whose heads keep "
        "what each wants; `one_set`: over the rule with one kept set for the heads of a layer, "
        "which KVCrush has and the paper's H2O."
    )


PAGE = MeasuredPage(
    name="kvcrush",
    heading="KVCrush, measured",
    script="docs/make_kvcrush.py",
    about=about,
    titles=TITLES,
    targets=TARGETS,
)


def main(arguments: list[str], docs: Path = DOCS) -> None:
    """Keep the numbers of runs, if any are given, and write the page."""
    PAGE.make([last_line(Path(name)) for name in arguments], docs)


if __name__ == "__main__":
    main(sys.argv[1:])
