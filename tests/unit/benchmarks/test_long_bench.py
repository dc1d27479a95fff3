"""LongBench records as prompts, and the scores of its data sets."""

import pytest

from benchmarks.common.long_bench import (
    TASKS,
    LongBenchExample,
    class_score,
    code_score,
    example_of,
    grade,
    number_score,
    token_f1,
)
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


def test_token_f1_ignores_articles_case_and_punctuation():
    """1 common word of 2 and 1: 2 * 1 / 3."""
    assert token_f1("The cat!", "cat") == 1.0
    assert token_f1("black cat", "cat") == pytest.approx(2 / 3)
    assert token_f1("dog", "cat") == 0.0


def test_class_score_divides_among_named_classes():
    classes = ["city", "country", "date"]

    assert class_score("a city", "city", classes) == 1.0
    assert class_score("a city or a date", "city", classes) == 0.5
    assert class_score("a date", "city", classes) == 0.0


def test_number_score_is_the_fraction_of_equal_numbers():
    assert number_score("Paragraph 7", "Paragraph 7") == 1.0
    assert number_score("7 or 8", "7") == 0.5
    assert number_score("none", "7") == 0.0


def test_code_score_compares_the_first_line_of_code():
    assert code_score("# comment\nreturn x\nreturn y", "return x") == 1.0
    assert code_score("", "return x") == 0.0


def test_first_line_counts_for_few_shot_data_sets():
    example = LongBenchExample(prompt="", references=("Paris",))

    assert grade("triviaqa", example, "\nParis\nPassage: Rome") == 1.0
    assert grade("hotpotqa", example, "Rome\nParis") < 1.0
    assert grade("hotpotqa", LongBenchExample(prompt="", references=("a", "Rome")), "Rome") == 1.0
