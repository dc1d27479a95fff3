"""`benchmarks/guides`: figures of the guides are measured with the text of the pages."""

import json
from pathlib import Path

import pytest

from benchmarks.guides import lm_eval, simulate
from quire.policies import registry
from support.snippets import ROOT


def test_simulation_of_the_guide_gives_the_stored_figures(capsys: pytest.CaptureFixture[str]):
    stored = json.loads((ROOT / "docs/results/simulate_guide.json").read_text())["claims"]

    with registry.temporary_registrations():
        simulate.main()

    found = json.loads(capsys.readouterr().out.splitlines()[-1])["claims"]
    names = ("kv_mean_share", "kv_peak_share", "waste_fraction", "refused_never_fits")
    for name in (f"{variant}_{name}" for variant in ("full", "rule") for name in names):
        assert found[name] == pytest.approx(stored[name])
    assert (found["full_refused_never_fits"], found["rule_refused_never_fits"]) == (2, 0)


def test_tasks_of_the_guide_are_written_from_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)

    lm_eval.write_tasks(lm_eval.PAGE.read_text(encoding="utf-8"))

    lines = (tmp_path / "tasks/pairs.jsonl").read_text().splitlines()
    assert len(lines) == 40
    assert json.loads(lines[-1])["answer"] == "17049"
    names = sorted(path.stem for path in (tmp_path / "tasks").glob("*.yaml"))
    assert names == ["quire_pairs", "quire_pairs_choice", "quire_perplexity"]
    for name in names:
        assert f"task: {name}\n" in (tmp_path / f"tasks/{name}.yaml").read_text()


def test_page_without_the_program_is_refused():
    with pytest.raises(ValueError, match=r"expected a block of python .* in lm-eval\.md"):
        lm_eval.write_tasks("# A page\n")
