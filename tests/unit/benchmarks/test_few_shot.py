"""Few-shot prompts from files of examples, and the grades of their continuations."""

import json
from pathlib import Path

import pytest

from benchmarks.common.few_shot import final_number, make_samples, read_records, task_named
from quire.errors import ConfigError

SUMS = [{"question": f"{i} + 1?", "answer": f"It is {i + 1}.\n#### {i + 1}"} for i in range(20)]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7\n#### 7", "7"),
        ("#### $1,234.50 left, not 9", "1234.5"),
        ("she has 12 and then -8.0", "-8"),
        ("none at all", None),
        ("5 eggs ####", "5"),
    ],
)
def test_final_number_is_parsed(text, number):
    assert final_number(text) == number


def test_sums_are_graded_by_the_number_before_the_next_question():
    task = task_named("gsm8k")

    assert task.judge(" It is 7.\n#### 7\n\nQuestion: 9 + 9?\n#### 18", ["x\n#### 7"]) == 1.0
    assert task.judge(" It is 8.\n\nQuestion: 6 + 1?\n#### 7", ["x\n#### 7"]) == 0.0
    assert task.judge(" dunno", ["x\n#### 7"]) == 0.0


def test_summary_ends_at_the_next_article():
    task = task_named("xsum")

    assert task.judge(" the cat sat\n\nArticle: more words", ["the cat sat"]) == 1.0


def test_sixteen_shots_precede_every_question_and_are_no_samples():
    samples = make_samples(task_named("gsm8k"), SUMS, 4)

    shown = samples[0].prompt.rsplit("Question:", 1)[0]
    requested = [sample.prompt.removeprefix(shown) for sample in samples]
    assert shown.count("####") == 16
    assert all(text.startswith("Question:") and text.endswith("\nAnswer:") for text in requested)
    assert not any(text.removesuffix("\nAnswer:") in shown for text in requested)
    assert len(set(requested)) == 4
    assert samples == make_samples(task_named("gsm8k"), SUMS, 4)


def test_too_few_examples_raise():
    with pytest.raises(
        ConfigError, match=r"at least 21 examples for 5 samples and 16 shots of gsm8k, got 20"
    ):
        make_samples(task_named("gsm8k"), SUMS, 5)


def test_example_without_a_field_raises():
    with pytest.raises(ConfigError, match="xsum lacks the field 'document'"):
        make_samples(task_named("xsum"), SUMS, 1)


def test_files_in_three_formats_are_read(tmp_path: Path):
    forms = {
        "list.json": json.dumps(SUMS),
        "lines.jsonl": "\n".join(map(json.dumps, SUMS)) + "\n",
        "values.json": json.dumps({str(i): record for i, record in enumerate(SUMS)}),
    }
    for name, text in forms.items():
        (tmp_path / name).write_text(text)

        assert read_records(tmp_path / name) == SUMS
    (tmp_path / "one.jsonl").write_text(json.dumps(SUMS[0]) + "\n")
    assert read_records(tmp_path / "one.jsonl") == SUMS[:1]


@pytest.mark.parametrize("text", ["", "[]", "[1, 2]", "{not json", "3"])
def test_files_without_examples_raise(tmp_path: Path, text: str):
    (tmp_path / "data").write_text(text)

    with pytest.raises(ConfigError, match="data"):
        read_records(tmp_path / "data")
