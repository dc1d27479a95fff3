"""`python -m benchmarks paper` as a command: the quick form of some items on quire-tiny."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from benchmarks.__main__ import app
from benchmarks.paper import shapes


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["paper", *arguments])


def quick(*arguments: str) -> dict:
    result = command(*arguments, "--quick", "--no-verify", "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def rows_of(run: dict, item: str) -> dict[str, dict]:
    return {row["label"]: row for row in run["arms"][item]["raw"]["rows"]}


def test_list_shows_all_items_and_runs_nothing():
    result = command("004", "--list")

    assert result.exit_code == 0
    assert all(item in result.stdout for item in ("table-1", "table-2", "figure-7"))


def test_list_as_json_has_the_status_of_a_full_run():
    result = command("003", "--list", "--json")

    listed = json.loads(result.stdout.splitlines()[-1])["arms"]
    assert len(listed) == 13
    assert listed["figure-12"]["status"] == "not comparable"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("009",), "unknown paper '009'"),
        (("003", "--items", "figure-11"), "unknown item 'figure-11'"),
        (("003", "--items", "table-1,table-1"), "expected each item once"),
        (("003", "--model", "random:llama-9"), "unknown model shape 'llama-9'"),
        (("003", "--layers", "2"), "--layers 2 has no effect on quire-tiny"),
        (("003", "--model", "random:opt-13b", "--layers", "99"), "expected --layers from 1 to 40"),
        (("000", "--data", "gsm9k=x.jsonl"), "unknown task 'gsm9k'"),
        (("000", "--data", "gsm8k"), "expected each task once, as gsm8k=FILE"),
        (("000", "--model", " "), "expected a model folder"),
    ],
)
def test_bad_option_is_refused_before_anything_is_loaded(arguments, message):
    result = command(*arguments)

    assert result.exit_code != 0
    assert message in str(result.exception) + result.output


def test_missing_file_of_examples_is_named(tmp_path: Path):
    path = tmp_path / "none.jsonl"
    result = command("000", "--quick", "--no-verify", "--data", f"gsm8k={path}")

    assert result.exit_code != 0
    assert "cannot read" in str(result.exception) + result.output


def test_formula_items_have_config_commit_and_versions(tmp_path: Path):
    run = quick("003", "--items", "table-1", "--out", str(tmp_path))

    assert run["name"] == "bench paper-003"
    assert run["config"]["model"] == "quire-tiny"
    assert run["versions"]["torch"]
    assert {"commit", "hardware", "seconds"} <= run.keys()
    assert run["quick_figures"]["rows_reproduced"] == 3
    names = {path.name for path in tmp_path.iterdir()}
    assert {"paper-003.json", "paper-003.md", "paper-003-table-1.json"} <= names


def test_texts_of_two_items_of_the_article_are_scored(tmp_path: Path):
    words = tmp_path / "words.txt"
    words.write_text("The cat sat on the mat and looked at the moon. " * 200)

    run = quick("001", "--items", "quantization,eviction", "--text", str(words))

    rules = rows_of(run, "paper-001-eviction")
    assert rules["Full cache"]["ours"][1] == pytest.approx(100)
    assert rules["H2O"]["ours"][0] == 64
    assert all(row["status"] == "scaled" for row in rules.values())
    assert "words.txt" in rules["H2O"]["reason"]
    codecs = rows_of(run, "paper-001-quantization")
    assert codecs["INT4"]["ours"][1] == pytest.approx(22.5)


@pytest.mark.slow
def test_batch_max_runs_its_protocol_on_stand_in_tasks():
    run = quick("000", "--items", "table-2", "--samples", "2")

    rows = rows_of(run, "paper-000-table-2")
    full, near = (rows[f"cnndm: {label}"] for label in ("FKV", "BM, near FKV's score"))
    assert near["ours"][2] >= 0.963 * full["ours"][2]
    assert near["ours"][1] < 256
    assert full["status"] == near["status"] == "scaled"
    assert "quire.evals instead of cnndm" in full["reason"]


@pytest.mark.slow
def test_kvcrush_fills_the_rows_of_one_model(tmp_path: Path):
    sums = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(20)]
    path = tmp_path / "sums.json"
    path.write_text(json.dumps(sums))

    run = quick("002", "--items", "table-2", "--samples", "1", "--data", f"gsm8k={path}")

    rows = rows_of(run, "paper-002-table-2")
    filled = [label for label, row in rows.items() if row["ours"] is not None]
    assert len(rows) == 12
    assert len(filled) == 4
    assert all(label.startswith("Phi-3-mini-4k-instruct") for label in filled)
    assert "run with --model" in rows["Llama-2-7b-chat-hf: H2O, 512-0"]["reason"]


@pytest.mark.slow
def test_long_bench_rows_need_their_files(tmp_path: Path):
    record = {"context": "Ann has a cat. " * 60, "input": "What has Ann?", "answers": ["a cat"]}
    path = tmp_path / "qasper.jsonl"
    path.write_text(json.dumps(record) + "\n" + json.dumps(record) + "\n")

    run = quick("002", "--items", "table-3", "--data", f"qasper={path}")

    rows = rows_of(run, "paper-002-table-3")
    given, other = (rows[f"Mistral-7B-Instruct-v0.2: {name}"] for name in ("qasper", "trec"))
    average = rows["Mistral-7B-Instruct-v0.2: average"]
    assert given["ours"] == average["ours"]
    assert "mean of qasper" in average["reason"]
    assert other["reason"] == "name its examples: --data trec=FILE"


@pytest.mark.slow
def test_baton_figures_share_the_runs_of_table_2():
    run = quick("004", "--items", "table-2,figure-5,figure-6,figure-7", "--model", "quire-tiny")

    times = rows_of(run, "paper-004-table-2")["batch 4"]["ours"]
    halves = rows_of(run, "paper-004-figure-5")["batch 4"]["ours"]
    assert 0 < halves[0] <= times[0]
    assert 0 < halves[1] <= times[1]
    assert (
        run["arms"]["paper-004-figure-6"]["seconds"] < run["arms"]["paper-004-table-2"]["seconds"]
    )


def test_engine_row_is_measured_on_random_weights_of_a_shape(monkeypatch: pytest.MonkeyPatch):
    small = dict(shapes.CONFIGS["opt-6.7b"]) | {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "ffn_dim": 128,
        "word_embed_proj_dim": 64,
    }
    monkeypatch.setattr(shapes, "CONFIGS", dict(shapes.CONFIGS) | {"small": small})

    run = quick("003", "--items", "figure-7", "--model", "random:small", "--layers", "3")

    rows = rows_of(run, "paper-003-figure-7")
    [engine] = [row for label, row in rows.items() if label.startswith("engine")]
    assert min(engine["ours"][:2]) > 0
    assert engine["label"] == "engine, random weights, small with 3 layers, one step"
    assert engine["status"] == "not comparable"


def test_two_layers_have_no_offloaded_kv(monkeypatch: pytest.MonkeyPatch):
    small = dict(shapes.CONFIGS["llama-2-7b"]) | {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 128,
    }
    monkeypatch.setattr(shapes, "CONFIGS", dict(shapes.CONFIGS) | {"small": small})

    run = quick("003", "--items", "figure-7", "--model", "random:small")

    [engine] = [
        row for row in rows_of(run, "paper-003-figure-7").values() if "engine" in row["label"]
    ]
    assert engine["ours"] is None
    assert "more than two layers" in engine["reason"]
