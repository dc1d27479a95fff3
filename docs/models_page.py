"""Generates docs/reference/models.md from the results of `python -m tests.models.sweep`."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

RESULTS = Path("docs/results/models.json")
INTRODUCTION = """# Model types

This page is generated from a run of `python -m tests.models.sweep`: a tiny random model of every
type that Transformers {transformers} has a causal language model for, built from the type's config
class, with at least two layers of each kind. `python -m tests.models.sweep TYPE` repeats a type.

Prompts have 300 tokens and outputs 40, in float32. In these cases, logits differ from Transformers'
own by at most 1e-3 of the largest logit, and tokens are the same. Transformers computes the prompt
in one call, then single tokens:

| case | two requests with the same first 208 tokens |
|---|---|
| ample | together, in ample KV memory, each prompt in one chunk |
| tight | one is preempted, and its KV is recomputed |
| chunks of 7, chunks of 64 | prompts are prefilled in chunks of this many tokens |
| prefix | the second finds the first one's prefix in the prefix cache |
| swap | one is swapped out and in again |
| n=2 | two sampled outputs of one prompt; Transformers computes their tokens in one call |

In these cases of types with recurrent states, the same holds:

| case | what runs |
|---|---|
| n=4 | four sampled outputs of one prompt |
| beams | three beams of 8 tokens; their scores equal those of a search without a cache |
| disk | a prompt whose prefix another engine stored on disk before it ended |
| chunks of 1 | as above |

In these cases, the backend that `--attention auto` selects is compared with the plain reference
backend, both with the same tokens:

| case | options |
|---|---|
| int8 | `--kv-codec int8` |
| h2o, sinks | `--evict h2o:cap=96`, `--evict sinks:cap=96,sinks=4` |

Preemptions, swaps, cached prefixes and evictions are observed in the engine's counters, or the case
does not count. A negative control shows that a wrong model would be seen: with the positions of
output tokens shifted by 7, Transformers' own tokens change, or, in types without positions, with
the first half of the prompt reversed.

"""


def page(root: Path) -> str:
    """The text of the page."""
    results = json.loads((root / RESULTS).read_text(encoding="utf-8"))
    types = results["types"]
    tested = [one for one in types if one["result"] == "equal"]
    introduction = INTRODUCTION.format(transformers=results["transformers"])
    return introduction + "\n".join(
        (
            _counts(results["totals"]),
            _equal(tested),
            _reasons("Text decoders that are not supported", types, "refused", is_text=True),
            _open(types),
            _reasons("Not text decoders", types, "refused", is_text=False),
        )
    )


def _counts(totals: dict[str, int]) -> str:
    return _table(tuple(totals), [tuple(str(count) for count in totals.values())])


def _equal(tested: list[dict[str, Any]]) -> str:
    """Equal types, with the kinds of their layers' caches and what works."""
    names = list(max((one["cases"] for one in tested), key=len))
    notes: dict[str, int] = {}
    rows = []
    for one in tested:
        marks = [_mark(one["cases"].get(name), notes) for name in names]
        kinds = ", ".join(one["kinds"])
        rows.append((f"`{one['type']}`", kinds, one["control"], f"{one['worst']:.0e}", *marks))
    header = ("type", "cache", "control", "largest difference", *names)
    below = "".join(f"{number}. {why}\n" for why, number in notes.items())
    heading = (
        "## Equal to Transformers\n\nCaches: *full* (all tokens), *window* (the last tokens), "
        "*chunk* (the tokens of the current chunk), *shared* (the layer reads another layer's "
        "cache). A number is a note below the table.\n\n"
    )
    return heading + _table(header, rows) + (f"\n{below}" if below else "")


def _mark(case: dict[str, Any] | None, notes: dict[str, int]) -> str:
    if case is None:
        return ""
    if case["result"] == "equal":
        return "yes"
    return str(notes.setdefault(" ".join(case["why"].split()), len(notes) + 1))


def _reasons(title: str, types: list[dict[str, Any]], result: str, *, is_text: bool) -> str:
    by_reason = defaultdict(list)
    for one in types:
        if one["result"] == result and one["is_text_decoder"] == is_text:
            _, _, reason = one["why"].partition(" is not supported: ")
            by_reason[" ".join((reason or one["why"]).split())].append(f"`{one['type']}`")
    rows = [(", ".join(names), reason) for reason, names in by_reason.items()]
    return f"## {title}\n\n" + _table(("types", "reason"), rows)


def _open(types: list[dict[str, Any]]) -> str:
    """Types that fail or could not be tested."""
    rows = [
        (f"`{one['type']}`", one["result"], " ".join(one["why"].split()))
        for one in types
        if one["result"] in ("failed", "not tested")
    ]
    return "## Open\n\n" + _table(("type", "result", "reason"), rows) if rows else ""


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)
