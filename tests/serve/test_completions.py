"""POST /v1/completions without streaming: formats, options, and the same outputs as in Python."""

import math

import pytest

from quire.config.sampling_params import SamplingParams
from quire.models.generation import GenerationDefaults

PROMPT = "<|doc|>Once upon a time"


def python_output(llm, prompt=PROMPT, **options):
    return llm.generate(prompt, SamplingParams(**options))[0]


def test_completion_response_has_the_openai_format(complete, llm):
    body = complete()

    output = python_output(llm, max_tokens=4)
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["model"] == "quire-tiny"
    assert body["choices"] == [
        {
            "index": 0,
            "text": output.text,
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": 4,
        "total_tokens": len(output.prompt_token_ids) + 4,
        "prompt_tokens_details": {"cached_tokens": 0},
        "kv_peak_bytes": output.usage.kv_peak_bytes,
        "evictions": 0,
        "evicted_tokens": 0,
        "recomputed_tokens": 0,
    }


def test_prompt_formats_are_equivalent(complete, llm):
    ids = llm.encode(PROMPT)

    texts = {
        complete(prompt=prompt)["choices"][0]["text"] for prompt in (PROMPT, [PROMPT], ids, [ids])
    }

    assert texts == {python_output(llm, max_tokens=4).text}


def test_choices_are_ordered_by_prompt_and_index(complete, llm):
    prompts = ["<|doc|>The sea", "<|doc|>A king"]

    body = complete(prompt=prompts, n=2, temperature=1.0, seed=7)

    expected = [
        python_output(llm, prompt, max_tokens=4, temperature=1.0, seed=seed)
        for prompt in prompts
        for seed in (7, 8)
    ]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in body["choices"]] == [o.text for o in expected]
    prompt_tokens = sum(len(llm.encode(prompt)) for prompt in prompts)
    assert body["usage"]["prompt_tokens"] == prompt_tokens
    assert body["usage"]["completion_tokens"] == 16
    assert body["usage"]["kv_peak_bytes"] == sum(o.usage.kv_peak_bytes for o in expected)


@pytest.mark.parametrize(
    ("limits", "count"),
    [
        ({"max_tokens": None, "ignore_eos": True}, 16),
        ({"max_tokens": None, "max_completion_tokens": 2}, 2),
        ({"max_tokens": 9, "max_completion_tokens": 2}, 2),
    ],
)
def test_number_of_tokens_follows_the_limits(complete, limits, count):
    assert complete(**limits)["usage"]["completion_tokens"] == count


def test_stop_string_ends_the_output_and_is_reported(complete, llm):
    text = python_output(llm, max_tokens=4).text
    stop = text[3:5]

    without = complete(stop=stop)["choices"][0]
    with_it = complete(stop=[stop], include_stop_str_in_output=True)["choices"][0]

    assert (without["finish_reason"], without["stop_reason"]) == ("stop", stop)
    assert without["text"] == text[: text.index(stop)]
    assert with_it["text"] == without["text"] + stop


def test_stop_token_ends_the_output_and_is_reported(complete, llm):
    second = python_output(llm, max_tokens=4).token_ids[1]

    body = complete(stop_token_ids=[second])
    later = complete(stop_token_ids=[second], min_tokens=2)

    choice = body["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", second)
    assert body["usage"]["completion_tokens"] == 2
    assert later["usage"]["completion_tokens"] > 2


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {"352": 100}},
        {"allowed_token_ids": [352]},
    ],
)
def test_logit_bias_and_allowed_tokens_select_the_output(complete, llm, options):
    text = complete(**options)["choices"][0]["text"]

    assert text == llm.model.tokenizer.decode([352] * 4)


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 5},
        {"top_p": 0.5},
        {"min_p": 0.2},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.5, "frequency_penalty": 1.5},
    ],
)
def test_sampling_options_apply(complete, llm, options):
    options = options | {"temperature": 1.5, "seed": 3, "max_tokens": 8}

    plain = python_output(llm, temperature=1.5, seed=3, max_tokens=8)
    expected = python_output(llm, **options)

    assert complete(**options)["choices"][0]["text"] == expected.text
    assert expected.text != plain.text, "the option must matter for this prompt and seed"


def test_model_that_names_no_temperature_is_sampled_as_in_a_chat(complete, chat, llm, monkeypatch):
    monkeypatch.setattr(GenerationDefaults, "temperature", None)
    options = {"seed": 3, "max_tokens": 24}

    expected = python_output(llm, temperature=0.2, top_p=0.9, **options).text

    assert complete(**options)["choices"][0]["text"] == expected
    assert complete(temperature=1.0, **options)["choices"][0]["text"] != expected
    named = chat(temperature=0.2, top_p=0.9, **options)
    assert chat(**options)["choices"] == named["choices"]


def test_echo_includes_the_prompt(complete, llm):
    ids = llm.encode(PROMPT)
    output = complete()["choices"][0]["text"]

    assert complete(echo=True)["choices"][0]["text"] == PROMPT + output
    assert complete(echo=True, prompt=ids)["choices"][0]["text"] == PROMPT + output


def test_logprobs_have_four_columns_with_the_sampled_token(complete, llm):
    body = complete(logprobs=2)["choices"][0]

    output = python_output(llm, max_tokens=4, logprobs=2)
    columns = body["logprobs"]
    pieces = [llm.model.tokenizer.decode([token]) for token in output.token_ids]
    assert columns["tokens"] == pieces
    assert columns["token_logprobs"] == pytest.approx([t.logprob for t in output.logprobs])
    assert columns["text_offset"] == [sum(map(len, pieces[:i])) for i in range(4)]
    for piece, logprob, top in zip(
        pieces, columns["token_logprobs"], columns["top_logprobs"], strict=True
    ):
        assert top[piece] == logprob == max(top.values())
        assert len(top) == 2


def test_zero_logprobs_report_only_the_sampled_token(complete):
    columns = complete(logprobs=0)["choices"][0]["logprobs"]

    assert [list(top) for top in columns["top_logprobs"]] == [[t] for t in columns["tokens"]]


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_echo_with_logprobs_scores_the_prompt(complete, llm, max_tokens):
    choice = complete(echo=True, logprobs=1, max_tokens=max_tokens)["choices"][0]

    output = python_output(llm, max_tokens=max_tokens or 1, prompt_logprobs=1, logprobs=1)
    columns = choice["logprobs"]
    num_prompt = len(output.prompt_token_ids)
    assert "".join(columns["tokens"]) == choice["text"]
    assert columns["text_offset"][0] == 0
    assert len(columns["tokens"]) == num_prompt + max_tokens
    assert columns["token_logprobs"][0] is None
    assert columns["top_logprobs"][0] is None
    scores = [s.logprob for s in output.prompt_logprobs[1:]]
    assert columns["token_logprobs"][1:num_prompt] == pytest.approx(scores, abs=1e-4)
    assert all(math.isfinite(value) for value in columns["token_logprobs"][1:])
    assert choice["finish_reason"] == "length"


def test_echo_with_max_tokens_zero_needs_no_logprobs(complete):
    body = complete(echo=True, max_tokens=0)

    assert body["choices"][0]["text"] == PROMPT
    assert body["choices"][0]["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 0


def test_special_tokens_are_included_on_request(complete, llm):
    begin = [llm.model.tokenizer.bos_token_id]

    hidden = complete(allowed_token_ids=begin)["choices"][0]["text"]
    shown = complete(allowed_token_ids=begin, skip_special_tokens=False)["choices"][0]["text"]

    assert hidden == ""
    assert shown == llm.model.tokenizer.bos_token * 4


def test_null_fields_are_unset(complete):
    nulls = dict.fromkeys(
        ("n", "stop", "temperature", "top_p", "logprobs", "seed", "echo", "stream", "logit_bias")
    )

    assert complete(**nulls)["choices"] == complete()["choices"]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 2.0, "n": 3},
        {"temperature": 2.0, "n": 3, "allowed_token_ids": list(range(140, 300))},  # with bytes
        {"temperature": 2.0, "skip_special_tokens": False, "include_stop_str_in_output": True},
        {"temperature": 1.0, "stop": [" the", "e"], "min_tokens": 5, "n": 2},
        {"use_beam_search": True, "n": 2, "beam_width": 4},
    ],
)
def test_text_offsets_are_positions_in_the_streamed_and_whole_text(complete, stream, options):
    options |= {"max_tokens": 40, "logprobs": 1, "seed": 7}
    whole = complete(**options)["choices"]
    chunks = stream("/v1/completions", prompt=PROMPT, **options)

    for choice in whole:
        text, columns = choice["text"], choice["logprobs"]
        for piece, offset in zip(columns["tokens"], columns["text_offset"], strict=True):
            assert offset <= len(text)
            if "\N{REPLACEMENT CHARACTER}" not in piece and not piece.startswith("<|"):
                rest = text[offset:]
                assert rest.startswith(piece) or piece.startswith(rest)  # cut by a stop text
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        for column in ("tokens", "text_offset"):
            assert [v for c in own for v in c["logprobs"][column]] == columns[column]
