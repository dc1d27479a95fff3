"""The JSON envelope of results."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from quire.cli import report
from quire.version import __version__


def test_envelope_is_json_with_config_versions_and_hardware():
    envelope = report.envelope("demo", {"x": 1}, {"ours": [1.5, 2.5]}, {"seed": 3}, seconds=4.5)

    parsed = json.loads(json.dumps(envelope))
    assert parsed["name"] == "demo"
    assert parsed["claims"] == {"x": 1}
    assert parsed["arms"] == {"ours": [1.5, 2.5]}
    assert parsed["config"] == {"seed": 3}
    assert parsed["seconds"] == 4.5
    assert parsed["versions"]["quire"] == __version__
    assert set(parsed["versions"]) == {"quire", "python", "torch", "transformers", "numpy"}
    assert parsed["hardware"]["cores"] >= 1
    assert parsed["hardware"]["memory_bytes"] > 1 << 20
    assert parsed["hardware"]["cpu"]


def test_seconds_default_to_the_age_of_the_process():
    assert 0 < report.envelope("demo", {}, {}, {})["seconds"] < 24 * 3600  # type: ignore[operator]


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_commit_is_reported_only_if_git_tracks_the_file(
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


def test_missing_package_has_no_version():
    assert report.versions(["no-such-package"])["no-such-package"] is None
