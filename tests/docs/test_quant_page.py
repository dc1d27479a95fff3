"""docs/make_page.py quant: a page from separate runs of the benchmark."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from support.measured_pages import load_maker, run_object


@pytest.fixture
def maker() -> ModuleType:
    return load_maker()


def test_separately_run_parts_share_a_page(maker: ModuleType, tmp_path: Path):
    for folder in ("results", "images"):
        (tmp_path / folder).mkdir()
    runs = (
        run_object("quant", "quality", {"int8_kl": 0.003}),
        run_object("quant", "attention", {"int8_attention_speedup": 2}),
    )
    for name, run in zip("ab", runs, strict=True):
        (tmp_path / name).write_text("words\n" + json.dumps(run) + "\n")

    maker.main(["quant", str(tmp_path / "a")], tmp_path)
    maker.main(["quant", str(tmp_path / "b")], tmp_path)

    text = (tmp_path / "quant-measured.md").read_text()
    assert "| `int8_attention_speedup` | 2 | at least 1.5 |" in text
    assert "| `int8_kl` | 0.003 |  |" in text
    assert text.index("## Attention of a decode") < text.index("## Texts and tasks")
    stored = json.loads((tmp_path / "results" / "quant.json").read_text())
    assert set(stored["arms"]) == {"quality", "attention"}


def test_every_part_has_a_title(maker: ModuleType):
    from benchmarks.eviction.cells import CellFile
    from benchmarks.eviction.parts import Material
    from benchmarks.quant.parts import make_parts

    def unused(*_: object) -> None:
        raise AssertionError("no part is run here")

    material = Material(
        load=unused,
        prompt_maker_for=unused,
        running_for=unused,
        stored=CellFile(None),
        commit=None,
        show=unused,
    )

    assert list(maker.PAGES["quant"].parts) == list(make_parts(material))
