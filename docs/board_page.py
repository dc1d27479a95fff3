"""Copy the leaderboard to the documents.

    bash runs/board.sh                          writes out/board
    bash runs/kvpress.sh                        writes out/kvpress
    python -m docs.board_page out/board --kvpress out/kvpress
                                                writes docs/board-measured.md, chart and rows

Further words are added to the line about the machine. Files such as docs/results/board.json can be
named instead of folders.
"""

import json
import statistics
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kvpress.run import Pair, PressRun, press_lines
from quire.cli.report import write_files
from quire.evals.board import pages
from quire.evals.board.result import BoardResult
from quire.evals.suite.registry import task_of

DOCS = Path(__file__).resolve().parent
NAME = "board"
HEADING = "Leaderboard of eviction rules and codecs, measured with"
MODELS = {"smollm2": "SmolLM2-135M-Instruct"}
DUO = (
    "[`budget=duo`](eviction.md#division-over-layers-and-heads-budget) needs retrieval scores of "
    "the model's heads. Those of `smollm2` fit no other model. They were measured with needles in "
    "the wording of `niah`, so `niah` is no new task for them."
)


def main(arguments: Sequence[str], docs: Path = DOCS) -> None:
    """Write page, chart and rows of a run of `quire board`."""
    parser = ArgumentParser(prog="python -m docs.board_page")
    parser.add_argument("run", type=Path, help="folder of quire board, or its JSON file")
    parser.add_argument("note", nargs="*", help="words about the machine")
    parser.add_argument("--kvpress", type=Path, help="folder of the benchmark kvpress, or its file")
    chosen = parser.parse_intermixed_args(arguments)
    run = read(chosen.run, "board.json")
    result = BoardResult.stored(run)
    presses = None if chosen.kvpress is None else read(chosen.kvpress, "kvpress.json")
    confirmed = [BoardResult.stored(each) for each in run["arms"].get("confirmed", ())]
    section = [] if presses is None else kvpress_lines(presses)
    model = run["config"]["model"]
    timed = docs / "results/fixed_memory.json"
    speeds = speeds_of(json.loads(timed.read_text())) if timed.exists() else None
    text = pages.page(
        result, model, has_chart=True, confirmed=confirmed, section=section, speeds=speeds
    )
    files = {
        f"{NAME}-measured.md": page(text, run, " ".join(chosen.note)).encode(),
        f"images/{NAME}.svg": pages.chart(result),
        f"results/{NAME}.json": (json.dumps(run, indent=1) + "\n").encode(),
    }
    if presses is not None:
        files["results/kvpress.json"] = (json.dumps(presses, indent=1) + "\n").encode()
    write_files(docs, files)


def read(path: Path, name: str) -> dict[str, Any]:
    """The JSON object of a run: a file, or the named file of a folder."""
    file = path / name if path.is_dir() else path
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def speeds_of(run: Mapping[str, Any]) -> pages.Speeds:
    """Tokens/s of a run of benchmarks/guides/fixed_memory.py over full KV's of the same round."""
    config, hardware = run["config"], run["hardware"]
    speeds = {
        one["entry"]: [each["tokens_per_s"] for each in one["runs"]] for one in run["arms"]["runs"]
    }
    full = next(iter(speeds.values()))
    ratios = {}
    for entry, own in speeds.items():
        found = [one / base for one, base in zip(own, full, strict=True)]
        ratios[entry] = (statistics.median(found), min(found), max(found))
    about = (
        f"Tokens/s: output tokens/s of {config['requests']} requests of {config['prompt_tokens']:,}"
        f" input and {config['output_tokens']} output tokens, submitted at once in "
        f"{config['kv_memory']} of KV memory, over full KV's of the same round; median, lowest and "
        f"highest of {config['rounds']} rounds (`bash runs/fixed_memory.sh`, commit "
        f"{run['commit'][:7]}, {hardware['cpu']}, {hardware['cores']} cores)."
    )
    return pages.Speeds(ratios=ratios, about=about)


def kvpress_lines(run: Mapping[str, Any]) -> list[str]:
    """The section about a run of the benchmark kvpress."""
    about, hardware, config = dict(run["arms"]["presses"]), run["hardware"], run["config"]
    about["pairs"] = [Pair.stored(one) for one in about["pairs"]]
    heading, *lines = press_lines(BoardResult.stored(run).rows, PressRun(**about))
    return [
        heading,
        "",
        f"`bash runs/kvpress.sh`, commit {run['commit'][:7]}, {hardware['cpu']}, "
        f"{hardware['cores']} cores, {config['loading']['dtype']}, {config['tokens']:,} tokens, "
        f"{config['num_prompts']} prompts of each of {', '.join(config['tasks'])}.",
        *lines,
    ]


def page(text: str, run: Mapping[str, Any], note: str = "") -> str:
    """The page of a run under its own heading, with the command and the machine."""
    _, _, rest = text.partition("\n")
    config, hardware = run["config"], run["hardware"]
    made = (
        f"`bash runs/{NAME}.sh` ([guide](guides/evaluate.md#leaderboard)), "
        f"commit {run['commit'][:7]}, "
        f"torch {run['versions']['torch']}, {hardware['cpu']}, {hardware['cores']} cores, "
        f"{config['loading']['dtype']}, {config['kv']['memory']:,} B of KV memory. {note}"
    )
    rest = rest.replace(f"]({pages.CHART_FILE})", f"](images/{NAME}.svg)")
    tasks = (f"`{one}` ({task_of(one).summary})" for one in config["tasks"])
    about = (
        f"[Tasks](guides/evaluate.md): {'; '.join(tasks)}. [Rules and budgets]"
        "(reference/policies.md) and [codecs](quantization.md) have their default options unless "
        "an option is named."
    )
    if any("duo:" in row["entry"]["rule"] for row in run["arms"]["rows"]):
        about += f" {DUO}"
    model = MODELS.get(config["model"], config["model"])
    return f"# {HEADING} {model}\n\n{made.rstrip()}\n\n{about}\n{rest}"


if __name__ == "__main__":
    main(sys.argv[1:])
