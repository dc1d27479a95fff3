"""The committed measured pages are those of the committed results."""

import shutil
from pathlib import Path

import pytest

from support.measured_pages import load_maker
from support.snippets import ROOT

DOCS = ROOT / "docs"
MAKER = load_maker()


@pytest.mark.parametrize("name", [*MAKER.PAGES, "roofline", "demo"])
def test_a_page_made_again_of_what_is_stored_is_the_committed_one(name: str, tmp_path: Path):
    """Pictures are compared by name: their bytes depend on the version of matplotlib."""
    pytest.importorskip("matplotlib")
    (tmp_path / "images").mkdir()
    shutil.copytree(DOCS / "results", tmp_path / "results")

    MAKER.main([name], tmp_path)

    for made in tmp_path.glob("*.md"):
        assert made.read_text() == (DOCS / made.name).read_text(encoding="utf-8"), made.name
    pictures = {path.name for path in (tmp_path / "images").iterdir()}
    assert pictures <= {path.name for path in (DOCS / "images").iterdir()}
    for stored in (tmp_path / "results").iterdir():
        assert stored.read_bytes() == (DOCS / "results" / stored.name).read_bytes()


def test_an_unknown_page_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        MAKER.main(["stack"])

    assert "choose from eviction, kvcrush, memory" in capsys.readouterr().err.replace("'", "")
