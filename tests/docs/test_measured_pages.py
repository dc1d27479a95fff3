"""The committed measured pages equal those generated from the committed results."""

import shutil
from pathlib import Path

import pytest

from support.measured_pages import load_maker
from support.snippets import ROOT

DOCS = ROOT / "docs"
MAKER = load_maker()


# a page without stored results has not been written yet
STORED = [name for name in MAKER.PAGES if (DOCS / "results" / f"{name}.json").exists()]


@pytest.mark.parametrize("name", [*STORED, "roofline", "demo"])
def test_page_generated_from_stored_results_equals_the_committed_page(name: str, tmp_path: Path):
    """Images are compared by name: their bytes depend on the version of matplotlib."""
    pytest.importorskip("matplotlib")
    (tmp_path / "images").mkdir()
    shutil.copytree(DOCS / "results", tmp_path / "results")

    MAKER.main([name], tmp_path)

    for generated in tmp_path.glob("*.md"):
        assert generated.read_text() == (DOCS / generated.name).read_text(encoding="utf-8"), (
            generated.name
        )
    images = {path.name for path in (tmp_path / "images").iterdir()}
    assert images <= {path.name for path in (DOCS / "images").iterdir()}
    for stored in (tmp_path / "results").iterdir():
        assert stored.read_bytes() == (DOCS / "results" / stored.name).read_bytes()


def test_unknown_page_is_refused_with_the_known_pages(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        MAKER.main(["stack"])

    assert "choose from eviction, kvcrush, memory" in capsys.readouterr().err.replace("'", "")
