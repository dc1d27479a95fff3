"""LongBench records as prompts, and the scores of its data sets."""

import pytest

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
