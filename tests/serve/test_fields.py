"""Fields that the server does not read: ignored, refused, or unknown."""

import pytest

from quire.errors import RequestError
from quire.serve.fields import IGNORED, MOST_EXTRA_FIELDS, nearest, unknown_fields
from quire.serve.protocol import ChatBody, CompletionBody

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
ASKED = {
    COMPLETIONS: {"prompt": "<|doc|>Once", "max_tokens": 2, "temperature": 0},
    CHATS: {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 2, "temperature": 0},
}


def refused(response, param):
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    return error["message"]


@pytest.mark.parametrize(
    ("path", "field", "meant"),
    [
        (COMPLETIONS, "evcit", "evict"),
        (COMPLETIONS, "temprature", "temperature"),
        (CHATS, "Temperature", "temperature"),
        (CHATS, "maxTokens", "max_tokens"),
        (CHATS, "max-completion-tokens", "max_completion_tokens"),
        (CHATS, "message", "messages"),
        (CHATS, "respons_format", "response_format"),
        (COMPLETIONS, "stops", "stop"),
    ],
)
def test_a_near_miss_is_refused_with_the_name_that_was_meant(post, path, field, meant):
    message = refused(post(path, **ASKED[path], **{field: 1}), field)

    assert f"did you mean `{meant}`?" in message


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (COMPLETIONS, "no_repeat_ngram_size", 3),
        (COMPLETIONS, "typical_p", 0.5),
        (COMPLETIONS, "regex", "a+"),
        (COMPLETIONS, "grammar", "root ::= 'a'"),
        (COMPLETIONS, "json_schema", {"type": "object"}),
        (COMPLETIONS, "top_logprobs", 2),
        (COMPLETIONS, "return_token_ids", True),
        (COMPLETIONS, "messages", [{"role": "user", "content": "b"}]),
        (COMPLETIONS, "bad_words", ["a"]),
        (CHATS, "modalities", ["text", "audio"]),
        (COMPLETIONS, "chat_template_kwargs", {"enable_thinking": False}),
        (CHATS, "prompt", "a"),
        (CHATS, "echo", True),
        (CHATS, "tool_choice", "required"),
    ],
)
def test_a_field_that_would_change_the_output_is_refused(post, path, field, value):
    assert "not supported" in refused(post(path, **ASKED[path], **{field: value}), field)


@pytest.mark.parametrize(
    ("field", "meant"),
    [
        ("max_new_tokens", "max_tokens"),
        ("max_length", "max_tokens"),
        ("repeat_penalty", "repetition_penalty"),
    ],
)
def test_other_servers_names_are_refused_with_ours(post, field, meant):
    path = COMPLETIONS

    assert f"use `{meant}`" in refused(post(path, **ASKED[path], **{field: 2}), field)


@pytest.mark.parametrize("path", ASKED)
def test_values_that_ask_for_nothing_are_accepted(post, path):
    nothing = {
        "modalities": ["text"],
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "auto",
        "no_repeat_ngram_size": 0,
        "typical_p": 1.0,
        "return_token_ids": False,
        "regex": None,
        "evcit": None,
    }

    response = post(path, **ASKED[path], **nothing)

    assert response.status_code == 200, response.text
    assert "x-ignored-fields" not in response.headers
    assert response.json()["choices"] == post(path, **ASKED[path]).json()["choices"]


@pytest.mark.parametrize("path", ASKED)
def test_documented_fields_are_ignored_without_a_word(post, caplog, path):
    response = post(path, **ASKED[path], **{name: {"a": 1} for name in IGNORED})

    assert response.status_code == 200, response.text
    assert "x-ignored-fields" not in response.headers
    assert not caplog.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
def test_other_unknown_fields_are_ignored_with_a_log_line_and_a_header(post, caplog, path, stream):
    unknown = {"background": 1, "x\nüy" * 50: 2}

    response = post(path, **ASKED[path], **unknown, stream=stream)

    assert response.status_code == 200, response.text
    header = response.headers["x-ignored-fields"]
    assert header.startswith("background, x")
    assert len(header) < 100
    assert f"{path}: ignored unknown fields: {header}" in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *ASKED.items(),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
def test_unknown_fields_are_refused_where_the_server_is_told_to(serve, path, body):
    async def main(client):
        known = await client.post(path, json=body | {"user": "x"})
        return known, await client.post(path, json=body | {"background": 1})

    known, unknown = serve(main, unknown_fields="refuse")

    assert known.status_code == 200, known.text
    assert "unknown field `background`: leave it out" in refused(unknown, "background")


def test_fields_of_stream_options_and_messages_are_checked_too(post):
    options = {"stream": True, "stream_options": {"include_usge": True}}
    message = {"role": "user", "contnet": "a"}

    in_options = post(CHATS, **ASKED[CHATS], **options)
    in_message = post(CHATS, messages=[message])

    assert "`include_usage`" in refused(in_options, "stream_options.include_usge")
    assert "`content`" in refused(in_message, "messages.contnet")


def test_many_unknown_fields_are_refused_before_each_is_compared(post):
    many = {f"field-{number}": 1 for number in range(MOST_EXTRA_FIELDS + 1)}

    assert "expected at most 64 unknown fields, got 65" in refused(
        post(COMPLETIONS, prompt="a", **many), None
    )


def test_bad_token_ids_are_never_generated(complete, llm):
    greedy = {"temperature": 0, "max_tokens": 1}
    first = complete(**greedy)["choices"][0]["text"]
    [token] = llm.model.tokenizer(first).input_ids

    banned = complete(**greedy, bad_token_ids=[[token]])

    assert banned["choices"][0]["text"] != first


def test_max_completion_tokens_is_read_by_completions(complete):
    assert complete(max_completion_tokens=2, max_tokens=None)["usage"]["completion_tokens"] == 2
    assert complete(max_completion_tokens=2, max_tokens=9)["usage"]["completion_tokens"] == 2


def test_logprobs_false_asks_for_none_in_a_completion(complete, post):
    assert complete(logprobs=False)["choices"][0]["logprobs"] is None
    assert "true" in refused(post(COMPLETIONS, prompt="a", logprobs=True), "logprobs")


OPEN_WEBUI = {
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 2,
    "temperature": 0,
    "top_p": 0.9,
    "seed": 1,
    "stop": ["###"],
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "reasoning_effort": "low",
    "logit_bias": {},
    "metadata": {"user_id": "u", "chat_id": "c", "message_id": "m", "session_id": "s"},
    "tool_ids": [],
    "user": {"name": "u", "id": "1", "email": "u@example.org", "role": "user"},
}
OPEN_WEBUI_TITLE = {"stream": False, "max_completion_tokens": 8, "metadata": {"task": "title"}}

# What litellm 1.106.2 sends for `completion(model="hosted_vllm/quire-tiny", ...)`, recorded
LITELLM_PLAIN = {
    "frequency_penalty": 0,
    "logit_bias": {},
    "max_tokens": 2,
    "n": 1,
    "presence_penalty": 0,
    "seed": 1,
    "stop": ["###"],
    "temperature": 0,
    "top_p": 0.9,
}
LITELLM_STREAM = LITELLM_PLAIN | {"stream": True, "stream_options": {"include_usage": True}}
LITELLM_FULL = LITELLM_PLAIN | {
    "functions": [],
    "logprobs": True,
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "prompt_cache_key": "k",
    "reasoning_effort": "low",
    "response_format": {"type": "text"},
    "safety_identifier": "s",
    "service_tier": "auto",
    "store": False,
    "tools": [],
    "top_logprobs": 1,
}
LITELLM_EXTRA_BODY = {
    "max_tokens": 2,
    "chat_template_kwargs": {"enable_thinking": False},
    "top_k": 3,
    "do_sample": False,
}
# The fields that its proxy adds, and those it passes on from its own clients
LITELLM_PROXY = LITELLM_PLAIN | {
    "user": "u",
    "metadata": {"trace_id": "t"},
    "tool_choice": None,
    "logprobs": None,
    "top_logprobs": None,
    "extra_headers": None,
    "timeout": None,
    "litellm_trace_id": "t",
}


@pytest.mark.parametrize("effort", [None, "none", "minimal", "low", "medium", "high"])
@pytest.mark.parametrize(
    "options",
    [
        *(OPEN_WEBUI, OPEN_WEBUI_TITLE, LITELLM_PLAIN, LITELLM_STREAM, LITELLM_FULL),
        *(LITELLM_FULL | LITELLM_STREAM, LITELLM_EXTRA_BODY, LITELLM_PROXY),
    ],
)
def test_what_open_webui_and_litellm_send_is_answered(serve, options, effort):
    body = {"model": "quire-tiny", "messages": ASKED[CHATS]["messages"]} | options
    if effort is not None:
        body["reasoning_effort"] = effort

    response = serve(lambda client: client.post(CHATS, json=body))

    assert response.status_code == 200, response.text


LITELLM_TEXT = {"logprobs": 1, "max_tokens": 3, "user": "u", "best_of": 1, "echo": False}


@pytest.mark.parametrize(
    "options",
    [LITELLM_TEXT, {"max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}],
)
def test_text_completions_of_litellm_are_answered(post, options):
    response = post(COMPLETIONS, model="quire-tiny", prompt="Once", **options)

    assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", ASKED)
def test_do_sample_false_stands_for_temperature_0(post, path):
    requested = {name: value for name, value in ASKED[path].items() if name != "temperature"}
    options = {"max_tokens": 8, "seed": 3}

    def choices(**more):
        response = post(path, **requested | options | more)
        assert response.status_code == 200, response.text
        return response.json()["choices"]

    drawn = choices(temperature=1.5)
    greedy = choices(temperature=0)
    assert drawn != greedy
    assert choices(do_sample=False) == greedy
    assert choices(do_sample=False, temperature=0) == greedy
    assert choices(do_sample=True, temperature=1.5) == drawn
    assert choices(do_sample=None, temperature=1.5) == drawn


@pytest.mark.parametrize("path", ASKED)
def test_do_sample_false_excludes_a_temperature(post, path):
    message = refused(
        post(path, **ASKED[path] | {"do_sample": False, "temperature": 0.7}), "do_sample"
    )

    assert "`do_sample`" in message
    assert "`temperature` 0.7" in message
    refused(post(path, **ASKED[path], do_sample="perhaps"), "do_sample")


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("mode", ["warn", "refuse"])
def test_a_reasoning_effort_without_effect_is_named_in_the_header(serve, caplog, path, mode):
    body = ASKED[path] | {"reasoning_effort": "high"}

    response = serve(lambda client: client.post(path, json=body), unknown_fields=mode)

    assert response.status_code == 200, response.text
    assert response.headers["x-ignored-fields"] == "reasoning_effort"
    assert not caplog.text


def test_an_unknown_reasoning_effort_is_refused(post):
    refused(post(CHATS, **ASKED[CHATS], reasoning_effort="extreme"), "reasoning_effort")


@pytest.mark.parametrize(
    "name",
    [
        *("id", "title", "chat_type", "features", "background_tasks", "variables", "filter_ids"),
        *("keep_alive", "num_ctx", "cache_control", "provider", "plugins", "timeout"),
        *("litellm_metadata", "litellm_call_id", "litellm_trace_id", "think", "system"),
    ],
)
def test_a_clients_own_field_is_no_near_miss(name):
    for body in (ChatBody, CompletionBody):
        assert unknown_fields({name: 1}, body.model_fields) == [name]


def test_a_long_name_is_near_nothing():
    assert nearest("temperature" * 10_000, ("temperature",)) is None
    with pytest.raises(RequestError, match="temperature"):
        unknown_fields({"temperture": 1}, ("temperature",))


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("field", ["temperature", "max_tokens", "n", "seed", "top_p", "priority"])
def test_true_is_no_number(post, path, field):
    message = refused(post(path, **ASKED[path] | {field: True}), field)

    assert "got true" in message


@pytest.mark.parametrize(
    ("path", "flags"),
    [
        (COMPLETIONS, {"logprobs": False, "echo": True, "early_stopping": False}),
        (CHATS, {"logprobs": True, "top_logprobs": 1, "add_generation_prompt": True}),
    ],
)
def test_flags_may_be_true_or_false(post, path, flags):
    more = {"ignore_eos": True, "skip_special_tokens": False, "stream": False}

    response = post(path, **ASKED[path], **flags, **more)

    assert response.status_code == 200, response.text


def test_token_ids_without_lists_around_them_are_refused_with_the_shape(post):
    message = refused(
        post(COMPLETIONS, **ASKED[COMPLETIONS], bad_token_ids=[5]),
        "bad_token_ids",
    )

    assert "[[5], [7, 8]]" in message


@pytest.mark.parametrize("path", ASKED)
def test_a_negative_length_is_named_as_the_body_names_it(post, path):
    requested = ASKED[path] | {"max_completion_tokens": -1}

    assert refused(post(path, **requested), "max_completion_tokens").startswith(
        "max_completion_tokens"
    )


@pytest.mark.parametrize("field", ["extra_body", "options"])
def test_fields_inside_an_object_of_a_client_are_refused(post, field):
    message = refused(post(CHATS, **ASKED[CHATS], **{field: {"top_k": 1}}), field)

    assert "at the top level of the body" in message
    assert post(CHATS, **ASKED[CHATS], **{field: {}}).status_code == 200
