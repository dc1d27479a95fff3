import re
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

import quire
from support.snippets import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a broken link, a missing anchor or a page outside the navigation fails."""
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
    return folder


@pytest.mark.slow
def test_public_names_have_a_reference_and_pages_can_be_searched(site: Path) -> None:
    page = (site / "reference" / "api.html").read_text(encoding="utf-8")

    for name in set(quire.__all__) - {"__version__"}:
        assert re.search(rf'id="quire\.[a-z_.]*\.{name}"', page), name
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert "guides/" in index or "serving.html" in index


def test_a_page_in_the_navigation_has_its_heading_or_the_heading_up_to_its_colon() -> None:
    titles: dict[str, str] = {}
    sections = load_config(str(ROOT / "mkdocs.yml")).nav or []
    for section in sections:
        for pages in section.values():
            for page in pages:
                titles |= page if isinstance(page, dict) else {heading(page): page}
    assert len(titles) == sum(len(pages) for section in sections for pages in section.values())
    for title, page in titles.items():
        assert title in (heading(page), heading(page).partition(":")[0]), page


def heading(page: str) -> str:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    [found] = re.findall(r"^# (.+)$", text, flags=re.MULTILINE)[:1]
    return str(found)


@pytest.mark.slow  # links of the documents are checked by tests/docs/test_docs.py too
def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    loaded = re.compile(r'<(?:script|img|link)[^>]+(?:src|href)="(https?://[^"]+)"')
    canonical = "https://quire"
    found = {
        (page.name, address)
        for page in site.rglob("*.html")
        for address in loaded.findall(page.read_text(encoding="utf-8"))
        if not address.startswith(canonical)
    }
    assert not found
