"""Evaluation prompts are generated and measured without importing torch."""

import subprocess
import sys
from importlib.resources import files
from pathlib import Path


def test_tasks_and_questions_load_no_torch():
    source = Path(str(files("quire") / "assets")).parents[1]
    loaded = "[m for m in ('torch', 'numpy') if m in sys.modules]"
    code = f"import sys, quire.evals.questions; print({loaded})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(source)},
    )

    assert done.stdout.strip() == "[]"
