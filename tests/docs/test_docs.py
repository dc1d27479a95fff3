import doctest
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from quire.config.generation_request import GenerationRequest
from quire.scheduler.events import KEPT_EVENTS, KINDS
from support import engines
from support.ledger_sums import check_sums
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


def test_generated_documents_are_current(generate, capsys) -> None:
    stale = generate.main(["--check"])
    assert stale == 0, capsys.readouterr().out


def test_changed_documents_are_stale_and_only_text_between_marks_is_generated(
    generate, tmp_path, monkeypatch
):
    path = Path("docs/reference/policies.md")
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(generate.HEADER + generate.policies() + "more\n")
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    made = generate.HEADER + generate.policies()
    monkeypatch.setattr(generate, "documents", lambda: [(path, made)])

    assert generate.main(["--check"]) == 1
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0

    text = "before\n<!-- generated: recent -->\nold\n<!-- end -->\nafter\n"

    filled = generate.fill(text)

    source = (ROOT / "src/quire/policies/recent.py").read_text(encoding="utf-8")
    code = f"<!-- generated: recent -->\n```python\n{source}```\n<!-- end -->"
    assert filled == f"before\n{code}\nafter\n"


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
        *(("memory.md", 20), ("maximize-batch.md", 11), ("tenants.md", 20)),
        *(("eviction.md", 7), ("kv-offload.md", 17), ("weights.md", 7)),
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


LEDGER = (ROOT / "docs" / "ledger.md").read_text(encoding="utf-8")
SNAPSHOT, EVENT = (
    json.loads(block) for block in re.findall(r"```json\n(.*?)```", LEDGER, re.DOTALL)
)


def names(value):
    """The names of all fields, without those that are data (codecs, reference counts)."""
    if isinstance(value, list):
        return names(value[0]) if value else {}
    if isinstance(value, dict):
        return {key: {} if key in ("codec", "references") else names(value[key]) for key in value}
    return {}


def test_snapshot_has_the_fields_and_consistent_sums_of_the_engines_ledger():
    check_sums(SNAPSHOT)

    extents = [extent for row in SNAPSHOT["requests"] for extent in row["extents"]]
    assert {extent["sharing"] for extent in extents} == {"private", "shared"}
    assert SNAPSHOT["axes"]["owner"]["prefix_cache"] > 0
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", LEDGER, re.MULTILINE)
    documented = [kind for row in rows for kind in re.findall(r"\w+", row)]
    assert tuple(documented) == KINDS
    assert EVENT["kind"] in KINDS
    assert f"newest of {KEPT_EVENTS:,} stored events" in LEDGER

    model = engines.load("llama")
    engine = engines.engine_for(model, room=2, longest=40, page_tokens=4)
    engine.submit(GenerationRequest([3] * 20, engines.greedy(8)))
    engine.step()

    real, shown = names(engine.ledger()), names(SNAPSHOT)

    assert list(real) == list(shown)
    for part in ("requests", "tenants", "host"):
        assert real[part] == shown[part]
    for axis in ("location", "owner"):
        assert real["axes"][axis] == shown["axes"][axis]
    assert list(real["axes"]) == list(shown["axes"])
