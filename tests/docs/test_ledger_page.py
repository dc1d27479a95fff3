"""The ledger page: its snapshot is consistent, and all fields and events are documented."""

import json
import re

from quire.config.generation_request import GenerationRequest
from quire.scheduler.events import KEPT_EVENTS, KINDS
from support import engines
from support.ledger_sums import check_sums
from support.snippets import ROOT

PAGE = (ROOT / "docs" / "ledger.md").read_text(encoding="utf-8")
SNAPSHOT, EVENT = (json.loads(block) for block in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL))


def names(value):
    """The names of all fields, without those that are data (codecs, reference counts)."""
    if isinstance(value, list):
        return names(value[0]) if value else {}
    if isinstance(value, dict):
        return {key: {} if key in ("codec", "references") else names(value[key]) for key in value}
    return {}


def test_snapshot_sums_are_consistent():
    check_sums(SNAPSHOT)

    assert {extent["sharing"] for row in SNAPSHOT["requests"] for extent in row["extents"]} == {
        "private",
        "shared",
    }
    assert SNAPSHOT["axes"]["owner"]["prefix_cache"] > 0


def test_snapshot_has_the_fields_of_the_engines_ledger():
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


def test_every_kind_of_event_has_a_row():
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", PAGE, re.MULTILINE)
    documented = [kind for row in rows for kind in re.findall(r"\w+", row)]

    assert tuple(documented) == KINDS
    assert EVENT["kind"] in KINDS
    assert f"newest of {KEPT_EVENTS:,} stored events" in PAGE
