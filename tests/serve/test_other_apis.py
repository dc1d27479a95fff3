"""/v1/responses and /v1/messages: bodies, streams, tools and errors."""

import asyncio
import json

import pytest

from quire.serve.apis.messages import MessagesFormat
from quire.serve.errors import one_line
from quire.serve.tenant_keys import TenantKeys
from serve.conftest import client_of

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "Once upon a time"}
TOOL = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
KEYS = TenantKeys({"a": ("sk-a-2f0c77d1",)})


def respond(post, **body):
    response = post(RESPONSES, **{"input": "Once upon a time", "max_output_tokens": 5} | body)
    assert response.status_code == 200, response.text
    return response.json()


def message(post, **body):
    response = post(MESSAGES, **{"messages": [USER], "max_tokens": 5} | body)
    assert response.status_code == 200, response.text
    return response.json()


def events_of(response):
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert name == f"event: {body['type']}"
        found.append(body)
    return found


def chat_text(post, **body):
    response = post("/v1/chat/completions", messages=[USER], max_tokens=5, **body)
    return response.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RESPONSES, {"input": "Once", "max_output_tokens": 1_000}),
        (MESSAGES, {"messages": [USER], "max_tokens": 1_000}),
    ],
)
def test_output_longer_than_the_kv_memory_is_limited_and_says_so(post, path, body):
    answer = post(path, **body, ignore_eos=True).json()
    refused = post(path, **body, ignore_eos=True, limit_max_tokens=False)

    assert answer["usage"]["max_tokens_limit"] == "kv_memory"
    assert answer["usage"]["kv_peak_bytes"] > 0 == answer["usage"]["evicted_tokens"]
    assert answer["usage"]["max_tokens"] == answer["usage"]["output_tokens"] < 1_000
    assert refused.status_code == 400, refused.text
    if path == RESPONSES:
        assert answer["max_output_tokens"] == answer["usage"]["max_tokens"]


# ---- responses -----------------------------------------------------------------------------------


def test_response_has_the_text_of_the_chat(post):
    body = respond(post, temperature=0, metadata={"a": "b"})

    [item] = body["output"]
    assert item["content"][0]["text"] == chat_text(post, temperature=0)
    assert (body["object"], body["status"]) == ("response", "incomplete")
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["usage"]["output_tokens"] == 5
    assert body["usage"]["total_tokens"] == body["usage"]["input_tokens"] + 5
    assert body["metadata"] == {"a": "b"}
    assert (body["temperature"], body["top_p"]) == (0, 1)
    assert [respond(post)[name] for name in ("temperature", "top_p")] == [0, 1]
    assert respond(post, temperature=0.5, top_p=0.25)["top_p"] == 0.25
    assert body["id"].startswith("resp_")


def test_items_of_input_are_messages(post):
    items = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": []},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Yes"}]},
        {"role": "user", "content": "Go on"},
    ]
    chat = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": "Go on"},
    ]
    expected = post("/v1/chat/completions", messages=chat, max_tokens=5, temperature=0).json()

    body = respond(post, input=items, temperature=0)

    assert body["output"][0]["content"][0]["text"] == expected["choices"][0]["message"]["content"]
    assert body["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]


def test_stream_of_a_response(post):
    whole = respond(post, temperature=0)
    found = events_of(
        post(RESPONSES, input="Once upon a time", max_output_tokens=5, temperature=0, stream=True)
    )

    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    kinds = [event["type"].removeprefix("response.") for event in found]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == [
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    text = "".join(e["delta"] for e in found if e["type"] == "response.output_text.delta")
    assert text == whole["output"][0]["content"][0]["text"]
    last = found[-1]["response"]
    assert last["output"][0]["content"][0]["text"] == text
    assert last["usage"]["output_tokens"] == 5


@pytest.mark.parametrize("stream", [False, True])
def test_function_call_of_a_response(post, stream):
    body = {
        "input": "weather?",
        "tools": [{"type": "function", **TOOL}],
        "tool_choice": {"type": "function", "name": "weather"},
        "max_output_tokens": 60,
        "stream": stream,
    }
    response = post(RESPONSES, **body)
    found = events_of(response)[-1]["response"] if stream else response.json()

    [call] = found["output"]
    assert (call["type"], call["name"], call["status"]) == ("function_call", "weather", "completed")
    assert json.loads(call["arguments"])["city"] in ("Rome", "Oslo")
    if stream:
        deltas = [
            e["delta"]
            for e in events_of(response)
            if e["type"] == "response.function_call_arguments.delta"
        ]
        assert "".join(deltas) == call["arguments"]


def test_format_of_a_response(post):
    schema = TOOL["parameters"]
    text = {"format": {"type": "json_schema", "name": "city", "schema": schema, "strict": True}}

    body = respond(post, text=text, max_output_tokens=400)

    assert json.loads(body["output"][0]["content"][0]["text"])["city"] in ("Rome", "Oslo")
    assert body["text"] == text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"content": "a"}]}, "input.0.role"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"include": ["a"]}, "include"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"truncation": "some"}, "truncation"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [{"type": "function", **TOOL, "strict": "yes"}]}, "tools.0.strict"),
        ({"metadata": {"a": [float("nan")]}}, "metadata.a.0"),
        ({"metadata": {"\ud800": "a"}}, "metadata.\\ud800"),
        ({"text": {"format": 5}}, "text.format"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"model": "other"}, "model"),
        ({"evict": "nothing"}, "evict"),
    ],
)
def test_wrong_body_of_a_response_is_refused(post, body, param):
    response = post(RESPONSES, **{"input": "a"} | body)

    assert response.status_code == (404 if param == "model" else 400), response.text
    assert (response.json()["error"]["param"] or "").startswith(param), response.text


# ---- messages ------------------------------------------------------------------------------------


def test_format_of_a_message(post):
    given = {"format": {"type": "json_schema", "schema": TOOL["parameters"]}}

    body = message(post, output_config=given, max_tokens=400)

    assert json.loads(body["content"][0]["text"])["city"] in ("Rome", "Oslo")


def test_message_has_the_text_of_the_chat(post):
    body = message(post, temperature=0)

    assert body["content"] == [{"type": "text", "text": chat_text(post, temperature=0)}]
    assert (body["type"], body["role"], body["stop_reason"]) == (
        "message",
        "assistant",
        "max_tokens",
    )
    assert body["usage"]["output_tokens"] == 5
    assert body["id"].startswith("msg_")


def test_system_and_blocks_are_the_messages_of_a_chat(post):
    chat = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi there"},
    ]
    expected = post("/v1/chat/completions", messages=chat, max_tokens=1).json()["usage"]
    blocks = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]

    for system in ("Be kind.", [{"type": "text", "text": "Be kind."}]):
        user = {"role": "user", "content": blocks}
        found = message(post, system=system, messages=[user])
        assert found["usage"]["input_tokens"] == expected["prompt_tokens"]


def test_stop_sequence_is_named(post):
    text = message(post, temperature=0, max_tokens=12)["content"][0]["text"]
    stop = text.split()[2]

    body = message(post, temperature=0, max_tokens=12, stop_sequences=[stop])

    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", stop)


def test_stream_of_a_message(post):
    whole = message(post, temperature=0)
    found = events_of(post(MESSAGES, messages=[USER], max_tokens=5, temperature=0, stream=True))

    kinds = [event["type"] for event in found]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(e["delta"]["text"] for e in found if e["type"] == "content_block_delta")
    assert text == whole["content"][0]["text"]
    assert found[-2]["delta"]["stop_reason"] == "max_tokens"
    assert found[-2]["usage"]["output_tokens"] == 5


@pytest.mark.parametrize(
    ("interval", "options"),
    [(1, {}), (4, {}), (1, {"best_of": 2}), (1, {"use_beam_search": True, "beam_width": 2})],
)
def test_input_tokens_of_a_message_sum_to_its_prompt(serve, interval, options):
    """From the first event on, without and with a prefix in the cache."""
    text = f"{interval} {' '.join(options)} boats sail on " * 9
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 5, "ignore_eos": True}
    body |= options

    async def main(client):
        counted = await client.post(f"{MESSAGES}/count_tokens", json=body)
        streams = [await client.post(MESSAGES, json=body | {"stream": True}) for _ in range(2)]
        return counted.json()["input_tokens"], streams, await client.post(MESSAGES, json=body)

    num_tokens, streams, whole = serve(main, stream_interval=interval)

    usages = [whole.json()["usage"]]
    for stream in streams:
        begin, *_, delta, _ = events_of(stream)
        usages += [begin["message"]["usage"], delta["usage"]]
        began = begin["message"]["usage"]["output_tokens"]
        assert (
            0 < began <= delta["usage"]["output_tokens"] == whole.json()["usage"]["output_tokens"]
        )
    kinds = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert [sum(usage[kind] for kind in kinds) for usage in usages] == [num_tokens] * 5
    cached = [usage["cache_read_input_tokens"] for usage in usages]
    assert cached[1:3] == [0, 0]
    assert cached[0] == cached[3] == cached[4] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_tool_use_of_a_message(post, stream):
    tool = {"name": "weather", "description": "d", "input_schema": TOOL["parameters"]}
    body = {
        "messages": [USER],
        "max_tokens": 60,
        "tools": [tool],
        "tool_choice": {"type": "tool", "name": "weather"},
        "stream": stream,
    }
    response = post(MESSAGES, **body)
    if stream:
        found = events_of(response)
        parts = [e["delta"]["partial_json"] for e in found if e["type"] == "content_block_delta"]
        value, reason = json.loads("".join(parts)), found[-2]["delta"]["stop_reason"]
    else:
        [block] = response.json()["content"]
        assert (block["type"], block["name"]) == ("tool_use", "weather")
        value, reason = block["input"], response.json()["stop_reason"]

    assert value["city"] in ("Rome", "Oslo")
    assert reason == "tool_use"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": NaN}', {}),
        ('{"a": 1e999}', {}),
        ('{"a": ' + "[" * 100_000, {}),
        (r'{"a": "\ud800"}', {"a": "\ud800"}),
    ],
)
def test_arguments_that_a_model_wrote_can_be_sent(arguments, expected):
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    usage = {
        "prompt_tokens": 1,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    choice = {"message": {"content": None, "tool_calls": [call]}, "finish_reason": "tool_calls"}
    chat = {"id": "msg_1", "model": "m", "created": 0, "choices": [choice | {"stop_reason": None}]}

    sent = one_line(MessagesFormat(()).whole(chat | {"usage": usage})).encode()

    [block] = json.loads(sent)["content"]
    assert block["input"] == expected


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"max_tokens": None}, "max_tokens: expected a number"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages.0.content.0: expected a part of type text",
        ),
        ({"stop_sequences": ["a", 1]}, "stop_sequences.1: expected a valid string, got 1"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 2}, "n: expected 1, got 2"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type"),
        ({"tools": [{"name": "a"}], "tool_choice": {"type": "b"}}, "tool_choice.type"),
        ({"tools": [{"name": "a"}], "tool_choice": {"type": ["any"]}}, "tool_choice.type"),
        ({"tools": [{"name": "a"}], "tool_choice": {"type": {}}}, "tool_choice.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "`thinking` is not supported"),
        ({"output_config": {"effort": "low"}}, "`output_config.effort` is not supported"),
        ({"output_config": {"format": 5}}, "output_config.format: expected an object"),
        ({"output_config": {"format": {"type": "xml"}}}, "expected output_config.format to be"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"output_format": {"type": "json_schema"}}, "use `response_format`"),
    ],
)
def test_wrong_body_of_a_message_is_refused_in_its_format(post, body, text):
    response = post(MESSAGES, **{"messages": [USER], "max_tokens": 5} | body)

    assert response.status_code == 400, response.text
    error = response.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert text in error["error"]["message"]


def test_key_of_anthropics_clients(llm):
    async def main():
        async with client_of(llm, tenant_keys=KEYS) as client:
            body = {"messages": [USER], "max_tokens": 1}
            return [
                await client.post(MESSAGES, json=body, headers=headers)
                for headers in ({}, {"x-api-key": "wrong-key"}, {"x-api-key": "sk-a-2f0c77d1"})
            ]

    answers = asyncio.run(main())

    assert [answer.status_code for answer in answers] == [401, 401, 200]
    assert answers[0].json()["error"]["type"] == "authentication_error"
