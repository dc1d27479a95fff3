"""Modules of the no-torch import contract load neither torch nor Transformers."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers")
LOADED_BY_THEIR_PACKAGE = ("quire.hf.",)  # its `__init__` is for users of Transformers
PACKAGES = ("config", "layout", "scheduler", "tenancy", "plan", "sim")


def torch_free_modules() -> list[str]:
    """Modules of the contract, including those inside packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    [contract] = [each for each in contracts if each["id"] == "no-torch"]
    found = set()
    for name in contract["source_modules"]:
        if name.startswith(LOADED_BY_THEIR_PACKAGE):
            continue
        path = ROOT / "src" / Path(*name.split("."))
        files = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
        for file in files:
            parts = file.relative_to(ROOT / "src").with_suffix("").parts
            found.add(".".join(part for part in parts if part != "__init__"))
    return sorted(found)


def test_contract_includes_all_torch_free_packages() -> None:
    found = torch_free_modules()

    for package in PACKAGES:
        assert f"quire.{package}" in found


def test_torch_free_modules_load_no_tensor_library() -> None:
    code = (
        "import importlib, sys\n"
        f"for name in {torch_free_modules()!r}:\n"
        "    importlib.import_module(name)\n"
        f"    loaded = [heavy for heavy in {HEAVY!r} if heavy in sys.modules]\n"
        "    assert not loaded, f'{name} loads {loaded}'\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
