"""Runs the checks of a client script and prints one JSON line for each."""

import json
import sys
import time
import traceback
from collections.abc import Callable

URL = sys.argv[1]
MODEL = "quire-tiny"
PROMPT = "<|doc|>Once upon a time"
MESSAGES = [{"role": "user", "content": "Once upon a time"}]
Check = Callable[[], None]
_CHECKS: list[Check] = []


def check(function: Check) -> Check:
    """Register a function that raises an error if the client does not work."""
    _CHECKS.append(function)
    return function


def run() -> None:
    failed = 0
    for function in _CHECKS:
        started_s, error = time.monotonic(), ""
        try:
            function()
        except Exception:  # noqa: BLE001 - every error of a client is a result
            error = traceback.format_exc()
            failed += 1
        line = {"check": function.__name__, "passed": not error, "error": error[-2_000:]}
        line["seconds"] = round(time.monotonic() - started_s, 2)
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
    sys.exit(bool(failed))
