"""Evaluation prompts are generated and measured without importing torch."""

import subprocess
import sys
from importlib.resources import files
from pathlib import Path


def test_tasks_and_gate_load_no_torch():
    source = Path(str(files("quire") / "assets")).parents[1]
    code = (
        "import sys, quire.evals.gate; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(source)},
    )

    assert done.stdout.strip() == "[]"
