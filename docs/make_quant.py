"""Draws docs/quant-measured.md and its pictures from runs of `python -m benchmarks quant`.

    python -m benchmarks quant --parts quality --out DIR --json > quality.out
    python docs/make_quant.py quality.out ...       needs quire[report]

The last line of each file is a run; with several files, later ones replace the parts they hold.
What is kept, without its repeats, is docs/results/quant.json; with no file given, the page is
made again from that.
"""

import sys
from pathlib import Path

from benchmarks.common.measured_page import MeasuredPage, Run, last_line, program

DOCS = Path(__file__).resolve().parent
TITLES = {
    "capacity": "Tokens in the same bytes",
    "attention": "Attention of a decoding batch",
    "throughput": "Decoding at the largest batch of one KV memory",
    "bandwidth": "Decoding by batch",
    "quality": "Texts and tasks",
    "orderings": "Where the bits should go",
    "eviction": "Fewer tokens or fewer bits, in the same bytes",
}
TARGETS = {
    "int8_attention_speedup": "at least 1.5",
    "int4_attention_speedup": "at least 2",
    "int8_over_read_ceiling": "at least 0.6",
    "int4_over_read_ceiling": "",
    "bfloat16_over_read_ceiling": "",
    "int8_capacity_ratio": "at least 1.88",
    "int4_capacity_ratio": "at least 3.4",
    "int4_outliers_capacity_ratio": "at least 3",
    "int8_net_capacity_ratio": "",
    "int4_net_capacity_ratio": "",
    "int4_outliers_net_capacity_ratio": "",
    "int8_kept_capacity_ratio": "",
    "int4_kept_capacity_ratio": "",
    "int8_gain_max_batch": "1.26 in the article",
    "int4_gain_max_batch": "1.43 in the article",
    "int8_gain_same_batch": "",
    "int4_gain_same_batch": "",
    "int8_kl": "",
    "int4_kl": "",
    "int8_perplexity_change": "below 0.001",
    "int4_perplexity_change": "",
    "int4_outliers_perplexity_change": "",
    "channel_over_token_keys_4": "below 1",
    "channel_over_token_keys_2": "below 1",
    "key_over_value_bits_8_4": "below 1",
    "key_over_value_bits_4_2": "below 1",
    "outliers_over_none_4": "below 1",
    "mixed_over_uniform_25": "below 1",
    "mixed_over_uniform_15": "below 1",
    "int8_over_plain_25": "",
    "int8_over_plain_15": "",
}


def about(run: Run) -> str:
    """What was run."""
    return (
        f"`python -m benchmarks quant`, {program(run)}. "
        "Quality is that of quire-tiny, a model of 6 million "
        "parameters that reads its context and was trained on 2,048 tokens at most: small models "
        "bear less than large ones. Times are those of random weights. `net`: pages and their "
        "tables counted; `kept`: with the tokens beside them that stay as they were made. Of two "
        "codecs, `A_over_B` is the KL of the first over the second's."
    )


PAGE = MeasuredPage(
    name="quant",
    heading="KV in codes, measured",
    script="docs/make_quant.py",
    about=about,
    titles=TITLES,
    targets=TARGETS,
)


def main(arguments: list[str], docs: Path = DOCS) -> None:
    """Keep the numbers of runs, if any are given, and write the page."""
    PAGE.make([last_line(Path(name)) for name in arguments], docs)


if __name__ == "__main__":
    main(sys.argv[1:])
