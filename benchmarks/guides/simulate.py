"""`quire simulate` as docs/guides/researchers.md shows it, with the page's trace and rule.

The last line of output is one JSON object with the claims of both runs.
"""

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.guides.code_blocks import code_block
from quire.cli.main import app
from quire.cli.report import envelope

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "researchers.md"
MODEL, KV_MEMORY = "quire-tiny", "8MiB"
RULE = "long_values:cap=256,sinks=4,recent=64"


def main() -> None:
    """Run the simulator with full KV and with the rule of the page."""
    page = PAGE.read_text(encoding="utf-8")
    define_rule(code_block(page, "python", PAGE.name))
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        trace.write_text(code_block(page, 'json title="trace.jsonl"', PAGE.name), encoding="utf-8")
        full, rule = simulated(trace), simulated(trace, "--evict", RULE)
    claims = {f"full_{name}": value for name, value in full.items()}
    claims |= {f"rule_{name}": value for name, value in rule.items()}
    config = {"model": MODEL, "kv_memory": KV_MEMORY, "rule": RULE, "repeats": 1}
    print(json.dumps(envelope("simulate guide", claims, {}, config)))


def define_rule(code: str) -> None:
    """Run the page's definition of its rule; a dataclass needs its module."""
    module = ModuleType("guide")
    sys.modules["guide"] = module
    with contextlib.redirect_stdout(io.StringIO()):
        exec(code, module.__dict__)


def simulated(trace: Path, *options: str) -> dict[str, Any]:
    """Claims of a simulation of quire-tiny in the page's KV memory."""
    arguments = ["simulate", MODEL, "--trace", str(trace), "--kv-memory", KV_MEMORY, "--json"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        app([*arguments, *options], standalone_mode=False)
    result: dict[str, Any] = json.loads(printed.getvalue().splitlines()[-1])["claims"]
    return result


if __name__ == "__main__":
    main()
