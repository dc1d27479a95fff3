"""LongBench records as prompts, and the scores of its data sets."""

import pytest

from benchmarks.common import long_bench
from benchmarks.common.long_bench import TASKS, LongBenchExample, example_of, grade
from quire.errors import ConfigError

RECORD = {"context": "Ann has a cat.", "input": "What has Ann?", "answers": ["a cat", "cats"]}


@pytest.mark.parametrize("name", TASKS)
def test_record_becomes_a_prompt_with_references(name: str):
    example = example_of(name, RECORD)

    assert "Ann has a cat." in example.prompt
    assert example.references == ("a cat", "cats")


def test_whole_prompt_is_kept_and_gold_may_be_text():
    record = {"origin_prompt": "A name?", "gold": "['Ann']"}

    assert example_of("hotpotqa", record) == LongBenchExample(prompt="A name?", references=("Ann",))
    assert example_of("hotpotqa", record | {"gold": ["Ann"]}).references == ("Ann",)


@pytest.mark.parametrize("record", [{"input": "x"}, {"context": "x", "answers": "not a list"}])
def test_record_without_its_fields_is_refused(record: dict):
    with pytest.raises(ConfigError, match="an example of qasper lacks"):
        example_of("qasper", record)


def test_first_line_counts_for_few_shot_data_sets():
    example = LongBenchExample(prompt="", references=("Paris",))

    assert grade("triviaqa", example, "\nParis\nPassage: Rome") == 1.0
    assert grade("hotpotqa", example, "Rome\nParis") < 1.0
    assert grade("hotpotqa", LongBenchExample(prompt="", references=("a", "Rome")), "Rome") == 1.0


@pytest.mark.parametrize(
    ("name", "reference", "text"),
    [
        ("trec", "city", "a city or a date"),
        ("passage_count", "7", "7 or 8"),
        ("repobench-p", "return x", "# comment\nreturn x"),
    ],
)
def test_data_sets_have_their_own_scores(name: str, reference: str, text: str):
    example = LongBenchExample(prompt="", references=(reference,), classes=("city", "date"))

    assert grade(name, example, text) == {"repobench-p": 1.0}.get(name, 0.5)


@pytest.mark.parametrize(
    ("output", "reference", "f1"),
    [
        ("The cat, sat!", "a cat sat", 1.0),
        ("cat dog", "cat bird fish", 2 * (1 / 2) * (1 / 3) / (1 / 2 + 1 / 3)),
        ("", "cat", 0.0),
        ("dog", "cat", 0.0),
    ],
)
def test_word_f1_ignores_case_punctuation_and_articles(output, reference, f1):
    assert long_bench.word_f1(output, reference) == pytest.approx(f1)


def test_named_classes_share_the_score():
    classes = ["date", "city", "city in Europe"]

    assert long_bench.class_found("a city in Europe", "city in Europe", classes) == 1.0
    assert long_bench.class_found("a date or a city", "city", classes) == 0.5
    assert long_bench.class_found("nothing", "city", classes) == 0.0


def test_numbers_and_code_are_compared_as_in_longbench():
    assert long_bench.share_of_numbers("Paragraph 3 or 5", "Paragraph 3") == 0.5
    assert long_bench.share_of_numbers("none", "Paragraph 3") == 0.0
    assert long_bench.code_similarity("\n# comment\nx = 1\ny = 2", "x = 1") == 1.0
    assert long_bench.code_similarity("```", "x = 1") == 0.0
