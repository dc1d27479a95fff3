"""Measures the time of a step with and without structured outputs.

    python -m benchmarks.structured [--model quire-tiny] [--repeats 5]

A batch of plain requests decodes beside companions: plain ones, structured ones, or structured ones
with an adversarial grammar. All have the same number of tokens. Kinds alternate in every repeat.
"""

import argparse
import json
import statistics
import time
from typing import Any

from quire import LLM, KVConfig, SamplingParams
from quire.cli.report import envelope

PROMPT = "<|doc|>Once upon a time"
PLAIN, COMPANIONS, TOKENS = 8, 8, 96
KINDS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "json": {"json": {"type": "array", "items": {"type": "string"}, "minItems": 200}},
    "regex": {"regex": "([a-z]{1,12} ?)+"},
    "ambiguous grammar": {"grammar": 'start: e\ne: e e | "a" | e e e'},
}


def run(llm: LLM, kind: str) -> float:
    """Run one batch and return the milliseconds of a step."""
    plain = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    other = SamplingParams(max_tokens=TOKENS, ignore_eos=True, structured_outputs=KINDS[kind])
    before = llm.engine.num_steps
    started = time.perf_counter()
    llm.generate([PROMPT] * (PLAIN + COMPANIONS), [plain] * PLAIN + [other] * COMPANIONS)
    return (time.perf_counter() - started) / (llm.engine.num_steps - before) * 1e3


def main() -> None:
    """Print one JSON object per kind, and one with all medians at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="quire-tiny")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    llm = LLM(options.model, kv=KVConfig(memory="64MiB"), verify=False)
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for repeat in range(options.repeats + 1):
        for kind, times in found.items():
            measured = run(llm, kind)
            if repeat:
                times.append(measured)
    for kind, times in found.items():
        row = {"companions": kind, "step_ms": round(statistics.median(times), 2)}
        print(json.dumps(row | {"least": round(min(times), 2), "most": round(max(times), 2)}))
    claims = {f"{_name(kind)}_step_ms": statistics.median(times) for kind, times in found.items()}
    used = {"plain": PLAIN, "companions": COMPANIONS, "tokens": TOKENS} | vars(options)
    print(json.dumps(envelope("structured steps", claims, {"step_ms": found}, used)))


def _name(kind: str) -> str:
    return kind.replace(" ", "_")


if __name__ == "__main__":
    main()
