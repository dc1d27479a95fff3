"""Readers of local data sets: prompts and references of small files, and of the real ones."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire.cli.main import app
from quire.errors import ConfigError, TraceError, UnknownName
from quire.evals.suite.base import SampleOptions
from quire.evals.suite.registry import task_of
from quire.evals.tasks import rough_measure

SHARED = Path(__file__).parents[5] / "shared" / "data" / "eval"
RECORDED = {
    "gsm8k": "gsm8k/test.jsonl",
    "xsum": "xsum/xsum_test_1000.jsonl",
    "cnn_dm": "cnndm/cnn_dailymail_sample.json",
    "longbench": "longbench/multi_news.jsonl",
}
MINI = ("hotpotqa", "lcc", "passage_count", "passage_retrieval_en", "samsum", "triviaqa")


def options(path, **changed):
    return SampleOptions(**({"count": 2, "measure": rough_measure, "data": path} | changed))


def lines_file(folder, name, rows):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def problems(count, first=0):
    return [
        {
            "question": f"What is {n} + 1?",
            "answer": f"It is <<{n}+1={n + 1}>>{n + 1}.\n#### {n + 1}",
        }
        for n in range(first, first + count)
    ]


def test_gsm8k_takes_examples_from_the_training_file(tmp_path):
    path = lines_file(tmp_path, "test.jsonl", problems(3, first=50))
    lines_file(tmp_path, "train.jsonl", problems(9))
    task = task_of("gsm8k")

    first, second = task.samples(options(path, shots=2))

    assert first.prompt == (
        "Q: What is 0 + 1?\nA: It is 1. The answer is 1.\n\n"
        "Q: What is 1 + 1?\nA: It is 2. The answer is 2.\n\n"
        "Q: What is 50 + 1?\nA:"
    )
    assert (first.references, second.references) == (("51",), ("52",))
    assert task.score(first, " It is 51. The answer is 51.") == {"accuracy": 1.0}
    assert task.score(first, " It is 50.") == {"accuracy": 0.0}


def test_files_beside_the_data_decide_the_prompts_too(tmp_path):
    """A stored result is not used again after one of them has changed."""
    data, train = tmp_path / "test.jsonl", tmp_path / "train.jsonl"
    assert task_of("gsm8k").files(data) == [data]
    assert task_of("xsum").files(data) == [data]

    train.touch()
    configs = [tmp_path / "dataset2prompt.json", tmp_path / "config" / "dataset2maxlen.json"]
    configs[1].parent.mkdir()
    for path in configs:
        path.touch()

    assert task_of("gsm8k").files(data) == [data, train]
    assert task_of("gsm8k").files(train) == [train]
    assert task_of("longbench").files(data) == [data, *configs]


def test_gsm8k_without_training_file_does_not_ask_its_examples(tmp_path):
    path = lines_file(tmp_path, "problems.jsonl", problems(5))

    samples = task_of("gsm8k").samples(options(path, shots=3))

    assert [sample.references for sample in samples] == [("4",), ("5",)]
    [bare, _] = task_of("gsm8k").samples(options(path, shots=0))
    assert bare.prompt == "Q: What is 0 + 1?\nA:"


def test_gsm8k_answer_without_number_is_refused(tmp_path):
    path = lines_file(tmp_path, "test.jsonl", [{"question": "1 + 1?", "answer": "two"}])

    with pytest.raises(TraceError, match="line 1: expected an answer with ####"):
        task_of("gsm8k").samples(options(path, shots=0))


@pytest.mark.parametrize(
    ("task", "row", "suffix"),
    [
        ("xsum", {"document": "Long text", "summary": "Short"}, "jsonl"),
        ("cnn_dm", {"article": "Long text", "highlights": "Short"}, "json"),
    ],
)
def test_summaries_are_read_from_both_forms(task, row, suffix, tmp_path):
    rows = [row, row | {next(iter(row)): "Other text"}]
    path = tmp_path / f"data.{suffix}"
    text = json.dumps(rows) if suffix == "json" else "\n".join(map(json.dumps, rows))
    path.write_text(text, encoding="utf-8")

    first, second = task_of(task).samples(options(path))
    assert first.prompt.startswith("Article: Long text\n")
    assert first.references == ("Short",)
    assert "Other text" in second.prompt
    [one_shot] = task_of(task).samples(options(path, count=1, shots=1))
    assert "Summary: Short\n\nArticle: Other text" in one_shot.prompt


@pytest.mark.parametrize(
    "row",
    [
        {"document": "A story.", "question": "Who?", "answers": ["Ann", "Ann Lee"]},
        {
            "document": {"text": "A story.", "id": "x"},
            "question": {"text": "Who?"},
            "answers": [{"text": "Ann"}, {"text": "Ann Lee"}],
        },
    ],
)
def test_stories_are_read_as_texts_or_objects(row, tmp_path):
    [sample] = task_of("narrativeqa").samples(options(lines_file(tmp_path, "q.jsonl", [row])))

    assert sample.prompt.startswith("A story.\n")
    assert sample.prompt.endswith("Question: Who?\nAnswer:")
    assert sample.references == ("Ann", "Ann Lee")


def longbench_file(folder, data_set, **row):
    (folder / "config").mkdir()
    prompts = {data_set: "Read {context} and answer {input}:"}
    (folder / "config" / "dataset2prompt.json").write_text(json.dumps(prompts))
    (folder / "config" / "dataset2maxlen.json").write_text(json.dumps({data_set: 64}))
    base = {"context": "C", "input": "I", "dataset": data_set, "answers": ["city"]}
    return lines_file(folder, f"{data_set}.jsonl", [base | row])


def test_longbench_uses_its_own_prompts_and_metric(tmp_path):
    path = longbench_file(tmp_path, "trec", all_classes=["city", "date"])
    task = task_of("longbench")

    [sample] = task.samples(options(path))

    assert (sample.prompt, sample.max_tokens) == ("Read C and answer I:", 64)
    assert task.score(sample, "\ncity\ndate") == {"score": 1.0}  # the first line only
    assert task.score(sample, "city or date") == {"score": 0.5}


def test_longbench_without_its_config_is_explained(tmp_path):
    path = lines_file(tmp_path, "trec.jsonl", [{"dataset": "trec", "answers": ["city"]}])

    with pytest.raises(ConfigError, match=r"needs LongBench's dataset2prompt\.json"):
        task_of("longbench").samples(options(path))


@pytest.mark.parametrize(
    ("file", "entry", "message"),
    [
        ("dataset2prompt.json", "Read {question}:", r"\{context\} and \{input\}"),
        ("dataset2prompt.json", "Read {", r"\{context\} and \{input\}"),
        ("dataset2maxlen.json", "many", r"output tokens of 'trec' .* got 'many'"),
        ("dataset2maxlen.json", 0, "got 0"),
    ],
)
def test_longbench_with_a_wrong_config_is_refused(file, entry, message, tmp_path):
    path = longbench_file(tmp_path, "trec")
    (tmp_path / "config" / file).write_text(json.dumps({"trec": entry}))

    with pytest.raises(ConfigError, match=message):
        task_of("longbench").samples(options(path))


def test_a_file_with_worked_examples_only_is_refused(tmp_path):
    path = lines_file(tmp_path, "test.jsonl", problems(3))
    line = ["eval", "run", "quire-tiny", "--tasks", "gsm8k", "--no-sanity-check"]

    result = CliRunner().invoke(app, [*line, "--data", str(path), "--kv-memory", "16MiB"])

    assert result.exit_code == 2
    assert "lower --shots, or add records" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    "command", [("eval", "run", "quire-tiny"), ("board", "quire-tiny", "--seeds", "1")]
)
def test_prompts_beyond_the_context_are_refused_before_they_are_generated(command, tmp_path):
    line = [*command, "--tasks", "lines", "--tokens", "99999", "--no-sanity-check"]

    result = CliRunner().invoke(app, [*line, "--kv-memory", "16MiB", "--out", str(tmp_path)])

    assert result.exit_code == 2
    assert "--tokens of at most 4096" in " ".join(result.stderr.split())


def test_other_data_set_is_refused(tmp_path):
    path = lines_file(tmp_path, "dureader.jsonl", [{"origin_prompt": "x", "gold": ["y"]}])

    with pytest.raises(UnknownName, match="data set of LongBench 'dureader'"):
        task_of("longbench").samples(options(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no records"),
        ("[]", "expected a JSON object"),
        ('{"document": ""}', "expected a text document"),
        ("{", "not JSON"),
    ],
)
def test_invalid_file_is_refused(content, message, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(content, encoding="utf-8")

    with pytest.raises(ConfigError, match=message):
        task_of("xsum").samples(options(path))


def test_invalid_json_file_is_refused(tmp_path):
    path = tmp_path / "data.json"
    for content, message in (
        ("3", "a list of objects"),
        ("[3]", "expected an object"),
        ("{", "not"),
    ):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(ConfigError, match=message):
            task_of("cnn_dm").samples(options(path))


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_a_task_without_its_file_is_explained(name):
    with pytest.raises(ConfigError, match="add --data FILE"):
        task_of(name).samples(options(None))


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_recorded_data_set_is_read(name):
    path = SHARED / RECORDED[name]
    if not path.exists():
        pytest.skip("the data sets are not available")

    samples = task_of(name).samples(options(path, count=5))

    assert len({sample.prompt for sample in samples}) == 5
    assert all(sample.references and all(sample.references) for sample in samples)


@pytest.mark.parametrize("name", MINI)
def test_recorded_minilongbench_answers_score_1(name):
    path = SHARED / "minilongbench" / f"{name}.json"
    if not path.exists():
        pytest.skip("the data sets are not available")
    if name == "samsum":
        pytest.importorskip("rouge_score", reason="rouge-score is not installed")
    task = task_of("longbench")

    for sample in task.samples(options(path, count=4)):
        [score] = task.score(sample, sample.references[0]).values()
        assert score == 1.0
