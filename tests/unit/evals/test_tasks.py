"""Task texts are fixed by their seeds; fidelity against full distributions."""

import hashlib
import random
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from quire.api.llm import LLM
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import ConfigError, TraceError, UnknownName
from quire.evals import tasks
from quire.evals.fidelity import LIKELIEST, FidelityScorer, Reference, bounded_kl
from quire.evals.intervals import MIN_PROMPTS, SHARE, mean_of, mean_of_tasks
from quire.evals.prompt_file import UserPrompt, read_prompts
from quire.evals.questions import DEPTHS, DOCUMENT_START, make_questions
from quire.evals.tasks.words import CLASS_NAMES, class_words, haystack, vocabulary
from quire.models.loader import load_model

PLACED = [name for name in tasks.FAMILIES if name not in ("labels", "arithmetic", "headline")]

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


@pytest.mark.parametrize("name", [name for name in PLACED if name not in ("copy",)])
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


def test_answers_are_correct_and_no_large_library_is_loaded():
    for seed in range(30):
        query = tasks.make("arithmetic", seed, 60, digits=2, steps=True).queries[0]
        _, left, sign, right, _ = query.question.split()
        total = int(left) + int(right) if sign == "+" else int(left) - int(right)

        assert query.answer.endswith(str(total))
    source = Path(str(files("quire") / "assets")).parents[1]
    code = "import sys, quire.evals.questions; assert not {'torch', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(source)})


def test_unknown_names_settings_and_too_small_lengths_are_refused():
    with pytest.raises(UnknownName, match="did you mean lines"):
        tasks.make("line", 0, 100)
    with pytest.raises(UnknownName, match="digits"):
        tasks.make("lines", 0, 100, digit=3)
    with pytest.raises(UnknownName, match="option of task 'labels'"):
        tasks.build("labels", random.Random(0), tasks.Setting(tokens=100), needles=2)
    for options in ({"depth": 1.5}, {"depth": -0.1}, {"tokens": 0}):
        with pytest.raises(ConfigError, match="expected"):
            tasks.Setting(**{"tokens": 100, **options})

    short = r"'niah' fits into 20 tokens: expected --tokens of (\d+) or more"
    with pytest.raises(ConfigError, match=short) as refused:
        make_questions("niah", 20, 10, measure=tasks.rough_measure)
    found = re.search(short, str(refused.value))
    least = int(found[1])

    assert len(make_questions("niah", least, 10, measure=tasks.rough_measure)) == 10
    with pytest.raises(ConfigError, match=f"expected --tokens of {least} or more"):
        make_questions("niah", least - 1, 10, measure=tasks.rough_measure)


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


# ---- fidelity ------------------------------------------------------------------------------------


PROMPT = [2, *((7 * i) % 400 + 20 for i in range(120))]
NEW = 12


@pytest.fixture(scope="module")
def model():
    return load_model("quire-tiny", dtype="float32", verify=False)


def scorer_of(model, **kv):
    return FidelityScorer(model, KVConfig(**kv), longest_tokens=200, new_tokens=NEW)


def greedy(model, **kv):
    llm = LLM(model, kv=KVConfig(memory="8MiB", **kv), verify=False)
    params = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    return llm.generate([PROMPT], params)[0].token_ids


def test_full_kv_follows_its_own_output(model):
    scorer = scorer_of(model)
    reference = scorer.reference(PROMPT)

    found = scorer.score(reference)

    assert reference.output == greedy(model)
    assert (found.top_1, found.exact) == (1.0, 1.0)
    assert found.kl < 1e-9
    assert found.kv_peak_bytes == reference.kv_peak_bytes
    assert reference.likeliest.shape == (NEW, LIKELIEST)  # fewer than the vocabulary has


@pytest.mark.parametrize("kv", [{"codec": "int2"}, {"evict": "recent:cap=25%,when=prefill_end"}])
def test_tokens_agree_until_the_free_output_differs(model, kv):
    reference = scorer_of(model).reference(PROMPT)

    found = scorer_of(model, **kv).score(reference)

    free = greedy(model, **kv)
    assert found.exact == float(free == reference.output)
    pairs = enumerate(zip(free, reference.output, strict=True))
    same = next((i for i, (a, b) in pairs if a != b), NEW)
    assert found.top_1 >= same / NEW
    assert found.kl > 0
    assert found.kv_peak_bytes < reference.kv_peak_bytes


def test_scores_do_not_depend_on_earlier_prompts(model):
    scorer, other = scorer_of(model, codec="int4"), scorer_of(model)
    reference, second = other.reference(PROMPT), other.reference(PROMPT[:50])
    alone = scorer.score(reference)

    scorer.score(second)

    assert scorer.score(reference) == alone


logits = st.integers(2, 40).flatmap(
    lambda n: st.lists(st.floats(-8, 8, width=32), min_size=n, max_size=n)
)


@given(full=logits, seed=st.integers(0, 99), count=st.integers(1, 40))
def test_bounded_kl_is_at_max_the_whole_kl(full, seed, count):
    full = torch.tensor([full]).log_softmax(1)
    other = torch.randn(full.shape, generator=torch.Generator().manual_seed(seed)).log_softmax(1)
    logprobs, likeliest = full.topk(min(count, full.shape[1]))
    reference = Reference(
        prompt=(1,), output=(0,), likeliest=likeliest, logprobs=logprobs, kv_peak_bytes=1, text=""
    )

    whole = float((full.double().exp() * (full - other).double()).sum())

    found = bounded_kl(reference, other)
    assert 0 <= found <= whole + 1e-4
    if count >= full.shape[1]:
        assert found == pytest.approx(whole, abs=1e-4)


@pytest.mark.parametrize(
    ("values", "limits", "low", "high"),
    [
        ([0.5] * 9, None, 0.5, 0.5),
        ([1.0] * 4, SHARE, 0.025**0.25, 1.0),  # Clopper and Pearson: 4 of 4
        ([0.0] * 20, SHARE, 0.0, 1 - 0.025**0.05),
        ([0.5] * 4, SHARE, 0.5 * 0.025**0.25, 1 - 0.5 * 0.025**0.25),
        ([0.0] * 20, (-1.0, 1.0), 0.025**0.05 - 1, 1 - 0.025**0.05),
    ],
)
def test_equal_values_between_limits_have_an_exact_interval(values, limits, low, high):
    found = mean_of(values, limits=limits)
    assert (found.mean, found.count) == (values[0], len(values))
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))


@pytest.mark.parametrize(("right", "count"), [(4, 4), (27, 30), (0, 20)])
def test_a_task_of_right_and_wrong_answers_has_the_interval_of_clopper_and_pearson(right, count):
    values, full = np.array([1.0] * right + [0.0] * (count - right)), np.ones(count)
    found, wanted = mean_of_tasks([(values, full)]), binomtest(right, count).proportion_ci()
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), abs=0.02)
    alike = mean_of_tasks([(values, full)] * 5, [values] * 5)
    assert (alike.mean, alike.count) == (0.0, 5 * count)
    assert alike.high == pytest.approx((1 - 0.025 ** (1 / count)) / 5, rel=0.2)


def test_six_equal_differences_are_the_fewest_that_exclude_no_difference():
    """The interval contains the mean, and narrows with more values."""
    highs = [mean_of([-1.0] * count, limits=(-1.0, 1.0)).high for count in (5, 6)]

    assert highs[0] > 0 > highs[1]
    assert MIN_PROMPTS == 6
    few, many = mean_of([0.0, 1.0] * 5), mean_of([0.0, 1.0] * 500)

    assert few.low < few.mean < few.high
    assert many.high - many.low < (few.high - few.low) / 5
    assert mean_of([0.0, 1.0] * 5) == few


def test_prompts_of_a_file_are_texts_ids_or_chats(tmp_path, model, monkeypatch):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "<|doc|>Hello", "answer": "two  words"}\n\n{"prompt": [2, 5]}\n')
    first, second = read_prompts(path, model)
    assert first.token_ids[0] == 2
    assert second == UserPrompt(token_ids=(2, 5))
    assert first.accepts("some two words here")
    assert not first.accepts("twowords")
    assert len(read_prompts(path, model, limit=1)) == 1

    parts = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    monkeypatch.setattr(model.tokenizer, "chat_template", parts)
    path = tmp_path / "p.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "two"}]}\n')

    (prompt,) = read_prompts(path, model)

    assert model.tokenizer.decode(prompt.token_ids) == "two"
    assert read_prompts(path, model, content_format="openai") == (prompt,)
    with pytest.raises(TraceError, match="set --chat-template-content-format"):
        read_prompts(path, model, content_format="string")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        *((line, "expected a prompt") for line in ('{"text": "a"}', '{"messages": "a"}')),
        *(('{"prompt": [2, 999999]}', "token ids from 0 to"), ("[]", "a JSON object")),
        ('{"prompt": []}', "at least one token"),
        ('{"prompt": "a", "answer": 5}', "an answer that is a text"),
    ],
)
def test_a_line_that_is_no_prompt_is_refused_by_number(tmp_path, model, line, expected):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": [2]}\n' + line + "\n")
    with pytest.raises(TraceError, match=f"line 2.*{expected}"):
        read_prompts(path, model)
