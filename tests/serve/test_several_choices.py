"""n, best_of and beam search over HTTP: the same choices as in Python, ordered by prompt."""

import pytest

from quire.config.sampling_params import SamplingParams

PROMPTS = ["<|doc|>Once upon a time", "<|doc|>The sea"]
BEST = {"n": 2, "best_of": 4, "temperature": 1.0, "seed": 4}
BEAMS = {"n": 2, "beam_width": 3, "use_beam_search": True, "early_stopping": "never"}


def python_texts(llm, **options) -> list[str]:
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=4, **options))
    return [choice.text for output in outputs for choice in output.choices]


@pytest.mark.parametrize("options", [BEST, BEAMS])
def test_choices_are_numbered_in_prompt_order(complete, llm, options):
    body = complete(prompt=PROMPTS, max_tokens=4, **options)

    assert [choice["text"] for choice in body["choices"]] == python_texts(llm, **options)
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * options["n"]))


@pytest.mark.parametrize("options", [BEST, BEAMS])
def test_ranked_choices_are_streamed_after_they_have_ended(stream, llm, options):
    chunks = stream("/v1/completions", prompt=PROMPTS, max_tokens=4, **options)

    choices = [chunk["choices"][0] for chunk in chunks]
    in_order = sorted(choices, key=lambda choice: choice["index"])
    assert [choice["text"] for choice in in_order] == python_texts(llm, **options)
    assert all(choice["finish_reason"] in ("length", "stop") for choice in choices)


def test_usage_counts_the_prompt_once_and_every_choice(complete):
    single = complete(max_tokens=4)["usage"]
    two = complete(max_tokens=4, n=2)["usage"]
    best = complete(max_tokens=4, **BEST)["usage"]

    assert two["prompt_tokens"] == single["prompt_tokens"] == best["prompt_tokens"]
    assert (two["completion_tokens"], best["completion_tokens"]) == (8, 16)


def test_chat_with_beam_search(chat):
    body = chat(use_beam_search=True, n=2)

    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    contents = [choice["message"]["content"] for choice in body["choices"]]
    assert contents[0] != contents[1]
