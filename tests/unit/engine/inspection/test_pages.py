"""Encoding of the page map: runs, totals and size."""

import base64
import json

import numpy as np
import pytest

from quire.engine.inspection.totals import PageOwners
from quire.kv.page_map import EVICTED, FIRST_ROW, ClassFacts, PageFacts
from quire.layout.codec_names import codec_spec
from quire.layout.pages import kv_pages

PLAIN = kv_pages(
    key=codec_spec("float32"), value=codec_spec("float32"), head_dim=8, heads=1, tokens=4
)
CODED = kv_pages(key=codec_spec("int8"), value=codec_spec("int8"), head_dim=8, heads=1, tokens=4)


def owners_of(owner, state=None, page_class=PLAIN, num_rows=2):
    owner = np.asarray(owner, dtype=np.uint16)
    state = np.zeros(len(owner), np.uint8) if state is None else np.asarray(state, np.uint8)
    pages = np.arange(len(owner), dtype=np.int32)
    facts = PageFacts((ClassFacts(page_class, "codec", pages, owner, state),))
    rows = [{"kind": "request", "request_id": f"r{i}", "tenant": "t"} for i in range(num_rows)]
    return PageOwners(facts, rows, [["full"]], {})


def decoded(body):
    runs = {name: base64.b64decode(text) for name, text in body["runs"].items()}
    count = np.frombuffer(runs["count"], "<u2")
    return (
        np.repeat(np.frombuffer(runs["owner"], "<u2"), count).tolist(),
        np.repeat(np.frombuffer(runs["state"], np.uint8), count).tolist(),
    )


@pytest.mark.parametrize(
    "owner", [[], [0], [0, 0, 2, 2, 3, 0], [2, 3] * 50, [0] * 70_000 + [2] * 65_536]
)
def test_runs_decode_to_the_cells(owner):
    state = [o % 3 for o in owner]
    assert decoded(owners_of(owner, state).encode(1 << 20)) == (owner, state)


def test_map_of_100_000_pages_without_equal_neighbours_is_smaller_than_1_mb():
    owner = np.arange(100_000) % 250 + FIRST_ROW
    body = owners_of(owner, num_rows=250).encode()

    assert decoded(body)[0] == owner.tolist()
    assert len(json.dumps(body)) < 1_000_000


def test_map_with_fewer_cells_shows_every_nth_page_and_exact_totals():
    body = owners_of([0, 2, 2, 3, 3, 3, 0, 1]).encode(3)

    assert body["pages_per_cell"] == 3
    assert decoded(body)[0] == [0, 3, 0]
    assert [one["pages"] for one in body["owners"]] == [2, 1, 2, 3]
    assert [one["bytes"] // PLAIN.page_bytes for one in body["owners"]] == [2, 1, 2, 3]
    assert "runs" not in owners_of([0, 2]).encode(with_map=False)


@pytest.mark.parametrize(
    ("page_class", "expected"),
    [(PLAIN, {"exact": 2, "evicted": 1, "quantized": 0}), (CODED, {"quantized": 2, "evicted": 1})],
)
def test_states_add_up_to_the_pages_in_use(page_class, expected):
    body = owners_of([0, 2, 2, 3], [0, 0, EVICTED, 0], page_class).encode()

    pages = {name: size // page_class.page_bytes for name, size in body["states"].items()}
    assert pages | expected == pages
    assert sum(pages[name] for name in ("exact", "evicted", "quantized")) == 3
