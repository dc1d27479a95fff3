"""Run a quick form: a command whose last line of standard output is one JSON object."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.claims.registry import QuickForm
from quire.errors import ConfigError

_LONGEST_S = 600.0  # a busy machine is slower, but a quick form that hangs ends
_SHOWN_CHARACTERS = 500


def run_quick(form: QuickForm, root: Path) -> dict[str, Any]:
    """Run a command in the root of the checkout and parse the last line of its output.

    Raises:
        ConfigError: the command does not exist, fails, takes too long, or its last line is no JSON
            object.
    """
    try:
        finished = subprocess.run(
            [sys.executable if word == "python" else word for word in form.command],
            cwd=root,
            env=_environment(root),
            capture_output=True,
            text=True,
            timeout=_LONGEST_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"the command did not finish: {error}") from error
    if finished.returncode:
        shown = finished.stderr.strip()[-_SHOWN_CHARACTERS:]
        raise ConfigError(f"expected exit code 0, got {finished.returncode}: {shown}")
    return _last_object(finished.stdout)


def _environment(root: Path) -> dict[str, str]:
    paths = [str(root / "src"), str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _last_object(output: str) -> dict[str, Any]:
    last = output.strip().rpartition("\n")[2]
    try:
        result = json.loads(last)
    except json.JSONDecodeError:
        result = None
    if not isinstance(result, dict):
        raise ConfigError(f"expected a JSON object as last line, got {last[:_SHOWN_CHARACTERS]!r}")
    return result
