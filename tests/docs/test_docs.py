"""Generated documents are current, examples run, and links are valid."""

import doctest
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from support.snippets import ROOT

DOCS = ROOT / "docs"
DOCUMENTS = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), ROOT / "training" / "README.md"])


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_documents_are_current(
    generate: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    stale = generate.main(["--check"])

    assert stale == 0, capsys.readouterr().out


def test_changed_document_is_stale(
    generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path("docs/reference/policies.md")
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(generate.HEADER + generate.policies() + "more\n")
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(
        generate, "documents", lambda: [(path, generate.HEADER + generate.policies())]
    )

    assert generate.main(["--check"]) == 1
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0


def test_only_the_text_between_marks_is_generated(generate: ModuleType) -> None:
    text = "before\n<!-- generated: recent -->\nold\n<!-- end -->\nafter\n"

    filled = generate.fill(text)

    source = (ROOT / "src/quire/policies/recent.py").read_text(encoding="utf-8")
    assert filled == (
        f"before\n<!-- generated: recent -->\n```python\n{source}```\n<!-- end -->\nafter\n"
    )


def test_every_command_has_its_help_in_the_reference() -> None:
    from quire.cli.main import app

    reference = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
    names = [c.callback.__name__.replace("_", "-") for c in app.registered_commands]

    assert len(names) >= 5
    assert [name for name in names if f"\n## quire {name}\n" not in reference] == []


def test_every_path_of_the_server_is_in_the_reference() -> None:
    from quire.config.sampling_params import RESPONSE_TEMPERATURE, RESPONSE_TOP_P
    from quire.serve.endpoints import Endpoints
    from quire.serve.kv_endpoints import KVEndpoints
    from quire.serve.params import COMPLETION_MAX_TOKENS
    from quire.serve.service import Service

    service = Service.__new__(Service)  # the routes are listed, not called
    page = (DOCS / "reference" / "http.md").read_text(encoding="utf-8")
    routers = (Endpoints(service).router(), KVEndpoints(service).router())
    routes = [route for router in routers for route in router.routes]

    assert len(routes) >= 11
    for route in routes:
        [method] = route.methods  # type: ignore[attr-defined]
        assert f"`{method} {route.path.replace(':path', '')}`" in page  # type: ignore[attr-defined]
    assert f"Default: {COMPLETION_MAX_TOKENS} for completions" in page
    defaults = f"{RESPONSE_TEMPERATURE:g} with `top_p` {RESPONSE_TOP_P:g}"
    assert f"the model's, else {defaults} |" in page


@pytest.mark.parametrize(
    ("page", "examples"),
    [
        ("memory.md", 20),
        ("maximize-batch.md", 11),
        ("tenants.md", 20),
        ("eviction.md", 7),
        ("kv-offload.md", 17),
        ("weights.md", 7),
    ],
)
def test_doctests_of_a_page_pass(page: str, examples: int) -> None:
    results = doctest.testfile(str(DOCS / page), module_relative=False, encoding="utf-8")

    assert results.attempted > examples
    assert results.failed == 0


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_are_valid(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]

    for link in links:
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), f"{path}: {link}"
        if anchor:
            assert anchor in _anchors(target), f"{path}: {link}"


def _anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
