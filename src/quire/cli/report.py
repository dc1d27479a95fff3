"""The JSON object that commands print on standard output with `--json`.

    {"name", "claims", "arms", "config", "commit", "versions", "hardware", "seconds"}

`claims` is a flat mapping of name to number; `arms` has raw results; the other keys describe the
run. A benchmark with `--quick` runs small shapes that are not representative: its `claims` are
empty, and its numbers are in `quick_figures`.
"""

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

import psutil

from quire.errors import ConfigError
from quire.layout.files import replace_file
from quire.plan.machine import container_total_bytes, cpu_model, package_version

PACKAGES = ("torch", "transformers", "numpy")


def envelope(
    name: str,
    claims: Mapping[str, int | float],
    arms: Mapping[str, object],
    config: Mapping[str, object],
    *,
    seconds: int | float | None = None,
    quick: bool = False,
) -> dict[str, object]:
    """Add the data needed to reproduce results; `claims` are numbers that documents may cite."""
    figures = {"claims": {}, "quick_figures": dict(claims)} if quick else {"claims": dict(claims)}
    return {
        "name": name,
        **figures,
        "arms": dict(arms),
        "config": dict(config),
        "commit": commit(),
        "versions": versions(),
        "hardware": hardware(),
        "seconds": time.time() - psutil.Process().create_time() if seconds is None else seconds,
    }


def commit() -> str | None:
    """Git commit of this code; None outside a checkout or without git."""
    git = shutil.which("git")
    if git is None:
        return None
    here = Path(__file__)
    # an installed copy inside another repository must not report the commit of that repository
    tracked = _git(git, here.parent, "ls-files", "--error-unmatch", here.name)
    return _git(git, here.parent, "rev-parse", "HEAD") if tracked else None


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str | None]:
    """Versions of Python, Quire and these libraries, from package metadata without imports."""
    from quire.version import __version__

    found: dict[str, str | None] = {"quire": __version__, "python": platform.python_version()}
    return found | {package: package_version(package) for package in packages}


def hardware() -> dict[str, object]:
    """Processor, number of cores of this process, and memory in bytes."""
    return {
        "cpu": cpu_model(),
        "cores": _cores(),
        "memory_bytes": total_memory_bytes(),
    }


def total_memory_bytes() -> int:
    """Memory of this machine or of the container of this process."""
    limit_bytes = container_total_bytes()
    total_bytes = int(psutil.virtual_memory().total)
    return total_bytes if limit_bytes is None else min(total_bytes, limit_bytes)


def _git(git: str, folder: Path, *arguments: str) -> str | None:
    done = subprocess.run(
        [git, "-C", str(folder), *arguments], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None if done.returncode == 0 else None


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_STDOUT: ContextVar[TextIO | None] = ContextVar("quire_stdout", default=None)


@contextlib.contextmanager
def json_only(*, enabled: bool) -> Iterator[None]:
    """Send prints of the block to standard error, except `print_json`; nested uses do nothing."""
    if not enabled or _STDOUT.get() is not None:
        yield
        return
    token = _STDOUT.set(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _STDOUT.reset(token)


def print_json(value: Mapping[str, Any]) -> None:
    """Print a result as one line of JSON on standard output."""
    stream = _STDOUT.get() or sys.stdout
    stream.write(json.dumps(value) + "\n")
    stream.flush()


def prepare_folder(folder: Path) -> None:
    """Create a folder for results and check that it is writable, before a long computation."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _unwritable(folder, error) from error


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files atomically: readers see the old or the new content of each file."""
    for name, content in files.items():
        try:
            replace_file(folder / name, content)
        except OSError as error:
            raise _unwritable(folder / name, error) from error


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write {path}: {error.strerror}; name another folder with --out")
