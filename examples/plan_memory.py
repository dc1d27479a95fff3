"""Compute how many requests fit into a KV memory, by codec and by fraction of retained tokens.

The model is not loaded; only its `config.json` is read.

    python examples/plan_memory.py [MODEL] [KV_MEMORY] [TOKENS]
"""

import json
import subprocess
import sys
from typing import Any


def plan(model: str, memory: str, codec: str, tokens: int) -> dict[str, Any]:
    """Return the result of `quire plan`."""
    command = [sys.executable, "-m", "quire", "plan", model, "--kv-memory", memory]
    options = ["--kv-codec", codec, "--sequence-tokens", str(tokens), "--json"]
    output = subprocess.run([*command, *options], check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(output.stdout.splitlines()[-1])
    return result


def main() -> None:
    model, memory, tokens = [*sys.argv[1:], *("quire-tiny", "256MiB", "4096")[len(sys.argv) - 1 :]]
    print(f"{model}: requests of {tokens} tokens in {memory} of KV memory")
    for codec in ("bfloat16", "int8", "int4"):
        for share in (1.0, 0.25):
            result = plan(model, memory, codec, int(int(tokens) * share))
            fit = result["claims"]["sequences"]
            print(f"{codec:10} {share:4.0%} of the tokens retained: {fit:>6,} requests")


if __name__ == "__main__":
    main()
