"""Rules about the repository itself that no other tool checks."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import quire
from benchmarks.__main__ import app as benchmarks
from quire.cli.options import SECTIONS, configs_of, documented_attributes
from quire.layout.codec_names import CODECS
from quire.layout.options import OptionInfo
from quire.policies.registry import FULL, registered

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src" / "quire").rglob("*.py"))
PLACES_OF_ONE_MACHINE = re.compile(r"/work/|/root/|/home/|/tmp/|\.\./shared")


def shipped_texts() -> list[Path]:
    """What readers and users get; tests may name data beside the checkout."""
    suffixes = {".py", ".md", ".json", ".toml", ".txt", ".sh", ".svg", ".jinja", ".yaml"}
    folders = [ROOT / name for name in ("src", "docs", "training", "runs", "changelog.d", ".ci")]
    found = [path for folder in folders for path in folder.rglob("*") if path.suffix in suffixes]
    top = [path for path in ROOT.iterdir() if path.is_file() and path.suffix in suffixes]
    return sorted(p for p in [*found, *top, ROOT / "Makefile"] if ".egg-info" not in str(p))


def test_public_names_are_sorted_there_and_seen_by_type_checkers():
    def kind_then_name(name: str) -> tuple[bool, bool, str]:  # the order ruff asks for
        return not name.isupper(), not name[0].isupper(), name

    assert list(quire.__all__) == sorted(quire.__all__, key=kind_then_name)
    assert dir(quire) == sorted(quire.__all__)
    for name in quire.__all__:
        assert getattr(quire, name) is not None

    tree = ast.parse((ROOT / "src/quire/__init__.py").read_text(encoding="utf-8"))
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    assert set(quire.__all__) <= imported


def test_every_module_policy_and_codec_is_described():
    assert [p for p in SOURCES if not ast.get_docstring(ast.parse(p.read_text("utf-8")))] == []
    table = (ROOT / "docs/reference/policies.md").read_text(encoding="utf-8")
    for name in (FULL, *registered()):
        [row] = [line for line in table.splitlines() if line.startswith(f"| `{name}` |")]
        assert all(cell.strip() for cell in row.strip("|").split("|")), row
    table = (ROOT / "docs/quantization.md").read_text(encoding="utf-8")
    for name in CODECS:
        assert f"\n| `{name}` | " in table


CONFIGS = [found for section in SECTIONS for found in configs_of(section)]
"""Names of a config's table, and the config."""


@pytest.mark.parametrize(("names", "config"), CONFIGS)
def test_every_option_says_what_it_is_for_and_has_a_row(names, config):
    documented = documented_attributes(config.__doc__ or "")
    for field in fields(config):
        info = field.metadata.get("option", OptionInfo())
        assert info.help or documented.get(field.name, ""), field.name
    table = (ROOT / "docs/reference/options.md").read_text(encoding="utf-8")
    _, _, after = table.partition(f"`[{'.'.join(names)}]`\n")
    rows = after.split("\n## ")[0]
    for field in fields(config):
        assert f"\n| `{field.name}` |" in rows


def test_nothing_shipped_names_a_machine_or_commands_that_do_not_exist():
    found = {
        str(path.relative_to(ROOT)): place[0]
        for path in shipped_texts()
        if (place := PLACES_OF_ONE_MACHINE.search(path.read_text(encoding="utf-8")))
    }
    assert len(shipped_texts()) > 100
    assert found == {}

    # others are `python -m benchmarks NAME`; the log keeps commands as they were run
    pages = [p for p in shipped_texts() if p != ROOT / "docs/log.md"]
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "NOTICE")]
    sources = [*(ROOT / "benchmarks").rglob("*.py"), *pages, *top]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)

    assert set(re.findall(r"quire bench ([a-z][a-z-]*)", text)) <= {"throughput", "latency"}
    named = set(re.findall(r"python -m benchmarks ([a-z][a-z-]*)", text))
    registered_commands = {command.name for command in benchmarks.registered_commands}
    assert named <= registered_commands | {"claims"}, named - registered_commands


def test_license_and_notice_name_what_is_shipped() -> None:
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    shipped = sorted((ROOT / "src/quire/assets").iterdir())
    assert "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text(encoding="utf-8")
    for path in shipped:
        assert path.suffix == ".md" or f"src/quire/assets/{path.name}" in notice, path.name


# ---- private attributes in tests -----------------------------------------------------------------

PATCHERS = {"setattr", "delattr", "patch", "object"}  # of pytest, unittest.mock and Python


def private_writes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each write or patch of a private attribute of an object but `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            of_itself = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if is_private(node.attr) and not of_itself:
                yield node.lineno, ast.unparse(node)
        if isinstance(node, ast.Call) and _name(node.func) in PATCHERS:
            texts = (a.value for a in node.args[:2] if isinstance(a, ast.Constant))
            if any(isinstance(t, str) and is_private(t.rpartition(".")[2]) for t in texts):
                yield node.lineno, ast.unparse(node)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _name(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def test_no_test_sets_or_patches_a_private_attribute() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line, text in private_writes(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        *(("engine._runner = Spy()", True), ("a, engine._runner = 1, 2", True)),
        *(("engine.pool._count += 1", True), ("del engine._runner", True)),
        ("with open(path) as engine._file: pass", True),
        ("monkeypatch.setattr(Engine, '_step', f)", True),
        ("monkeypatch.setattr('quire.engine.core._step', f)", True),
        ("mock.patch('quire.engine.core._step')", True),
        *(("mock.patch.object(Engine, '_step')", True), ("setattr(engine, '_step', f)", True)),
        *(("self._runner = Spy()", False), ("engine.runner = Spy()", False)),
        ("found = engine._runner", False),
        ("monkeypatch.setattr(Engine, '__init__', f)", False),
    ],
)
def test_writes_of_private_attributes_are_found(line: str, is_found: bool) -> None:
    assert bool(list(private_writes(ast.parse(line)))) == is_found


# ---- modules of the no-torch contract ------------------------------------------------------------

HEAVY = ("torch", "transformers")


def torch_free_modules() -> list[str]:
    """Modules of the contract, including those inside packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    [contract] = [each for each in contracts if each["id"] == "no-torch"]
    found = set()
    for name in contract["source_modules"]:
        if name.startswith(("quire.hf.",)):
            continue
        path = ROOT / "src" / Path(*name.split("."))
        files = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
        for file in files:
            parts = file.relative_to(ROOT / "src").with_suffix("").parts
            found.add(".".join(part for part in parts if part != "__init__"))
    return sorted(found)


def test_torch_free_modules_load_no_tensor_library() -> None:
    modules = torch_free_modules()
    for package in ("config", "layout", "scheduler", "tenancy", "plan", "sim"):
        assert f"quire.{package}" in modules
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        f"    loaded = [heavy for heavy in {HEAVY!r} if heavy in sys.modules]\n"
        "    assert not loaded, f'{name} loads {loaded}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
