"""`quire board`: a run that resumes, and options that are refused."""

import json

SMALL = (
    *("board", "quire-tiny", "--kv-memory", "8MiB", "--tasks", "repeats", "--codecs", "none"),
    *("--rules", "sinks;nonsense", "--budgets", "50%", "--schedules", "prefill_end"),
    *("--num-prompts", "3", "--seeds", "1", "--tokens", "200", "--no-sanity-check", "--json"),
)


def test_a_run_resumes_and_reports_what_is_refused(quire, tmp_path):
    first = quire(*SMALL, "--out", tmp_path)
    assert first.exit_code == 0, first.stderr
    again = quire(*SMALL, "--out", tmp_path)

    result = json.loads(first.stdout.splitlines()[-1])
    assert result["claims"]["entries"] == 2
    [why] = result["arms"]["refused"].values()
    assert "nonsense" in why
    assert json.loads(again.stdout.splitlines()[-1])["arms"] == result["arms"]  # tokens/s too
    assert {"board.md", "board.json"} <= {path.name for path in tmp_path.iterdir()}


def test_a_memory_of_a_fixed_size_is_required(quire):
    result = quire("board", "quire-tiny", "--evict", "h2o:cap=8")

    assert result.exit_code == 2
    assert "quire board needs a KV memory of a fixed size" in result.stderr
