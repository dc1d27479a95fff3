"""The README's chart of engines in equal KV bytes."""

from benchmarks.peers.chart import PART, bars, chart_svg
from benchmarks.peers.measures import max_at_once

COLUMNS = ["engine", "KV MB", "tokens/s", "at once", "error"]


def stored(*rows):
    return {"arms": {PART: {"tables": [{"columns": COLUMNS, "rows": list(rows)}]}}}


def test_bars_are_in_a_fixed_order_without_failed_engines():
    run = stored(
        ["quire", 75.5, 400.4, 9, ""],
        ["openvino", 75.5, 250.0, 8, ""],
        ["vllm", None, None, None, "no result: time limit"],
        ["quire_int8", 75.5, 500.0, 20, ""],
    )

    found = bars(run)

    assert [bar.engine for bar in found] == ["openvino", "quire"]
    assert found[1].at_once == 9
    assert found[1].kv_bytes == 75_500_000


def test_chart_shows_names_and_numbers():
    picture = chart_svg(bars(stored(["quire", 75.5, 1400.4, 9, ""]))).decode()

    assert ">Quire<" in picture
    assert ">1,400<" in picture
    assert ">9<" in picture


def test_max_at_once_counts_requests_between_first_and_last_token():
    assert max_at_once([[1.0, 2.0, 3.0], [2.5, 4.0], [3.5, 5.0]]) == 2
    assert max_at_once([[1.0, 2.0], [2.0, 3.0]]) == 1  # the second starts when the first ends
    assert max_at_once([]) == 0
