"""Tables of measured values: units, wrapping, and width without a terminal."""

import pytest

from benchmarks.common.tables import show_claims, with_unit
from quire.cli.evaluate_run import _SCORES, _cell_rows
from quire.cli.tables import seconds, show_table
from quire.evals.suite.cells import CellResult, PromptResult


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("kv_peak_bytes", 1 << 20, "1.00 MiB"),
        ("run_s", 2.5, "2.50 s"),
        ("token_p50_s", 0.0123, "12.3 ms"),
        ("prefill_s_512", 0.5, "500.0 ms"),
        ("output_tokens_per_s", 1234.56, "1,234.6 tokens/s"),
        ("requests_per_s", 2.0, "2.0 requests/s"),
        ("read_bytes_per_s", 2.5e9, "2.5 GB/s"),
        ("bfloat16_flops_per_s", 3e11, "300.0 GFLOP/s"),
        ("preemptions", 1200, "1,200"),
        ("mean_regret", 0.01234567, "0.01235"),
    ],
)
def test_value_has_the_unit_of_its_claim(name, value, text):
    assert with_unit(name, value) == text


def test_times_below_a_second_are_in_milliseconds():
    assert seconds(1.0) == "1.00 s"
    assert seconds(0.25) == "250.0 ms"


@pytest.mark.parametrize("columns", ["40", "80"])
def test_long_names_wrap_and_are_not_cut(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    name = "a_claim_with_a_long_name_that_a_document_cites_per_model_and_shape_s"
    show_claims("Claims", {name: 1.5})

    lines = capsys.readouterr().out.splitlines()
    cells = "".join(line.split("│")[1].strip() for line in lines if line.startswith("│"))
    assert cells == name
    assert max(map(len, lines)) <= int(columns)


def test_a_file_gets_lines_wider_than_a_terminal(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    show_table("Wide", ("name", "value"), [("x" * 120, "1")])

    assert "x" * 120 in capsys.readouterr().out


def test_scores_of_an_evaluation_fit_into_80_columns(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    resources = {"prompt_tokens": 400, "output_tokens": 9, "kv_peak_bytes": 134_400}
    scores = [number / 100 for number in range(1, 100)] * 2
    prompts = tuple(
        PromptResult(scores={"recall": score}, depth=None, chance=0.0, output="", **resources)
        for score in scores
    )
    rule = "snapkv:cap=25%,when=prefill_end,window=16"
    cell = CellResult(task="niah_multiquery", tokens=512, arm=rule, prompts=prompts, seconds=1.0)
    show_table("Scores", _SCORES, _cell_rows(cell))

    shown = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80
    cells = (
        "niah_multiquery_512",
        "recall",
        "cap=25%,",
        "0.459 to 0.541",
        "131.25 KiB",
        "window=16",
    )
    assert all(text in shown for text in cells), shown


def test_markup_in_cells_is_text(monkeypatch, capsys):
    show_table("[bold]", ("a",), [("[red]x[/red]",)])

    shown = capsys.readouterr().out
    assert "[red]x[/red]" in shown
    assert "[bold]" in shown
