"""The committed measured pages equal those generated from the committed results."""

import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from benchmarks.batch_max.command import PARTS as BATCH_MAX
from benchmarks.cluster.parts import PARTS as CLUSTER
from benchmarks.eviction import PARTS as EVICTION
from benchmarks.kvcrush import PARTS as KVCRUSH
from benchmarks.memory.command import PARTS as MEMORY
from benchmarks.offload.command import PARTS as OFFLOAD
from benchmarks.quant.command import PARTS as QUANT
from benchmarks.rebatch.parts import PARTS as REBATCH
from benchmarks.weights import PARTS as WEIGHTS
from quire.scale.routing.policies import ROUTERS
from quire.scheduler.batchers import DENSE_BATCHERS
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


@pytest.mark.parametrize(
    ("page", "parts"),
    [
        ("cluster", CLUSTER),
        (
            "eviction",
            [*(f"batch-max-{name}" for name in BATCH_MAX), *(f"rules-{n}" for n in EVICTION)],
        ),
        ("kvcrush", KVCRUSH),
        ("memory", MEMORY),
        ("offload", OFFLOAD),
        ("quant", QUANT),
        ("rebatch", REBATCH),
        ("weights", WEIGHTS),
    ],
)
def test_every_part_has_a_title(page: str, parts: Iterable[str]):
    assert list(MAKER.PAGES[page].parts) == list(parts)


@pytest.mark.parametrize(
    ("page", "names"), [("batchers", (*DENSE_BATCHERS, "continuous")), ("scale", ROUTERS)]
)
def test_every_registered_name_has_a_row(page: str, names: Iterable[str]):
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")

    assert all(f"\n| `{name}` |" in text for name in names)


def test_unknown_page_is_refused_with_the_known_pages(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        MAKER.main(["stack"])

    assert "choose from eviction, kvcrush, memory" in capsys.readouterr().err.replace("'", "")
