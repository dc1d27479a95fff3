"""Output tokens/s in one KV memory with the best entries of a leaderboard: a column of its page.

    python -m benchmarks.guides.fixed_memory docs/results/board.json

All requests are submitted at once: windows of the packaged books, without a prefix cache. Every
round runs each entry once, full KV first. The last line of output is one JSON object.
"""

import json
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from quire.cli.report import envelope
from quire.config.kv_config import KVConfig
from quire.evals.board.grid import BoardEntry
from quire.evals.board.pages import LISTED
from quire.evals.board.result import BoardResult, best_of_classes
from quire.evals.tasks.words import book_text
from quire.evals.tune.run import MeasuredRun, measured_run
from quire.models.loader import LoadedModel, load_model
from quire.models.tokenizer import encode_prompt
from quire.scheduler.schedule_config import ScheduleConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedMemoryConfig:
    """Requests and memory of all entries.

    Attributes:
        kv_memory: size of the KV memory: about four requests with full KV of SmolLM2 in bfloat16.
        requests: number of requests.
        prompt_tokens, output_tokens: lengths of each.
        rounds: runs of each entry.
    """

    kv_memory: str = "108MiB"
    requests: int = 16
    prompt_tokens: int = 1_024
    output_tokens: int = 128
    rounds: int = 5


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the result as one line of JSON."""
    parsed = _parse(arguments)
    config = FixedMemoryConfig(rounds=parsed.rounds)
    run = json.loads(parsed.board.read_text(encoding="utf-8"))
    board, model = BoardResult.stored(run), load_model(run["config"]["model"])
    entries = [board.reference.entry, *best_of_classes(board.rows, LISTED)]
    runs = measured(config, model, list(dict.fromkeys(entries)))
    found = envelope("fixed_memory", claims_of(runs), {"runs": _rows(runs)}, asdict(config))
    print(json.dumps(found))


def measured(
    config: FixedMemoryConfig, model: LoadedModel, entries: Sequence[BoardEntry]
) -> dict[BoardEntry, list[MeasuredRun]]:
    """Run the entries in turn, each in an engine of its own."""
    ids = encode_prompt(model.require_tokenizer(), book_text())
    size = config.prompt_tokens
    prompts = [ids[begin : begin + size] for begin in range(0, config.requests * size, size)]
    found: dict[BoardEntry, list[MeasuredRun]] = {entry: [] for entry in entries}
    schedule = ScheduleConfig()
    for _ in range(config.rounds):
        for entry, runs in found.items():
            kv = entry.applied(KVConfig(memory=config.kv_memory))
            tokens = config.output_tokens
            runs.append(measured_run(model, kv, schedule, prompts, new_tokens=tokens, repeats=1))
    return found


def claims_of(runs: Mapping[BoardEntry, Sequence[MeasuredRun]]) -> dict[str, int | float]:
    """Output tokens/s of each entry over full KV's of the same round; medians."""
    full = next(iter(runs.values()))
    return {
        str(entry): statistics.median(
            one.tokens_per_s / base.tokens_per_s for one, base in zip(own, full, strict=True)
        )
        for entry, own in runs.items()
    }


def _rows(runs: Mapping[BoardEntry, Sequence[MeasuredRun]]) -> list[dict[str, object]]:
    return [{"entry": str(entry), "runs": list(map(asdict, own))} for entry, own in runs.items()]


def _parse(arguments: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("board", type=Path, help="JSON file of quire board")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
