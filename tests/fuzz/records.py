"""One line of JSON for each seed, and what they come to."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from fuzz.case import Case
from fuzz.run import FAILED, OK, Outcome

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
    """Write what came of a seed; with its case where it is of interest."""
    record = outcome.as_dict()
    if outcome.outcome != OK or outcome.near_tie:
        record["case"] = json.loads(case.to_json())
    with path.open("a") as lines:
        lines.write(json.dumps(record) + "\n")
    return record


def summary(records: Iterable[dict]) -> dict[str, object]:
    """What the seeds come to."""
    records = list(records)
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
