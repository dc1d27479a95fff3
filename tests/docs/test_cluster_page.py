"""docs/make_page.py cluster and docs/scale.md."""

from benchmarks.cluster.parts import PARTS
from quire.scale.routing.registry import ROUTERS
from support.measured_pages import load_maker
from support.snippets import ROOT


def test_every_part_has_a_title():
    assert list(load_maker().PAGES["cluster"].parts) == list(PARTS)


def test_every_router_has_a_row():
    table = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")

    for name in ROUTERS:
        assert f"\n| `{name}` |" in table
