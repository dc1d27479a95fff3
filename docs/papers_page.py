"""Compare the papers' claims about quality with a leaderboard: docs/papers.md.

    bash runs/board.sh                          writes out/board
    python -m docs.papers_page out/board        writes docs/papers.md and docs/results/papers.json

A difference is that of two entries on the same prompts, over full KV's score, as the mean over the
tasks that count. A verdict compares its 95 % interval with the claim.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from docs.board_page import DOCS, MODELS, read
from quire.cli.report import write_files
from quire.errors import ConfigError
from quire.evals.intervals import RESAMPLES, Mean, mean_of_tasks
from quire.evals.suite.perplexity import NLL

FULL = "--kv-codec none --evict full"
LOSS, GAIN, PERPLEXITY = "quality", "gain", "perplexity"

PAPERS = {
    "batch-max": "Batch-Max (Metel et al. 2025)",
    "kvcrush": "KVCrush (Jha et al. 2025)",
    "giant": "KV Cache: The Hidden Memory Giant in LLM Serving",
    "own": "Further comparisons, which no paper states",
}


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of a paper, and the comparison that judges it.

    Attributes:
        paper: key of `PAPERS`.
        text: the claim, with its place in the paper.
        entry: the entry.
        other: what it is compared with.
        measure: LOSS: quality (`other` is full KV); GAIN: difference of both qualities; PERPLEXITY:
            increase of the perplexity of held-out text in percent.
        at_least, at_most: the bound; None: none on this side.
    """

    paper: str
    text: str
    entry: str
    other: str = FULL
    measure: str = LOSS
    at_least: float | None = None
    at_most: float | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """A claim with what was measured; None: an entry has no results."""

    claim: Claim
    found: Mean | None

    @property
    def verdict(self) -> str:
        if self.found is None:
            return "not measured"
        claim, low, high = self.claim, self.found.low, self.found.high
        least = -np.inf if claim.at_least is None else claim.at_least
        most = np.inf if claim.at_most is None else claim.at_most
        if least < low and high < most:  # at the bound nothing differs
            return "holds"
        return "does not hold" if high < least or low > most else "not decided"


def entry_of(rule: str, cap: str = "", when: str = "prefill_end", codec: str = "none") -> str:
    """The text of an entry of the leaderboard."""
    joined = f"{rule}{',' if ':' in rule else ':'}cap={cap},when={when}" if cap else rule
    return f"--kv-codec {codec} --evict {joined}"


def _batch_max() -> list[Claim]:
    both, decode = "prefill_and_decode", "decode"
    text = (
        "Eviction during prefill and decode keeps the accuracy near full KV's (section 4, tables 1 "
        "and 2: 0.96 to 1.01 of it with 896 to 2,176 tokens for inputs of at most 3,584); `{}` at "
        "{}"
    )
    rules = {"average": "batch-max", "recent:sinks=4": "own", "keydiff": "own"}
    other = "Eviction during prefill and decode keeps the accuracy near full KV's; `{}` at {}"
    found = [
        Claim(
            paper,
            (other if paper == "own" else text).format(rule, cap),
            entry_of(rule, cap, both),
            at_least=0.975,
        )
        for rule, paper in rules.items()
        for cap in ("50%", "75%")
    ]
    return found + [
        Claim(
            "own",
            f"Eviction during prefill and decode is at most 0.025 worse than while decoding only; "
            f"`{rule}` at 50%",
            entry_of(rule, "50%", both),
            entry_of(rule, "50%", decode),
            measure=GAIN,
            at_least=-0.025,
        )
        for rule in rules
    ]


def _kvcrush() -> list[Claim]:
    bases = ("h2o_sinks", "average", "tova", "snapkv", "expected_attention")
    gain = "KVCrush scores higher than its base rule with the same cap (section IV-D, F); {} at {}"
    found = [
        Claim(
            "kvcrush",
            gain.format(f"base `{base}`", cap),
            entry_of(f"kvcrush:base={base}", cap),
            entry_of(base, cap),
            measure=GAIN,
            at_least=0.0,
        )
        for base in bases
        for cap in ("25%", "50%")
    ]
    drop = (
        "A quarter of the KV loses less than 1 % of the accuracy (abstract, for the best base of "
        "three); base `{}`"
    )
    return found + [
        Claim("kvcrush", drop.format(base), entry_of(f"kvcrush:base={base}", "25%"), at_least=0.99)
        for base in bases
    ]


def _giant() -> list[Claim]:
    codecs = {"int8": 0.1, "int4": 1.0, "int4_outliers": 0.2, "int2": 5.0}
    table = "Table of KV quantization: perplexity at most {} % higher with `{}`"
    found = [
        Claim(
            "giant",
            table.format(most, codec) + " (there per channel)" * (codec == "int8"),
            entry_of("full", codec=codec),
            measure=PERPLEXITY,
            at_most=most,
        )
        for codec, most in codecs.items()
    ]
    mixed = "int4+sinks=4+residual=64"
    text = "Tokens in full precision beside codes lower the loss: `{}` scores higher than `int4`"
    found.append(
        Claim(
            "own",
            text.format(mixed),
            entry_of("full", codec=mixed),
            entry_of("full", codec="int4"),
            measure=GAIN,
            at_least=0.0,
        )
    )
    order = "Table of eviction rules at a quarter of the KV: `{}` has a lower perplexity than `{}`"
    pairs = (("recent", "recent:sinks=4"), ("recent:sinks=4", "h2o"), ("h2o", "h2o_sinks"))
    return found + [
        Claim(
            "giant",
            order.format(better, worse),
            entry_of(better, "25%", "prefill_and_decode"),
            entry_of(worse, "25%", "prefill_and_decode"),
            measure=PERPLEXITY,
            at_most=0.0,
        )
        for worse, better in pairs
    ]


CLAIMS = (*_batch_max(), *_kvcrush(), *_giant())

Values = Mapping[str, NDArray[np.float64]]
"""Scores of the prompts of each task; the mean negative log-likelihood of each text."""


def scores_of(folder: Path, tokens: int, count: int) -> dict[str, dict[str, NDArray[np.float64]]]:
    """Scores of each entry of the leaderboard's own prompts, not of those that confirm it.

    Raises:
        ConfigError: the folder has results of several runs.
    """
    found: dict[str, dict[str, NDArray[np.float64]]] = {}
    for file in sorted((folder / "cells").glob("*.json")):
        cell = json.loads(file.read_text(encoding="utf-8"))["values"]
        if cell.get("tokens") != tokens or len(cell.get("prompts", ())) != count:
            continue
        scores = [prompt["scores"] for prompt in cell["prompts"] if prompt["scores"]]
        numbers = np.array([next(iter(one.values())) for one in scores], dtype=np.float64)
        name = NLL if NLL in scores[0] else cell["task"]
        if name in found.setdefault(cell["arm"], {}):
            raise ConfigError(
                f"two results of {cell['arm']} on {cell['task']} in {folder}: remove those of "
                "other options, such as another version of the model"
            )
        found[cell["arm"]][name] = numbers
    return found


def measured(claim: Claim, scores: Mapping[str, Values], tasks: Sequence[str]) -> Mean:
    """What a claim is compared with, and its interval."""
    one, other, full = (scores[name] for name in (claim.entry, claim.other, FULL))
    if claim.measure == PERPLEXITY:
        more = one[NLL] - other[NLL]
        drawn = np.random.default_rng(0).integers(len(more), size=(RESAMPLES, len(more)))
        means = 100 * np.expm1(np.array([more.mean(), *more[drawn].mean(axis=1)]))
        low, high = np.percentile(means[1:], [2.5, 97.5])
        return Mean(float(means[0]), float(low), float(high), len(more))

    def scored(values: Values) -> list[NDArray[np.float64]]:
        """Scores of which more is better."""
        return [np.exp(-values[task]) if task == NLL else values[task] for task in tasks]

    pairs = list(zip(scored(one), scored(full), strict=True))
    return mean_of_tasks(pairs, scored(other) if claim.measure == GAIN else None)


def page(judged: Sequence[Judged], model: str, about: str) -> str:
    """The text of the page."""
    lines = [
        "<!-- Written by docs/papers_page.py -->",
        "",
        "# The papers' claims about quality, on one model",
        "",
        "Claims of papers that Quire implements, compared with the [leaderboard]"
        f"(board-measured.md) of {model}. {about}",
        "",
        "* **Quality** is the mean over the leaderboard's tasks of the score over full KV's. "
        "**Gain** is a difference of two qualities. **Perplexity** is its increase on held-out "
        "text in percent, as the geometric mean over the texts.",
        "* **Bound**: that of the claim. Batch-Max's text has none for `near`; here it is 0.975, "
        "between the paper's 0.96 and 1.01.",
        "* **Verdict**: `holds` if the whole paired 95 % interval is on the claimed side of the "
        "bound, `does not hold` if none of it is, else `not decided`. Each "
        f"interval misses the true value in one of 20 cases, and the page has {len(judged)}.",
        "* The papers measured larger models on other data. A claim that does not hold here may "
        "hold there: measure your model with [`quire board`](guides/evaluate.md#leaderboard).",
        "",
    ]
    for key, paper in PAPERS.items():
        own = [one for one in judged if one.claim.paper == key]
        lines += [
            f"## {paper}",
            "",
            "| claim | measure | bound | here | verdict |",
            "| --- | --- | ---: | ---: | --- |",
        ]
        lines += [_line(one) for one in own]
        lines.append("")
    lines += [
        "Claims of these papers and of KVPR and BATON about bytes and time: [memory]"
        "(memory-measured.md), [eviction](eviction-measured.md), [offload](offload-measured.md), "
        "[re-batching](rebatch-measured.md). The tests in `tests/papers` recompute the papers' "
        "worked numbers.",
    ]
    return "\n".join(lines) + "\n"


def _line(one: Judged) -> str:
    claim, found = one.claim, one.found
    digits = 2 if claim.measure == PERPLEXITY else 3
    sign = "+" if claim.measure != LOSS else ""
    unit = " %" if claim.measure == PERPLEXITY else ""
    here = "none"
    if found is not None:
        ends = f"[{found.low:.{digits}f}, {found.high:.{digits}f}]"
        here = f"{found.mean:{sign}.{digits}f}{unit} {ends}"
    bound = f"≥ {claim.at_least:g}" if claim.at_least is not None else f"≤ {claim.at_most:g}{unit}"
    return f"| {claim.text} | {claim.measure} | {bound} | {here} | {one.verdict} |"


def main(folder: Path, docs: Path = DOCS) -> None:
    """Write the page and its numbers from the folder of a leaderboard."""
    run = read(folder, "board.json")
    config = run["config"]
    count = config["num_prompts"] * len(config["seeds"])
    scores = scores_of(folder, config["tokens"], count)
    tasks = [NLL if task == "perplexity" else task for task in run["arms"]["judged_tasks"]]
    if not tasks:
        raise ConfigError("no task of the leaderboard counts, so there is no quality to judge by")
    known = {name for name, own in scores.items() if {*tasks, NLL} <= own.keys()}
    judged = [
        Judged(c, measured(c, scores, tasks) if {c.entry, c.other} <= known else None)
        for c in CLAIMS
    ]
    model = MODELS.get(config["model"], config["model"])
    about = (
        f"{count} prompts of {config['tokens']:,} tokens of each task, commit "
        f"{run['commit'][:7]}. `python -m docs.papers_page out/board` makes this page."
    )
    interval = ("mean", "low", "high", "count")
    numbers = [
        asdict(one.claim)
        | {name: getattr(one.found, name, None) for name in interval}
        | {"verdict": one.verdict}
        for one in judged
    ]
    files = {
        "papers.md": page(judged, model, about).encode(),
        "results/papers.json": (json.dumps(numbers, indent=1) + "\n").encode(),
    }
    write_files(docs, files)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
