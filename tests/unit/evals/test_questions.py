"""Prompts of all tasks at a fixed length."""

import re

import pytest

from quire.errors import ConfigError
from quire.evals.questions import DEPTHS, DOCUMENT_START, make_questions
from quire.evals.tasks import names, rough_measure


@pytest.mark.parametrize("task", names())
def test_prompt_and_answer_fit_the_requested_length(task: str):
    found = make_questions(task, 200, 10, measure=rough_measure)

    assert [question.depth for question in found] == [*DEPTHS, *DEPTHS]
    assert len({question.prompt for question in found}) == 10
    for question in found:
        assert question.prompt.startswith(DOCUMENT_START)
        assert rough_measure(question.prompt + question.answer) <= 200
    assert found[:3] == make_questions(task, 200, 3, measure=rough_measure)


def test_too_small_length_is_refused():
    short = r"'niah' fits into 20 tokens: expected --tokens of (\d+) or more"
    with pytest.raises(ConfigError, match=short) as refused:
        make_questions("niah", 20, 10, measure=rough_measure)
    found = re.search(short, str(refused.value))
    assert found is not None
    least = int(found[1])

    assert len(make_questions("niah", least, 10, measure=rough_measure)) == 10
    with pytest.raises(ConfigError, match=f"expected --tokens of {least} or more"):
        make_questions("niah", least - 1, 10, measure=rough_measure)
