"""The command: seeds in shards, resumable; one line of JSON for each seed."""

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from fuzz.case import Case, from_json
from fuzz.draw import draw
from fuzz.run import FAILED, OK, Outcome, run_case

# ---- records -------------------------------------------------------------------------------------

SHOWN_FAILURES = 20


def read(path: Path) -> dict[int, dict]:
    """Recorded seeds; a line that was cut off is left out, and so are summaries."""
    found: dict[int, dict] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "seed" in record:
            found[record["seed"]] = record
    return found


def append(path: Path, outcome: Outcome, case: Case) -> dict:
    record = outcome.as_dict()
    if outcome.outcome != OK or outcome.near_tie:
        record["case"] = json.loads(case.to_json())
    with path.open("a") as lines:
        lines.write(json.dumps(record) + "\n")
    return record


def summary(found: Iterable[dict]) -> dict[str, object]:
    records = list(found)
    outcomes = Counter(record["outcome"] for record in records)
    kinds: Counter[str] = Counter()
    for record in records:
        kinds.update(record["kinds"])
    fine = [record for record in records if record["outcome"] == OK]
    return {
        "seeds": len(records),
        **outcomes,
        "refused_share": round(outcomes["refused"] / max(1, len(records)), 3),
        "near_ties": sum(bool(record["near_tie"]) for record in records),
        "worst_difference": max((r["worst"] for r in fine if r["compared"]), default=0.0),
        "contexts_compared": sum(record["compared"] for record in records),
        "contexts_replayed": sum(record["replayed"] for record in records),
        "steps": sum(record["steps"] for record in records),
        "seconds": round(sum(record["seconds"] for record in records), 1),
        "events": dict(kinds.most_common()),
        "failed_seeds": [r["seed"] for r in records if r["outcome"] == FAILED][:SHOWN_FAILURES],
    }


# ---- command -------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run seeds; the exit status is 1 where one failed."""
    requested = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    if requested.show is not None:
        print(json.dumps(json.loads(draw(requested.show).to_json()), indent=2))
        return 0
    if requested.case is not None:
        outcome = run_case(from_json(requested.case.read_text()))
        print(json.dumps(outcome.as_dict(), indent=2))
        return int(outcome.outcome == FAILED)
    seeds = _seeds(requested.seeds, requested.shard)
    return _run_seeds(seeds, requested.out, time.monotonic() + requested.limit_s)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seeds", default="0:2000", help="first:end, or one seed")
    parser.add_argument(
        "--limit-s", type=float, default=float("inf"), help="stop after this many seconds"
    )
    parser.add_argument("--shard", default="0/1", help="I/N: every N-th seed from the I-th on")
    parser.add_argument(
        "--out", type=Path, default=Path("out/fuzz.jsonl"), help="seeds in this file are skipped"
    )
    parser.add_argument("--show", type=int, metavar="SEED", help="print the case of a seed")
    parser.add_argument("--case", type=Path, metavar="FILE", help="run one case, written as JSON")
    return parser


def _seeds(text: str, shard: str) -> list[int]:
    first, colon, end = text.partition(":")
    seeds = range(int(first), int(end) if colon else int(first) + 1)
    index, _, count = shard.partition("/")
    return [seed for seed in seeds if seed % int(count) == int(index)]


def _run_seeds(seeds: Sequence[int], out: Path, end_s: float) -> int:
    out.parent.mkdir(parents=True, exist_ok=True)
    done = read(out)
    for seed in seeds:
        if seed in done:
            continue
        if time.monotonic() > end_s:
            break
        case = draw(seed)
        outcome = run_case(case)
        done[seed] = append(out, outcome, case)
        if outcome.outcome == FAILED or outcome.near_tie:
            print(f"seed {seed}: {outcome.outcome} {outcome.why}{outcome.near_tie}", flush=True)
    found = summary(done[seed] for seed in seeds if seed in done)
    with out.open("a") as lines:
        lines.write(json.dumps({"summary": found}) + "\n")
    print(json.dumps(found, indent=2))
    return int(bool(found["failed_seeds"]))
