"""docs/make_page.py kvcrush: a page from separate runs of the benchmark."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from support.measured_pages import load_maker, run_object


@pytest.fixture
def maker() -> ModuleType:
    return load_maker()


def test_separately_run_parts_share_a_page(maker: ModuleType, tmp_path: Path):
    for folder in ("results", "images"):
        (tmp_path / folder).mkdir()
    runs = (
        run_object("kvcrush", "overhead", {"added_overhead_fraction": 0.003}),
        run_object("kvcrush", "long", {"long_kl_gain_mean": -1}),
    )
    for name, run in zip("ab", runs, strict=True):
        (tmp_path / name).write_text("words\n" + json.dumps(run) + "\n")

    maker.main(["kvcrush", str(tmp_path / "a")], tmp_path)
    maker.main(["kvcrush", str(tmp_path / "b")], tmp_path)

    text = (tmp_path / "kvcrush-measured.md").read_text()
    assert "| `added_overhead_fraction` | 0.003 | at most 0.005 |" in text
    assert "| `long_kl_gain_mean` | -1 | above 0 |" in text
    assert text.index("## The paper's budget") < text.index("## Overhead of")
    stored = json.loads((tmp_path / "results" / "kvcrush.json").read_text())
    assert set(stored["arms"]) == {"overhead", "long"}


def test_row_of_another_commit_is_labelled(maker: ModuleType, tmp_path: Path):
    for folder in ("results", "images"):
        (tmp_path / folder).mkdir()
    run = run_object("kvcrush", "overhead", {"added_overhead_fraction": 0.003})
    (tmp_path / "a").write_text(json.dumps(run))
    maker.main(["kvcrush", str(tmp_path / "a")], tmp_path)
    path = tmp_path / "results" / "kvcrush.json"
    stored = json.loads(path.read_text())
    stored["arms"]["overhead"]["made"]["rows"] = {"average": "0123456789"}
    path.write_text(json.dumps(stored))
    maker.main(["kvcrush"], tmp_path)

    assert ". Row `average`: commit 0123456.\n" in (tmp_path / "kvcrush-measured.md").read_text()


def test_openvino_rows_are_of_the_commit_with_raw_attention_sums():
    """These rows were measured again after signatures used raw attention."""
    docs = Path(__file__).parents[2] / "docs"
    stored = json.loads((docs / "results" / "kvcrush.json").read_text(encoding="utf-8"))
    for part in ("quality", "fidelity"):
        made = stored["arms"][part]["made"]
        [commit] = made["rows"].values()
        assert commit != made["commit"]
