"""The JSON envelope."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from quire.cli import report
from quire.version import __version__


def test_an_envelope_is_json_with_what_is_needed_to_repeat_a_result():
    made = report.envelope("demo", {"x": 1}, {"ours": [1.5, 2.5]}, {"seed": 3}, seconds=4.5)

    again = json.loads(json.dumps(made))
    assert again["name"] == "demo"
    assert again["claims"] == {"x": 1}
    assert again["arms"] == {"ours": [1.5, 2.5]}
    assert again["config"] == {"seed": 3}
    assert again["seconds"] == 4.5
    assert again["versions"]["quire"] == __version__
    assert set(again["versions"]) == {"quire", "python", "torch", "transformers", "numpy"}
    assert again["hardware"]["cores"] >= 1
    assert again["hardware"]["memory_bytes"] > 1 << 20
    assert again["hardware"]["cpu"]


def test_seconds_default_to_the_age_of_the_process():
    assert 0 < report.envelope("demo", {}, {}, {})["seconds"] < 24 * 3600  # type: ignore[operator]


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_commit_is_reported_only_where_git_tracks_this_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    (tmp_path / "report.py").write_text("")
    (tmp_path / "other.py").write_text("")
    monkeypatch.setattr(report, "__file__", str(tmp_path / "report.py"))

    assert report.commit() is None

    git("init", "-q")
    git("add", "other.py")
    git("commit", "-q", "-m", "Start")

    assert report.commit() is None

    git("add", "report.py")
    git("commit", "-q", "-m", "Add it")

    assert report.commit() == git("rev-parse", "HEAD")


def test_a_missing_package_has_no_version(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(report, "_PACKAGES", ("no-such-package-anywhere",))

    assert report.versions()["no-such-package-anywhere"] is None
