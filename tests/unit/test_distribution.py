import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from quire.errors import ConfigError
from quire.layout import extras
from quire.version import __version__
from release import audit, check_wheel

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OPTIONAL = PROJECT["optional-dependencies"]
DISTRIBUTIONS = {
    "zmq": "pyzmq",
    "huggingface_hub": "huggingface-hub",
    "starlette": "fastapi",
    "pyarrow": "ray",
    "pydantic_core": "pydantic",
    "prometheus_client": "prometheus-client",
    "fastapi_swagger": "fastapi-swagger",
    "opentelemetry": "opentelemetry-sdk",
    "opentelemetry.sdk": "opentelemetry-sdk",
    "opentelemetry.exporter.otlp.proto.http": "opentelemetry-exporter-otlp-proto-http",
}
"""Distribution of each import name that differs; fastapi depends on starlette, ray[data] on
pyarrow, pydantic on pydantic_core, and the exporter of OpenTelemetry on its SDK."""
USED_BY_TRANSFORMERS = {"accelerate"}
"""Packages that Transformers imports for Quire: it loads GGUF files with Accelerate."""
EXTRA_OF_PACKAGE = {
    "serve": ("serve",),
    "scale/serve": ("serve", "ray"),
    "evals/lm_eval": ("lm-eval",),
}
"""Packages of Quire whose modules import an extra when they are loaded."""
TRITON = {"triton"}
"""Installed with builds of PyTorch for CUDA; `quire.kernels.triton` is imported only with it."""


def names(requirements: list[str]) -> set[str]:
    return {Requirement(text).name for text in requirements}


def third_party_imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Distributions that a module imports, and whether at import time of the module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        modules = [node.module] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for module in modules:
            root = (module or "").partition(".")[0]
            if root not in sys.stdlib_module_names | {"quire", "benchmarks"}:
                yield DISTRIBUTIONS.get(root, root), id(node) in top


# ---- dependencies --------------------------------------------------------------------------------


def test_modules_import_declared_packages_and_extras_only_in_their_package() -> None:
    core = names(PROJECT["dependencies"])
    every = core.union(*map(names, OPTIONAL.values()))
    faults = []
    for path in sorted((ROOT / "src/quire").rglob("*.py")):
        parts = path.relative_to(ROOT / "src/quire").parts
        package = "/".join(parts[:2])
        package = package if package in EXTRA_OF_PACKAGE else parts[0]
        allowed = core.union(*(names(OPTIONAL[e]) for e in EXTRA_OF_PACKAGE.get(package, ())))
        allowed |= TRITON if parts[:2] == ("kernels", "triton") else set()
        later = every | TRITON
        for name, at_import in third_party_imports(path):
            if name not in (allowed if at_import else later):
                faults.append(f"{path.relative_to(ROOT)}: {name}")

    assert faults == []


def test_requirements_and_pip_lines_name_what_is_imported():
    imported = {
        name for path in (ROOT / "src/quire").rglob("*.py") for name, _ in third_party_imports(path)
    }
    assert names(PROJECT["dependencies"]) - imported == USED_BY_TRANSFORMERS
    assert PROJECT["name"] == extras.DISTRIBUTION
    assert set(OPTIONAL) == set(extras.EXTRAS)
    for extra, modules in extras.EXTRAS.items():
        assert {DISTRIBUTIONS.get(name, name) for name in modules} <= names(OPTIONAL[extra])
        assert OPTIONAL[extra]

    for text in [*PROJECT["dependencies"], *(text for each in OPTIONAL.values() for text in each)]:
        assert [specifier.operator for specifier in Requirement(text).specifier] == [">="], text

    pages = [p for p in (ROOT / "docs").rglob("*.md") if p.name != "log.md"]
    pages += [*ROOT.glob("*.md"), *(ROOT / "changelog.d").glob("*.md"), *ROOT.glob("examples/*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in pages)
    found = re.findall(r"pip install [^`\n]*?(quire[\w-]*)(?:\[([\w,]+)\])?", text)
    assert found
    assert {name for name, _ in found} == {extras.DISTRIBUTION}
    assert {extra for _, listed in found for extra in listed.split(",") if extra} <= set(OPTIONAL)


@pytest.mark.parametrize("extra", extras.EXTRAS)
def test_missing_extra_gives_the_pip_command(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        extras.require_extra(extra, "this")
    assert str(caught.value).endswith(f"(not installed): pip install 'quire-llm[{extra}]'")
    assert "\n" not in str(caught.value)


HIDDEN = """
import sys
import tarfile

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hide())
"""


SERVER_PACKAGES = ("fastapi", "h11", "prometheus_client", "starlette", "uvicorn")


def without_packages(hidden: Sequence[str], code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"hidden = {hidden!r}\n{HIDDEN}{code}"]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.slow
def test_server_without_its_extra_is_refused_before_the_model_is_loaded() -> None:
    code = "sys.argv = ['quire', 'serve', 'no such model']\nimport quire.cli.main as m\nm.run()"
    ran = without_packages(SERVER_PACKAGES, code)
    assert ran.returncode == 2
    assert ran.stderr == (
        "error: quire serve needs fastapi, h11, prometheus_client, uvicorn (not installed): "
        "pip install 'quire-llm[serve]'\n"
    )


@pytest.mark.slow
def test_core_modules_load_and_generate_without_server_packages() -> None:
    modules = [
        ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
        for path in sorted((ROOT / "src/quire").rglob("*.py"))
        if not {"serve", "lm_eval"}.intersection(path.relative_to(ROOT / "src/quire").parts)
        and path.stem != "__main__"
    ]
    run = "['quire', 'generate', 'quire-tiny', '-p', 'once', '--max-tokens', '2']"
    hidden = [name for name in SERVER_PACKAGES if name != "h11"]  # the hub's client may need it
    ran = without_packages(
        hidden,
        f"import importlib\nfor name in {modules!r}:\n    importlib.import_module(name)\n"
        f"sys.argv = {run}\nimport quire.cli.main as m\nm.run()",
    )

    assert ran.returncode == 0, ran.stderr


# ---- wheels and the sdist ------------------------------------------------------------------------


@pytest.fixture
def small_tree(tmp_path: Path) -> Path:
    """The build files with a small package and small C files, and files that are no part of it."""
    tree = tmp_path / "tree"
    native = tree / "src/quire/kernels/native"
    native.mkdir(parents=True)
    for name in (*check_wheel.NEEDED_IN_SDIST, "MANIFEST.in", "SECURITY.md"):
        shutil.copy(ROOT / name, tree)
    for path in (native / "__init__.py", native.parent / "__init__.py", native / "args.h"):
        path.touch()
    (tree / "src/quire/__init__.py").touch()
    (tree / "deploy").mkdir()
    (tree / "deploy/compose.yaml").touch()
    (tree / "src/quire/version.py").write_text(f"__version__ = '{__version__}'\n")
    for name in ("attention", "linear", "recurrent", "rows", "sample", "select"):
        (native / f"{name}.c").write_text(f"int quire_{name}(void) {{ return 0; }}\n")
    for path in (native / "_attention.cpython-311.so", tree / "tests/test_a.py", tree / "out/a.md"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    return tree


def built(tree: Path, *command: str, compiler: str) -> Path:
    ran = subprocess.run(
        [sys.executable, "setup.py", "-q", *command, "--dist-dir", "dist"],
        capture_output=True,
        text=True,
        cwd=tree,
        env=os.environ | {"CC": compiler},
    )
    assert ran.returncode == 0, ran.stderr
    [path] = (tree / "dist").iterdir()
    return path


def wheel_metadata(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as opened:
        return opened.read(f"quire_llm-{__version__}.dist-info/WHEEL").decode()


def test_wheel_without_a_compiler_is_pure_python(small_tree: Path) -> None:
    wheel = built(small_tree, "bdist_wheel", compiler="false")
    assert wheel.name == f"quire_llm-{__version__}-py3-none-any.whl"
    assert list(check_wheel.faults_of(wheel)) == []
    assert "Root-Is-Purelib: true" in wheel_metadata(wheel)
    assert "Tag: py3-none-any" in wheel_metadata(wheel)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_wheel_with_the_library_is_for_the_platform_and_any_python(small_tree: Path) -> None:
    wheel = built(small_tree, "bdist_wheel", compiler="cc")
    assert re.fullmatch(rf"quire_llm-{__version__}-py3-none-(linux|macosx)_\w+\.whl", wheel.name)
    assert list(check_wheel.faults_of(wheel)) == []
    assert "Root-Is-Purelib: false" in wheel_metadata(wheel)


def test_sdist_has_what_a_build_needs_and_nothing_else(small_tree: Path) -> None:
    sdist = built(small_tree, "sdist", compiler="false")
    assert sdist.name == f"quire_llm-{__version__}.tar.gz"
    assert list(check_wheel.faults_of(sdist)) == []
    with tarfile.open(sdist) as opened:
        assert f"quire_llm-{__version__}/deploy/compose.yaml" in opened.getnames()


def wheel_file(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(folder / name, "w") as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)
    return folder / name


DIGEST_OF_NOTHING = json.dumps({"sha256": hashlib.sha256(b"").hexdigest()}).encode()


@pytest.mark.parametrize(
    ("name", "files", "fault"),
    [
        ("py3-none-any", {}, None),
        ("py3-none-manylinux_2_28_x86_64", {}, "has not the library"),
        ("py3-none-any", {"_attention.so": b""}, "is tagged any and has the library"),
        ("py3-none-linux_x86_64", {"_attention.so": b""}, None),
        ("py3-none-linux_x86_64", {"_attention.so": b"stripped"}, "its digest differs"),
        ("cp311-cp311-linux_x86_64", {"_attention.so": b""}, "expected a name"),
        ("py3-none-any", {"attention.c": b""}, "has quire/kernels/native/attention.c"),
    ],
)
def test_faults_of_a_wheel_are_found(tmp_path: Path, name, files, fault) -> None:
    inside = {f"quire/kernels/native/{path}": content for path, content in files.items()}
    if "_attention.so" in files:
        inside[f"{check_wheel.LIBRARY}.json"] = DIGEST_OF_NOTHING
    found = list(check_wheel.faults_of(wheel_file(tmp_path, f"quire_llm-0.1.0-{name}.whl", inside)))
    assert found == [] if fault is None else any(fault in each for each in found)


def test_installed_library_matches_its_digest() -> None:
    assert list(check_wheel.installed_faults()) in ([], ["has no library: the compiler failed"])


# ---- changelog -----------------------------------------------------------------------------------


def test_fragments_have_plain_names_and_the_newest_release_is_this_version():
    form = r"(\+[\w-]+|\d+)\.(added|changed|fixed|removed)\.md"
    found = [path.name for path in (ROOT / "changelog.d").glob("*.md")]
    assert [name for name in found if not re.fullmatch(form, name)] == []
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    releases = re.findall(r"^## (\S+) \(\d{4}-\d\d-\d\d\)$", text, re.MULTILINE)
    assert releases[0] == __version__
    assert len(set(releases)) == len(releases)


# ---- audit ---------------------------------------------------------------------------------------


def test_audit_fails_for_a_known_vulnerability_only_also_without_a_network(tmp_path):
    text, code = audit.report(None)
    assert code == 0
    assert "not audited" in text
    assert audit.audited(tmp_path / "missing.txt") is None  # no result is told apart

    unknown = {"name": "a", "skip_reason": "not found"}
    sound = {"name": "b", "version": "1", "vulns": []}
    vulnerable = {"name": "c", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3"]}]}

    summary = "1 packages audited, 1 not in the database, 0 with known vulnerabilities"
    assert audit.report([unknown, sound]) == (summary, 0)
    text, code = audit.report([sound, vulnerable])
    assert code == 1
    assert text.startswith("c 2: PYSEC-1 (fixed in 3)\n")
