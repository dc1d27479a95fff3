import asyncio
import json

import pytest

from quire.errors import RequestError
from quire.serve.apis.messages import MessagesBody
from quire.serve.apis.responses import ResponsesBody
from quire.serve.fields import IGNORED, MAX_EXTRA_FIELDS, nearest, unknown_fields
from quire.serve.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    TokenizeBody,
)
from serve.conftest import (
    CHATS,
    COMPLETIONS,
    JSON,
    MESSAGES,
    RESPONSES,
    USER,
    client_of,
    ok,
    refused,
)

BODIES = {
    COMPLETIONS: {"prompt": "<|doc|>Once", "max_tokens": 2, "temperature": 0},
    CHATS: {"messages": [USER], "max_tokens": 2, "temperature": 0},
}


@pytest.mark.parametrize(
    ("path", "field", "value", "message"),
    [
        (COMPLETIONS, "evcit", 1, "did you mean `evict`?"),
        (COMPLETIONS, "temprature", 1, "did you mean `temperature`?"),
        (CHATS, "Temperature", 1, "did you mean `temperature`?"),
        (CHATS, "maxTokens", 1, "did you mean `max_tokens`?"),
        (CHATS, "max-completion-tokens", 1, "did you mean `max_completion_tokens`?"),
        (CHATS, "message", 1, "did you mean `messages`?"),
        (CHATS, "respons_format", 1, "did you mean `response_format`?"),
        (COMPLETIONS, "stops", 1, "did you mean `stop`?"),
        (COMPLETIONS, "no_repeat_ngram_size", 3, "not supported"),
        (COMPLETIONS, "typical_p", 0.5, "not supported"),
        (COMPLETIONS, "regex", "a+", "not supported"),
        (COMPLETIONS, "grammar", "root ::= 'a'", "not supported"),
        (COMPLETIONS, "json_schema", {"type": "object"}, "not supported"),
        (COMPLETIONS, "top_logprobs", 2, "not supported"),
        (COMPLETIONS, "return_token_ids", True, "not supported"),
        (COMPLETIONS, "messages", [{"role": "user", "content": "b"}], "not supported"),
        (CHATS, "modalities", ["text", "audio"], "not supported"),
        (COMPLETIONS, "chat_template_kwargs", {"enable_thinking": False}, "not supported"),
        (CHATS, "prompt", "a", "not supported"),
        (CHATS, "echo", True, "not supported"),
        (COMPLETIONS, "tool_choice", "required", "not supported"),
        (COMPLETIONS, "tools", [{"type": "function"}], "not supported"),
        (COMPLETIONS, "max_new_tokens", 2, "use `max_tokens`"),
        (COMPLETIONS, "max_length", 2, "use `max_tokens`"),
        (COMPLETIONS, "repeat_penalty", 2, "use `repetition_penalty`"),
        (COMPLETIONS, "logprobs", True, "true"),
        (COMPLETIONS, "bad_token_ids", [5], "[[5], [7, 8]]"),
        (CHATS, "reasoning_effort", "extreme", "reasoning_effort"),
        (CHATS, "extra_body", {"top_k": 1}, "at the top level of the body"),
        (CHATS, "options", {"top_k": 1}, "at the top level of the body"),
        *((path, "do_sample", "perhaps", "do_sample") for path in BODIES),
        *(
            (path, field, True, "got true")
            for path in BODIES
            for field in ("temperature", "max_tokens", "n", "seed", "top_p", "priority")
        ),
    ],
)
def test_field_is_refused_by_name_with_what_to_use(post, path, field, value, message):
    assert message in refused(post(path, **BODIES[path] | {field: value}), field)


@pytest.mark.parametrize("path", BODIES)
def test_neutral_values_and_documented_fields_are_ignored_silently(post, path, caplog):
    neutral = (
        {"modalities": ["text"], "response_format": {"type": "text"}, "tools": []}
        | {"tool_choice": "auto", "no_repeat_ngram_size": 0, "typical_p": 1.0}
        | {"return_token_ids": False, "regex": None, "evcit": None}
        | {"extra_body": {}, "options": {}}
    )
    response = post(path, **BODIES[path], **neutral)

    assert ok(response)["choices"] == post(path, **BODIES[path]).json()["choices"]
    assert "x-ignored-fields" not in response.headers

    response = post(path, **BODIES[path], **{name: {"a": 1} for name in IGNORED})
    assert response.status_code == 200, response.text
    assert "x-ignored-fields" not in response.headers
    assert not caplog.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_unknown_fields_are_ignored_with_a_log_line_and_a_header(post, caplog, path, stream):
    response = post(path, **BODIES[path], **{"background": 1, "x\nüy" * 50: 2}, stream=stream)

    assert response.status_code == 200, response.text
    header = response.headers["x-ignored-fields"]
    assert header.startswith("background, x")
    assert len(header) < 100
    assert f"{path}: ignored unknown fields: {header}" in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.parametrize("name", ["", " ", "zig ", "\t", "x" * 49 + " y"])
def test_names_of_ignored_fields_are_a_valid_header(post, name):
    header = post("/tokenize", prompt="a", **{name: 1}).headers["x-ignored-fields"]
    assert header == header.strip() != ""


@pytest.mark.parametrize(
    ("path", "body"),
    [*BODIES.items(), ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})],
)
def test_unknown_fields_are_refused_if_configured(send, path, body):
    calls = [("POST", path, {"json": body | more}) for more in ({"user": "x"}, {"background": 1})]
    accepted, unknown = send(*calls, unknown_fields="refuse")
    assert accepted.status_code == 200, accepted.text
    assert "unknown field `background`: leave it out" in refused(unknown, "background")


def test_misspelt_stream_options_and_messages_are_named_and_long_names_are_not(post):
    options = {"stream": True, "stream_options": {"include_usge": True}}
    response = post(CHATS, **BODIES[CHATS], **options)
    assert "`include_usage`" in refused(response, "stream_options.include_usge")
    response = post(CHATS, messages=[{"role": "user", "contnet": "a"}])
    assert "`content`" in refused(response, "messages.0.contnet")
    many = {f"field-{number}": 1 for number in range(MAX_EXTRA_FIELDS + 1)}
    message = refused(post(COMPLETIONS, prompt="a", **many), None)
    assert "expected at most 64 unknown fields, got 65" in message
    assert nearest("temperature" * 10_000, ("temperature",)) is None
    with pytest.raises(RequestError, match="temperature"):
        unknown_fields({"temperture": 1}, ("temperature",))


OPEN_WEBUI = (
    {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 2}
    | {"temperature": 0, "top_p": 0.9, "seed": 1, "stop": ["###"], "frequency_penalty": 0}
    | {"presence_penalty": 0, "reasoning_effort": "low", "logit_bias": {}, "tool_ids": []}
    | {
        "metadata": {"user_id": "u", "chat_id": "c", "message_id": "m", "session_id": "s"},
        "user": {"name": "u", "id": "1", "email": "u@example.org", "role": "user"},
    }
)
OPEN_WEBUI_TITLE = {"stream": False, "max_completion_tokens": 8, "metadata": {"task": "title"}}

# Recorded requests of litellm 1.106.2 for `completion(model="hosted_vllm/quire-tiny", ...)`
LITELLM_PLAIN = dict.fromkeys(("frequency_penalty", "presence_penalty", "temperature"), 0) | {
    "logit_bias": {},
    "max_tokens": 2,
    "n": 1,
    "seed": 1,
    "stop": ["###"],
    "top_p": 0.9,
}
LITELLM_STREAM = LITELLM_PLAIN | {"stream": True, "stream_options": {"include_usage": True}}
LITELLM_FULL = (
    LITELLM_PLAIN
    | {"functions": [], "logprobs": True, "modalities": ["text"], "parallel_tool_calls": True}
    | {"prompt_cache_key": "k", "reasoning_effort": "low", "response_format": {"type": "text"}}
    | {"safety_identifier": "s", "service_tier": "auto", "store": False, "tools": []}
    | {"top_logprobs": 1}
)
THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
LITELLM_EXTRA_BODY = THINKING | {"max_tokens": 2, "top_k": 3, "do_sample": False}
# The fields that its proxy adds or forwards from clients
LITELLM_PROXY = (
    LITELLM_PLAIN
    | {"user": "u", "metadata": {"trace_id": "t"}, "litellm_trace_id": "t"}
    | dict.fromkeys(("tool_choice", "logprobs", "top_logprobs", "extra_headers", "timeout"))
)


@pytest.mark.parametrize(
    ("options", "effort"),
    [
        *((OPEN_WEBUI, "low"), (OPEN_WEBUI_TITLE, "none"), (LITELLM_PLAIN, "minimal")),
        *((LITELLM_STREAM, "medium"), (LITELLM_FULL, "low")),
        *((LITELLM_FULL | LITELLM_STREAM, "high"), (LITELLM_EXTRA_BODY, "low")),
        (LITELLM_PROXY, None),
    ],
)
def test_requests_of_open_webui_and_litellm_are_accepted(post, options, effort):
    efforts = {} if effort is None else {"reasoning_effort": effort}
    response = post(CHATS, **{"model": "quire-tiny", "messages": [USER]} | options | efforts)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("path", "options"),
    [
        (COMPLETIONS, {"logprobs": 1, "max_tokens": 3, "user": "u", "best_of": 1, "echo": False}),
        (COMPLETIONS, {"stream": True, "stream_options": {"include_usage": True}}),
        # flags
        (COMPLETIONS, {"logprobs": False, "echo": True, "early_stopping": False}),
        (CHATS, {"logprobs": True, "top_logprobs": 1, "add_generation_prompt": True}),
        *((path, {"ignore_eos": True, "skip_special_tokens": False}) for path in BODIES),
    ],
)
def test_text_completions_of_litellm_and_flags_are_accepted(post, path, options):
    response = post(path, **BODIES[path] | {"model": "quire-tiny", "stream": False} | options)
    assert response.status_code == 200, response.text
    if options.get("logprobs") is False:
        assert response.json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("path", BODIES)
def test_do_sample_false_is_temperature_0_and_negative_lengths_are_refused(post, path):
    base = BODIES[path] | {"max_tokens": 8, "seed": 3}
    del base["temperature"]

    def choices(**options):
        return ok(post(path, **base | options))["choices"]

    sampled, greedy = choices(temperature=1.5), choices(temperature=0)
    assert sampled != greedy
    assert choices(do_sample=False) == choices(do_sample=False, temperature=0) == greedy
    for value in (True, None):
        assert choices(do_sample=value, temperature=1.5) == sampled
    message = refused(post(path, **base, do_sample=False, temperature=0.7), "do_sample")
    assert "`do_sample`" in message
    assert "`temperature` 0.7" in message

    name = "max_completion_tokens"
    assert refused(post(path, **BODIES[path] | {name: -1}), name).startswith(name)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("mode", ["warn", "refuse"])
def test_reasoning_effort_without_effect_is_reported_in_the_header(send, caplog, path, mode):
    body = {"json": BODIES[path] | {"reasoning_effort": "high"}}
    [response] = send(("POST", path, body), unknown_fields=mode)
    assert response.status_code == 200, response.text
    assert response.headers["x-ignored-fields"] == "reasoning_effort"
    assert not caplog.text


@pytest.mark.parametrize(
    "name",
    [
        *("id", "title", "chat_type", "features", "background_tasks", "variables", "filter_ids"),
        *("keep_alive", "num_ctx", "cache_control", "provider", "plugins", "timeout"),
        *("litellm_metadata", "litellm_call_id", "litellm_trace_id", "think", "system"),
    ],
)
def test_client_specific_fields_are_not_misspellings(name):
    for body in (ChatBody, CompletionBody):
        assert unknown_fields({name: 1}, body.model_fields) == [name]


# ---- generated values ----------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b"]}}}
FUNCTION = {"name": "f", "description": "d", "strict": True, "parameters": SCHEMA}
FORMAT = {"name": "s", "schema": SCHEMA, "strict": True}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
TALK = [
    {"role": "user", "content": [{"type": "text", "text": "Once"}], "name": "n"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "b", "tool_call_id": "c1"},
]
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "b"}]}
BLOCKS = [
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {}}]},
    {"role": "user", "content": [{"type": "text", "text": "Once"}, RESULT]},
]
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Once"}]},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": "b"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "b"},
]
TOOL = {"type": "function", "function": FUNCTION}
OF_CHATS = {"messages": TALK, "tools": [TOOL], "chat_template_kwargs": {"a": "b"}} | {
    "tool_choice": {"type": "function", "function": {"name": "f"}}
}
OF_COMPLETIONS = (
    {"metadata": {"a": "b"}, "logit_bias": {"7": 1}, "stop": ["x"], "bad_words": ["x"]}
    | {"bad_token_ids": [[5]], "structured_outputs": {"json": SCHEMA}, "guided_choice": ["a"]}
    | {"response_format": {"type": "json_schema", "json_schema": FORMAT}}
    | {"guided_json": '{"type": "object"}', "stream_options": {"include_usage": True}}
)
OF_RESPONSES = (
    {"input": ITEMS, "stream_options": {"include_obfuscation": True}}
    | {
        "text": {"format": {"type": "json_schema", **FORMAT}},
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "function", "name": "f"},
    }
    | {"reasoning": {"effort": "low"}, "metadata": {"a": "b"}, "include": ["a"]}
)
OF_MESSAGES = (
    {"messages": BLOCKS, "system": [{"type": "text", "text": "s"}], "stop_sequences": ["x"]}
    | {
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "f"},
    }
    | {"metadata": {"user_id": "u"}, "thinking": {"type": "disabled"}}
)
ENDPOINTS = {
    COMPLETIONS: (CompletionBody, {"prompt": "Once", "max_tokens": 1}, OF_COMPLETIONS),
    CHATS: (ChatBody, {"messages": TALK[:1], "max_tokens": 1}, OF_CHATS),
    RESPONSES: (ResponsesBody, {"input": "Once", "max_output_tokens": 1}, OF_RESPONSES),
    MESSAGES: (MessagesBody, {"messages": BLOCKS[1:], "max_tokens": 1}, OF_MESSAGES),
    "/v1/embeddings": (EmbeddingBody, {"input": "Once"}, {}),
    "/tokenize": (TokenizeBody, {"messages": TALK[:1]}, {}),
    "/detokenize": (DetokenizeBody, {"tokens": [5]}, {}),
}
"""The model of each body, a body, and values of its fields that have other values inside."""

UNUSABLE = (
    {"half of a pair": r'"a\ud800"', "half of a pair as a key": r'{"\udfff": 1}'}
    | {"NaN": "NaN", "infinity": "-Infinity", "large integer": "9" * 400}
    | {"many digits": "9" * 5000, "brackets": "[" * 600 + "]" * 600}
)

UNUSUAL = (
    {"lines": r'"a\r\nX-A: \u0000"', "lines in a key": r'{"a\r\nX-A: \u0000": "b"}'}
    | {"empty key": '{"": "b"}', "128 bits": str(2**127), "64 bits": str(-(2**63))}
    | {"float": "1e300", "flag": "true", "empty text": '""'}
    | {"text of JSON": r'"{\"a\": [NaN, \"\\ud800\", 1e999]}"'}
    | {"nested": "[" * 60 + "]" * 60, "object": "{}", "numbers": "[0, -1, null]"}
)
MARK = "!value!"
ENDS = ("[DONE]", "response.completed", "response.incomplete", "message_stop")


def variants(value):
    """Copies of a JSON value with a mark in place of each inner value, or as one more member."""
    yield MARK, ""
    inside = value if isinstance(value, dict) else {}
    if isinstance(value, list):
        inside = dict(enumerate(value))
    for key, inner in inside.items():
        for variant, path in variants(inner):
            copied = value.copy()
            copied[key] = variant
            yield copied, f".{key}{path}"
    if isinstance(value, dict):
        yield {**value, "extra": MARK}, ".extra"


def bodies(path):
    """Bodies with a mark, each with the path of the mark; half of them of streams."""
    model, least, samples = ENDPOINTS[path]
    common = CompletionBody.model_fields if path == CHATS else {}  # these are in completions
    for field in {**model.model_fields, **samples, "extra": None, "user": None}.keys() - common:
        tools = {"tools": samples["tools"]} if field == "tool_choice" else {}
        for number, (value, place) in enumerate(variants(samples.get(field, least.get(field)))):
            stream = {"stream": True} if number % 2 and "stream" in model.model_fields else {}
            yield {**least, **tools, **stream, field: value}, field + place


def is_whole(response):
    """Whether a response is no server error, and a stream has its end."""
    if response.headers["content-type"].startswith("text/event-stream"):
        last = response.text.rstrip().rsplit("\n", 1)[-1]
        return any(end in last for end in ENDS)
    return response.status_code < 500 and isinstance(response.json(), dict)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_no_value_of_a_field_is_a_server_error(llm, caplog, path):
    cases = [
        (json.dumps(body).replace(f'"{MARK}"', value), place, kind)
        for body, place in bodies(path)
        for kind, value in (UNUSABLE | UNUSUAL).items()
    ]

    async def main():
        limit = asyncio.Semaphore(16)

        async def send(content):
            async with limit:
                return await client.post(path, content=content, headers=JSON)

        async with client_of(llm) as client:
            return await asyncio.gather(*(send(content) for content, _, _ in cases))

    responses = asyncio.run(main())

    for (content, place, kind), response in zip(cases, responses, strict=True):
        assert is_whole(response), (content[:500], response.text)
        if kind in UNUSABLE:
            assert response.status_code == 400, content[:500]
            if path != MESSAGES and kind != "many digits":
                assert response.json()["error"]["param"].startswith(place)
    assert not [record for record in caplog.records if record.exc_info]


def test_no_query_parameter_is_a_server_error(llm, caplog):
    texts = ("%00", "%ED%A0%80", "%0d%0aX:%20b", "nan", "1e999", "9" * 400, "9" * 5000, "-1", "")

    async def main():
        async with client_of(llm) as client:
            paths = (await client.get("/openapi.json")).json()["paths"]
            return {
                url: await client.get(url)
                for path, operations in paths.items()
                if "get" in operations and not path.endswith("/stream")
                for place in operations["get"].get("parameters", [{"name": "x", "in": "query"}])
                for text in texts
                for url in [path.replace("{" + place["name"] + "}", text)]
                for url in [f"{url}?{place['name']}={text}" if place["in"] == "query" else url]
            }

    found = asyncio.run(main())

    assert len(found) > 100
    assert not {url: response for url, response in found.items() if response.status_code >= 500}
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("value", [b"9" * 5000, b"\xff", b"a\x00b", b"NaN", b""])
def test_no_header_is_a_server_error(send, caplog, value):
    names = ("authorization", "content-length", "last-event-id", "traceparent", "x-request-id")
    responses = send(*(("GET", "/v1/kv/events", {"headers": {name: value}}) for name in names))
    assert all(response.status_code < 500 for response in responses)
    assert not [record for record in caplog.records if record.exc_info]
