"""docs/make_page.py kvcrush: from runs of the bench, part by part, to a page."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from support.measured_pages import load_maker, run_object


@pytest.fixture
def maker() -> ModuleType:
    return load_maker()


def test_parts_that_ran_apart_share_a_page(maker: ModuleType, tmp_path: Path):
    for folder in ("results", "images"):
        (tmp_path / folder).mkdir()
    runs = (
        run_object("kvcrush", "overhead", {"overhead_fraction": 0.003}),
        run_object("kvcrush", "long", {"long_kl_gain_mean": -1}),
    )
    for name, run in zip("ab", runs, strict=True):
        (tmp_path / name).write_text("words\n" + json.dumps(run) + "\n")

    maker.main(["kvcrush", str(tmp_path / "a")], tmp_path)
    maker.main(["kvcrush", str(tmp_path / "b")], tmp_path)

    text = (tmp_path / "kvcrush-measured.md").read_text()
    assert "| `overhead_fraction` | 0.003 | at most 0.005 |" in text
    assert "| `long_kl_gain_mean` | -1 | above 0 |" in text
    assert text.index("## The paper's budget") < text.index("## Overhead of")
    kept = json.loads((tmp_path / "results" / "kvcrush.json").read_text())
    assert set(kept["arms"]) == {"overhead", "long"}


def test_every_part_has_a_title(maker: ModuleType):
    from benchmarks.eviction.cells import CellFile
    from benchmarks.kvcrush.parts import Material, make_parts

    def nothing(*_: object) -> None:
        raise AssertionError("no part is run here")

    material = Material(
        load=nothing,
        prompt_maker_for=nothing,
        running_for=nothing,
        recorded_for=nothing,
        rouge_l=nothing,
        stored=CellFile(None),
        commit=None,
        show=nothing,
    )

    assert list(maker.PAGES["kvcrush"].parts) == list(make_parts(material))


def test_a_row_of_another_commit_is_named_with_it(maker: ModuleType, tmp_path: Path):
    for folder in ("results", "images"):
        (tmp_path / folder).mkdir()
    run = run_object("kvcrush", "overhead", {"overhead_fraction": 0.003})
    (tmp_path / "a").write_text(json.dumps(run))
    maker.main(["kvcrush", str(tmp_path / "a")], tmp_path)
    path = tmp_path / "results" / "kvcrush.json"
    kept = json.loads(path.read_text())
    kept["arms"]["overhead"]["made"]["rows"] = {"average": "0123456789"}
    path.write_text(json.dumps(kept))
    maker.main(["kvcrush"], tmp_path)

    assert ". Row `average`: commit 0123456.\n" in (tmp_path / "kvcrush-measured.md").read_text()


def test_rows_of_openvinos_form_around_average_are_those_of_raw_accumulated_attention():
    """They were measured again when the form began to take bits from raw attention."""
    docs = Path(__file__).parents[2] / "docs"
    kept = json.loads((docs / "results" / "kvcrush.json").read_text(encoding="utf-8"))
    for part in ("quality", "fidelity"):
        made = kept["arms"][part]["made"]
        [commit] = made["rows"].values()
        assert commit != made["commit"]
