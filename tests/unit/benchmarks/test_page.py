"""The roofline page."""

from functools import cache
from html.parser import HTMLParser

import pytest

from benchmarks.roofline.measured import ENGINE, PARTS, SAMPLING
from benchmarks.roofline.page import PART_COLUMNS, page, part_cells, roofline_from, step_rows
from quire.errors import ConfigError
from support.roofline_cells import run_object


@cache
def usual_page() -> str:
    return page(roofline_from(run_object()))


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_every_instruction_set_is_a_section_with_its_steps():
    text = usual_page()

    assert text.index("<h2>avx512_bf16</h2>") < text.index("<h2>avx2</h2>")
    for name in (*PARTS, SAMPLING, ENGINE, "total"):  # prefill, decode 1; and decode 32
        assert text.count(f"<td>{name}</td>") == 5, name
    assert "<td>decode_step_over_floor_avx2_int8</td><td>6.43</td><td>at most 1.5</td>" in text
    assert "a &lt;processor&gt;, 2 threads" in text
    assert "90.0 (6.43)" in text


def test_page_is_self_contained():
    tags = Tags()
    tags.feed(usual_page())

    names = [name for name, _ in tags.found]
    assert names.count("svg") == 2
    assert not {"script", "img", "link", "iframe"} & set(names)
    assert all(
        (attributes.get("xlink:href") or "#").startswith("#") for _, attributes in tags.found
    )


def test_table_row_matches_hand_computation():
    """1 MB at 1 GB/s is 1 ms, 2 GFLOP at 1 TFLOP/s is 2 ms; measured 10 ms of 90."""
    cell = roofline_from(run_object()).cells[1]
    [first, *_] = part_cells(cell.steps[0], cell)

    assert dict(zip(PART_COLUMNS, first, strict=True)) == {
        "part": "qkv",
        "arithmetic": "bfloat16",
        "MB": "1.0",
        "GFLOP": "2.00",
        "floor ms": "2.00",
        "measured ms": "10.00",
        "over floor": "5.0",
        "share": "11%",
    }


def test_steps_that_a_cell_lacks_are_empty():
    assert next(step_rows(roofline_from(run_object()).cells))[1:] == (
        *("90.0 (6.43)", "90.0 (6.43)"),
        *("", ""),
    )


def test_equal_runs_render_equal_pages():
    assert page(roofline_from(run_object())) == usual_page()


@pytest.mark.parametrize("missing", ["claims", "arms", "config", "hardware", "versions", "commit"])
def test_object_without_a_field_raises(missing: str):
    with pytest.raises(ConfigError, match="benchmarks roofline --json"):
        roofline_from({key: value for key, value in run_object().items() if key != missing})


def test_missing_matplotlib_error_names_the_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(ConfigError, match=r"quire-llm\[report\]"):
        page(roofline_from(run_object()))
