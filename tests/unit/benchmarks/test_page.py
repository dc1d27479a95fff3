"""The roofline page."""

import builtins
from html.parser import HTMLParser
from typing import Any

import pytest

from benchmarks.throughput.measured import ENGINE, PARTS
from benchmarks.throughput.page import COLUMNS, cells, page, roofline_from
from quire.errors import ConfigError


def run_object() -> dict[str, Any]:
    costs = [
        {"name": name, "weight_bytes": 1_000_000, "kv_bytes": 0, "flops": 2_000_000_000}
        for name in PARTS
    ]
    seconds = dict.fromkeys((*PARTS, ENGINE), 0.01)
    measure = {"tokens": 32.0, "steps": 5, "costs": costs, "seconds": seconds}
    return {
        "name": "bench throughput",
        "claims": {"read_bytes_per_s": 1e9, "product_flops_per_s": 1e12, "quire_total_s": 1.5},
        "arms": {"parts": [measure | {"kind": "prefill"}, measure | {"kind": "decode"}]},
        "config": {
            "workload": {"model": "<125m>", "prompts": 32, "prompt_tokens": 512, "new_tokens": 64},
            "threads": 2,
        },
        "hardware": {"cpu": "a processor"},
        "versions": {"torch": "2.13.0", "transformers": "5.23.0", "quire": "0.1.0"},
        "commit": "abc",
    }


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_page_lists_all_parts_of_all_steps_and_all_claims():
    text = page(roofline_from(run_object()))

    for name in (*PARTS, ENGINE, "total"):
        assert text.count(f"<td>{name}</td>") == 2, name
    assert "<h2>Prefill</h2>" in text
    assert "<h2>Decode</h2>" in text
    assert "<td>quire_total_s</td><td>1.5</td>" in text
    assert "a processor, 2 threads" in text


def test_page_is_self_contained():
    tags = Tags()
    tags.feed(page(roofline_from(run_object())))

    names = [name for name, _ in tags.found]
    assert names.count("svg") == 1
    assert not {"script", "img", "link", "iframe"} & set(names)
    assert all(
        (attributes.get("xlink:href") or "#").startswith("#") for _, attributes in tags.found
    )


def test_page_escapes_text():
    assert "Llama (&lt;125m&gt;)" in page(roofline_from(run_object()))


def test_table_row_matches_hand_computation():
    """1 MB at 1 GB/s is 1 ms, 2 GFLOP at 1 TFLOP/s is 2 ms; measured 10 ms of 70."""
    roofline = roofline_from(run_object())
    [first, *_] = cells(roofline.measures[0], roofline)

    assert dict(zip(COLUMNS, first, strict=True)) == {
        "part": "qkv",
        "MB": "1.0",
        "GFLOP": "2.00",
        "FLOP/B": "2,000.0",
        "floor ms": "2.00",
        "measured ms": "10.00",
        "over floor": "5.0",
        "share": "14%",
    }


def test_equal_runs_render_equal_pages():
    assert page(roofline_from(run_object())) == page(roofline_from(run_object()))


@pytest.mark.parametrize("missing", ["claims", "arms", "config", "hardware", "versions", "commit"])
def test_object_without_a_field_raises(missing: str):
    with pytest.raises(ConfigError, match="benchmarks throughput --json"):
        roofline_from({key: value for key, value in run_object().items() if key != missing})


def test_missing_matplotlib_error_names_the_package(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)

    with pytest.raises(ConfigError, match=r"quire\[report\]"):
        page(roofline_from(run_object()))
