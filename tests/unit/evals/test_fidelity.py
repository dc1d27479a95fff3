"""Fidelity against full distributions and free greedy outputs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.api.llm import LLM
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import TraceError
from quire.evals.fidelity import LIKELIEST, FidelityScorer, Reference, bounded_kl
from quire.evals.intervals import MIN_PROMPTS, SHARE, mean_of
from quire.evals.prompt_file import UserPrompt, read_prompts
from quire.models.loader import load_model

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


def test_six_equal_differences_are_the_fewest_that_exclude_no_difference():
    """The interval contains the mean, and narrows with more values."""
    highs = [mean_of([-1.0] * count, limits=(-1.0, 1.0)).high for count in (5, 6)]

    assert highs[0] > 0 > highs[1]
    assert MIN_PROMPTS == 6
    few, many = mean_of([0.0, 1.0] * 5), mean_of([0.0, 1.0] * 500)

    assert few.low < few.mean < few.high
    assert many.high - many.low < (few.high - few.low) / 5
    assert mean_of([0.0, 1.0] * 5) == few


def test_prompts_of_a_file_are_texts_ids_or_chats(tmp_path, model):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "<|doc|>Hello", "answer": "two  words"}\n\n{"prompt": [2, 5]}\n')
    first, second = read_prompts(path, model)

    assert first.token_ids[0] == 2
    assert second == UserPrompt(token_ids=(2, 5))
    assert first.accepts("some two words here")
    assert not first.accepts("twowords")
    assert len(read_prompts(path, model, limit=1)) == 1


def test_chats_of_a_file_have_the_content_format_of_the_option(tmp_path, model, monkeypatch):
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
