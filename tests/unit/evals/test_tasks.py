"""Task texts are fixed by their seeds: published scores refer to exactly these prompts."""

import hashlib
import random
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from quire.errors import ConfigError, UnknownName
from quire.evals import tasks
from quire.evals.questions import DEPTHS, DOCUMENT_START, make_questions
from quire.evals.tasks.words import CLASS_NAMES, class_words, haystack, vocabulary

PLACED = [name for name in tasks.FAMILIES if name not in ("labels", "arithmetic", "headline")]
BURIED = [name for name in PLACED if name not in ("copy",)]

PINNED = {
    "lines": "20dfae5f901ce7c3",
    "longeval": "cc96007a3bc6a866",
    "kv": "fdc5fd111431661f",
    "niah": "f01061e1e74b9bda",
    "facts": "4991f23645804463",
    "copy": "96ccbc3ccabee425",
    "headline": "66b01ec00c147b2a",
    "variables": "d3eb7d7f9a8f5922",
    "labels": "fc699ebde78ad8e0",
    "arithmetic": "6a3b5e45a6efa32c",
}


def fingerprint(name):
    """One hash over evaluation and training texts of several seeds."""
    digest = hashlib.sha256()
    for seed in range(5):
        for split, queries in (("eval", 1), ("train", None)):
            task = tasks.make(name, seed, 300, split=split, queries=queries)
            digest.update(repr(task.training_spans()).encode())
    return digest.hexdigest()[:16]


@pytest.mark.parametrize("name", tasks.names())
def test_task_text_of_a_seed_is_pinned(name):
    assert fingerprint(name) == PINNED[name]


@pytest.mark.parametrize("name", BURIED)
def test_answer_occurs_in_the_context(name):
    for seed in range(10):
        task = tasks.make(name, seed, 300, depth=0.5)

        assert task.queries[0].answer.strip() in task.context
        assert task.prompt() == task.context + task.queries[0].question


@pytest.mark.parametrize("name", [name for name in PLACED if name != "variables"])
def test_depth_sets_the_position_of_the_queried_record(name):
    starts = []
    for depth in (0.0, 0.5, 1.0):
        task = tasks.make(name, 3, 500, depth=depth)
        starts.append(task.context.index(task.queries[0].answer.strip()) / len(task.context))

        assert task.queries[0].depth == pytest.approx(depth, abs=0.05)
    assert starts == sorted(starts)
    assert starts[0] < 0.2
    assert starts[2] > 0.8


@pytest.mark.parametrize("name", [name for name in tasks.names() if name != "arithmetic"])
def test_evaluation_prompt_fills_but_never_exceeds_its_length(name):
    for tokens in (128, 512):
        lengths = [
            tasks.rough_measure(tasks.make(name, seed, tokens).prompt()) for seed in range(9)
        ]

        assert max(lengths) <= tokens
        assert min(lengths) >= 0.65 * tokens


def test_training_and_evaluation_words_and_sums_are_disjoint():
    for kind in ("adjective", "noun", "name", "place"):
        train, held_out = set(vocabulary(kind, "train")), set(vocabulary(kind, "eval"))

        assert not train & held_out
        assert len(held_out) == pytest.approx(0.25 * len(train), rel=0.1)
    for name in CLASS_NAMES:
        assert not set(class_words(name, "train")) & set(class_words(name, "eval"))
    questions = {
        split: {
            tasks.make("arithmetic", seed, 80, split=split).queries[0].question
            for seed in range(99)
        }
        for split in ("train", "eval")
    }

    assert not questions["train"] & questions["eval"]


def test_arithmetic_answers_are_correct():
    for seed in range(30):
        query = tasks.make("arithmetic", seed, 60, digits=2, steps=True).queries[0]
        _, left, sign, right, _ = query.question.split()
        total = int(left) + int(right) if sign == "+" else int(left) - int(right)

        assert query.answer.endswith(str(total))


def test_unknown_names_and_settings_out_of_range_are_refused():
    with pytest.raises(UnknownName, match="did you mean lines"):
        tasks.make("line", 0, 100)
    with pytest.raises(UnknownName, match="digits"):
        tasks.make("lines", 0, 100, digit=3)
    with pytest.raises(UnknownName, match="option of task 'labels'"):
        tasks.build("labels", random.Random(0), tasks.Setting(tokens=100), needles=2)
    for options in ({"depth": 1.5}, {"depth": -0.1}, {"tokens": 0}):
        with pytest.raises(ConfigError, match="expected"):
            tasks.Setting(**{"tokens": 100, **options})


def test_packaged_books_are_small_ascii_text_and_named():
    text = haystack().text

    assert text.isascii()
    assert 150_000 < len(text) < 200_000
    assert "<|" not in text
    assert not set(text) - {chr(code) for code in range(32, 127)} - {"\n"}
    notes = (files("quire") / "assets" / "haystack.md").read_text()

    for title in ("As Easy as A.B.C.", "Solitary Cyclist", "Five Weeks in a Balloon"):
        assert title in notes


def test_slice_is_a_substring_cut_at_word_boundaries():
    filler = haystack()
    rng = random.Random(0)
    for characters in (50, 1000, 9000):
        text = filler(rng, characters)
        start = filler.text.index(text)

        assert characters - 60 < len(text) <= characters
        assert start == 0 or filler.text[start - 1] == " "
        assert filler.text[start + len(text)] == " "
    assert haystack()(rng, 0) == ""
    assert (
        tasks.BookFiller("once upon a time ")(random.Random(0), 500) == "upon a time"
    )  # the whole book
    text = tasks.synthetic_filler(random.Random(0), 400)
    assert 380 < len(text) <= 400
    assert text == tasks.synthetic_filler(random.Random(0), 400)


@pytest.mark.parametrize("task", tasks.names())
def test_prompt_and_answer_fit_the_requested_length(task: str):
    found = make_questions(task, 200, 10, measure=tasks.rough_measure)

    assert [question.depth for question in found] == [*DEPTHS, *DEPTHS]
    assert len({question.prompt for question in found}) == 10
    for question in found:
        assert question.prompt.startswith(DOCUMENT_START)
        assert tasks.rough_measure(question.prompt + question.answer) <= 200
    assert found[:3] == make_questions(task, 200, 3, measure=tasks.rough_measure)


def test_too_small_length_of_questions_is_refused():
    short = r"'niah' fits into 20 tokens: expected --tokens of (\d+) or more"
    with pytest.raises(ConfigError, match=short) as refused:
        make_questions("niah", 20, 10, measure=tasks.rough_measure)
    found = re.search(short, str(refused.value))
    least = int(found[1])

    assert len(make_questions("niah", least, 10, measure=tasks.rough_measure)) == 10
    with pytest.raises(ConfigError, match=f"expected --tokens of {least} or more"):
        make_questions("niah", least - 1, 10, measure=tasks.rough_measure)


def test_tasks_and_questions_load_neither_torch_nor_numpy():
    source = Path(str(files("quire") / "assets")).parents[1]
    code = "import sys, quire.evals.questions; assert not {'torch', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(source)})
