"""docs/make_page.py eviction: one page from separate runs of two benchmarks."""

import json
from pathlib import Path

from support.measured_pages import load_maker, run_object


def test_runs_of_two_benchmarks_share_a_page(tmp_path: Path):
    for folder in ("results", "images"):
        (tmp_path / folder).mkdir()
    maker, text = load_maker(), ""
    for bench, part, claim, value in (
        ("batch-max", "speed", "bm_over_ed_throughput", 1.75),
        ("eviction", "cost", "eviction_cost_share", 0.5),
        ("eviction", "ready", "ready_layer_us", 8),
    ):
        run = run_object(bench, part, {claim: value})
        (tmp_path / "run").write_text("words\n" + json.dumps(run) + "\n")
        maker.main(["eviction", str(tmp_path / "run")], tmp_path)
        text = (tmp_path / "eviction-measured.md").read_text()
        assert f"| `{claim}` | {value} |" in text

    assert "| `bm_over_ed_throughput` | 1.75 | at least 1.5 |" in text
    assert text.index("## Batch-Max: throughput") < text.index("## Cost of eviction")
    stored = json.loads((tmp_path / "results" / "eviction.json").read_text())
    assert set(stored["arms"]) == {"batch-max-speed", "rules-cost", "rules-ready"}
    assert "raw" not in stored["arms"]["rules-cost"]

    maker.main(["eviction"], tmp_path)
    assert (tmp_path / "eviction-measured.md").read_text() == text

    later = run_object("eviction", "cost", {"eviction_cost_share": 0.25}) | {"commit": "def"}
    (tmp_path / "run").write_text(json.dumps(later))
    maker.main(["eviction", str(tmp_path / "run")], tmp_path)
    text = (tmp_path / "eviction-measured.md").read_text()
    assert "## Cost of eviction\n\nCommit def, 1 thread." in text
    assert text.count("Commit abc, 1 thread.") == 2
