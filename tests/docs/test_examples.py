import runpy
import shutil
import sys
from pathlib import Path

import pytest

from quire.policies import registry
from support.snippets import ROOT

EXAMPLES = ROOT / "examples"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Run an example in an empty folder; return its output, that of its subprocesses included."""

    def output(name: str, *arguments: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with registry.temporary_registrations():
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capfd.readouterr().out

    return output


def test_own_model(run) -> None:
    printed = run("own_model.py")
    assert printed.count("tokens, ") == 3
    assert "of 67,108,864 B of KV memory in use" in printed


@pytest.mark.slow
def test_serve_openai(run) -> None:
    assert "' three'" in run("serve_openai.py")


def test_policy_in_one_file(run) -> None:
    full, long_values, _ = run("policy_in_one_file.py").splitlines()[1:]
    assert "'45115'" in full
    assert kv_bytes(long_values) < kv_bytes(full) / 2


@pytest.mark.slow
def test_compare_policies(run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    printed = run("compare_policies.py").splitlines()
    assert len(printed) == 1 + 3 * 2 + 1
    assert (tmp_path / "policies.png").stat().st_size > 10_000


def test_quire_cache(run) -> None:
    answer, full, recent, snapkv = run("quire_cache.py").splitlines()[-4:]
    assert answer.split()[-1] in full
    assert answer.split()[-1] in snapkv
    assert kv_bytes(recent) < kv_bytes(full)


@pytest.mark.slow
def test_offline_batch(run) -> None:
    printed = run("offline_batch.py")

    chapters = [line.split()[0] for line in printed.splitlines()[-8:]]
    assert chapters == [f"chapter-{number}" for number in range(1, 9)]


@pytest.mark.slow
def test_plan_memory(run) -> None:
    printed = run("plan_memory.py", "quire-tiny", "64MiB", "1024").splitlines()[1:]
    requests = [int(line.split()[-2].replace(",", "")) for line in printed]
    assert requests[0] == 64 * 2**20 // (1024 * 4096)
    assert requests[1] == 4 * requests[0]
    assert requests[4] > requests[2] > requests[0]  # int4, int8, bfloat16


def test_kvpress_port(run) -> None:
    _, full, quarter, half = run("kvpress_port.py").splitlines()
    assert kv_bytes(full) > kv_bytes(quarter) > kv_bytes(half)


def test_every_example_has_a_test() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}

    tests = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert names == tests - {"every_example_has_a_test", "notebooks_run"}


@pytest.mark.slow
@pytest.mark.parametrize("notebook", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_run(notebook: Path, tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    shutil.copy(notebook, tmp_path)
    cells = nbformat.read(notebook, as_version=4)

    resources = {"metadata": {"path": tmp_path}}
    nbclient.NotebookClient(cells, timeout=120, resources=resources).execute()


def kv_bytes(line: str) -> int:
    """The number before "B" in a printed line."""
    words = line.split()
    return int(words[words.index("B") - 1].replace(",", ""))
