"""docs/make_quant.py: from runs of the bench, part by part, to a page."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from quire.bench.result import PartResult, Table
from snippets import ROOT


@pytest.fixture
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_quant", ROOT / "docs/make_quant.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_object(part: str, **claims: float) -> dict[str, Any]:
    table = Table(name="t", caption="Of it.", columns=("a", "b"), rows=(("r", 1.5),))
    made = PartResult(claims=claims, tables=(table,), raw={"a": [1]})
    return {
        "name": "bench quant",
        "claims": claims,
        "arms": {part: made.to_json()},
        "config": {"threads": 1},
        "hardware": {"cpu": "a processor"},
        "versions": {"torch": "2.13.0", "quire": "0.1.0"},
        "commit": "abc",
    }


def test_parts_that_ran_apart_share_a_page(maker: ModuleType, tmp_path: Path):
    for folder in ("results", "images"):
        (tmp_path / folder).mkdir()
    runs = run_object("quality", int8_kl=0.003), run_object("attention", int8_attention_speedup=2)
    for name, run in zip("ab", runs, strict=True):
        (tmp_path / name).write_text("words\n" + json.dumps(run) + "\n")

    maker.main([str(tmp_path / "a")], tmp_path)
    maker.main([str(tmp_path / "b")], tmp_path)

    text = (tmp_path / "quant-measured.md").read_text()
    assert "| `int8_attention_speedup` | 2 | at least 1.5 |" in text
    assert "| `int8_kl` | 0.003 |  |" in text
    assert text.index("## Attention of") < text.index("## Texts and tasks")
    kept = json.loads((tmp_path / "results" / "quant.json").read_text())
    assert set(kept["arms"]) == {"quality", "attention"}


def test_every_part_has_a_title(maker: ModuleType):
    from quire.bench.eviction.cells import CellFile
    from quire.bench.eviction.parts import Material
    from quire.bench.quant.parts import make_parts

    def nothing(*_: object) -> None:
        raise AssertionError("no part is run here")

    material = Material(
        load=nothing,
        asking_for=nothing,
        running_for=nothing,
        kept=CellFile(None),
        commit=None,
        show=nothing,
    )

    assert list(maker.TITLES) == list(make_parts(material))
