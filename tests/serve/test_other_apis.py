import json

import pytest

from quire.serve.apis.messages import MessagesFormat
from quire.serve.errors import one_line
from quire.serve.tenant_keys import TenantKeys
from serve.conftest import MESSAGES, RESPONSES, USER, error_of, ok

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"name": "weather", "parameters": SCHEMA}
FORMAT = {"type": "json_schema", "schema": SCHEMA}


@pytest.fixture
def respond(post):
    """The body of a response of /v1/responses that must succeed."""
    base = {"input": USER["content"], "max_output_tokens": 5}
    return lambda **body: ok(post(RESPONSES, **base | body))


@pytest.fixture
def message(post):
    """The body of a response of /v1/messages that must succeed."""
    return lambda **body: ok(post(MESSAGES, **{"messages": [USER], "max_tokens": 5} | body))


def events_of(response):
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert name == f"event: {body['type']}"
        found.append(body)
    return found


def text_of(chat):
    return chat["choices"][0]["message"]["content"]


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

    usage = answer["usage"]
    assert usage["max_tokens_limit"] == "kv_memory"
    assert usage["kv_peak_bytes"] > 0 == usage["evicted_tokens"]
    assert usage["max_tokens"] == usage["output_tokens"] < 1_000
    assert answer.get("max_output_tokens", usage["max_tokens"]) == usage["max_tokens"]
    assert refused.status_code == 400, refused.text


# ---- responses -----------------------------------------------------------------------------------


def test_response_has_the_text_of_the_chat(respond, chat):
    body = respond(temperature=0, metadata={"a": "b"})

    [item] = body["output"]
    assert item["content"][0]["text"] == text_of(chat(max_tokens=5, temperature=0))
    assert (body["object"], body["status"]) == ("response", "incomplete")
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["usage"]["output_tokens"] == 5
    assert body["usage"]["total_tokens"] == body["usage"]["input_tokens"] + 5
    assert body["metadata"] == {"a": "b"}
    assert [body["temperature"], body["top_p"]] == [0, 1]
    assert [respond()[name] for name in ("temperature", "top_p")] == [0, 1]
    assert respond(temperature=0.5, top_p=0.25)["top_p"] == 0.25
    assert body["id"].startswith("resp_")


def test_items_of_input_are_messages(respond, chat):
    items = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": []},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Yes"}]},
        {"role": "user", "content": "Go on"},
    ]
    texts = {"system": "Be kind.", "user": "Hi", "assistant": "Yes"}
    messages = [{"role": role, "content": text} for role, text in texts.items()]
    expected = chat(messages=[*messages, items[-1]], max_tokens=5, temperature=0)
    body = respond(input=items, temperature=0)

    assert body["output"][0]["content"][0]["text"] == text_of(expected)
    assert body["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]


def test_stream_of_a_response(post, respond):
    options = {"input": USER["content"], "max_output_tokens": 5, "temperature": 0}
    found = events_of(post(RESPONSES, **options, stream=True))

    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    kinds = [event["type"].removeprefix("response.") for event in found]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    text = "".join(e["delta"] for e in found if e["type"] == "response.output_text.delta")
    last = found[-1]["response"]
    for whole in (last, respond(temperature=0)):
        assert whole["output"][0]["content"][0]["text"] == text
        assert whole["usage"]["output_tokens"] == 5


@pytest.mark.parametrize("stream", [False, True])
def test_function_call_of_a_response(post, stream):
    tools = [{"type": "function", **TOOL}]
    choice = {"type": "function", "name": "weather"}
    options = {"tools": tools, "tool_choice": choice, "max_output_tokens": 60, "stream": stream}
    response = post(RESPONSES, input="weather?", **options)
    events = events_of(response) if stream else [{"type": "", "response": ok(response)}]

    [call] = events[-1]["response"]["output"]
    assert (call["type"], call["name"], call["status"]) == ("function_call", "weather", "completed")
    assert json.loads(call["arguments"])["city"] in ("Rome", "Oslo")
    kind = "response.function_call_arguments.delta"
    deltas = [event["delta"] for event in events if event["type"] == kind]
    assert "".join(deltas) == (call["arguments"] if stream else "")


def test_format_of_a_response_and_of_a_message(respond, message):
    text = {"format": FORMAT | {"name": "city", "strict": True}}
    body = respond(text=text, max_output_tokens=400)
    assert body["text"] == text
    parsed = message(output_config={"format": FORMAT}, max_tokens=400)
    for content in (body["output"][0]["content"], parsed["content"]):
        assert json.loads(content[0]["text"])["city"] in ("Rome", "Oslo")


WRONG_VALUES = (
    {"previous_response_id": "resp_1", "conversation": "c", "background": True, "include": ["a"]}
    | {"max_output_tokens": 0, "temperature": -1, "truncation": "some", "n": 2, "model": "other"}
    | {"evict": "nothing"}
)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"content": "a"}]}, "input.0.role"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        *(({name: value}, name) for name, value in WRONG_VALUES.items()),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [{"type": "function", **TOOL, "strict": "yes"}]}, "tools.0.strict"),
        ({"metadata": {"a": [float("nan")]}}, "metadata.a.0"),
        ({"metadata": {"\ud800": "a"}}, "metadata.\\ud800"),
        ({"text": {"format": 5}}, "text.format"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ],
)
def test_wrong_body_of_a_response_is_refused(post, body, param):
    response = post(RESPONSES, **{"input": "a"} | body)
    error = error_of(response, 404 if param == "model" else 400)
    assert (error["param"] or "").startswith(param), response.text


# ---- messages ------------------------------------------------------------------------------------


def test_message_has_the_text_of_the_chat_and_names_its_stop_sequence(message, chat):
    body, text = message(temperature=0), text_of(chat(max_tokens=5, temperature=0))
    assert body["content"] == [{"type": "text", "text": text}]
    assert (body["type"], body["role"]) == ("message", "assistant")
    assert (body["stop_reason"], body["usage"]["output_tokens"]) == ("max_tokens", 5)
    assert body["id"].startswith("msg_")
    stop = message(temperature=0, max_tokens=12)["content"][0]["text"].split()[2]
    body = message(temperature=0, max_tokens=12, stop_sequences=[stop])
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", stop)


@pytest.mark.parametrize("system", ["Be kind.", [{"type": "text", "text": "Be kind."}]])
def test_system_and_blocks_are_the_messages_of_a_chat(message, chat, system):
    blocks = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    found = message(system=system, messages=[{"role": "user", "content": blocks}])
    begin = {"role": "system", "content": "Be kind."}
    expected = chat(messages=[begin, {"role": "user", "content": "Hi there"}])
    assert found["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]


def test_stream_of_a_message(post, message):
    found = events_of(post(MESSAGES, messages=[USER], max_tokens=5, temperature=0, stream=True))

    kinds = [event["type"] for event in found]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(e["delta"]["text"] for e in found if e["type"] == "content_block_delta")
    assert text == message(temperature=0)["content"][0]["text"]
    assert found[-2]["delta"]["stop_reason"] == "max_tokens"
    assert found[-2]["usage"]["output_tokens"] == 5


@pytest.mark.parametrize(
    ("interval", "options"),
    [(1, {}), (4, {}), (1, {"best_of": 2}), (1, {"use_beam_search": True, "beam_width": 2})],
)
def test_input_tokens_of_a_message_sum_to_its_prompt(send, interval, options):
    """From the first event on, without and with a prefix in the cache."""
    text = f"{interval} {' '.join(options)} boats sail on " * 9
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 5, "ignore_eos": True}
    whole, streamed = {"json": body | options}, {"json": body | options | {"stream": True}}
    counted, *streams, last = send(
        ("POST", f"{MESSAGES}/count_tokens", whole),
        *[("POST", MESSAGES, streamed)] * 2,
        ("POST", MESSAGES, whole),
        stream_interval=interval,
    )

    usages, num_output = [last.json()["usage"]], last.json()["usage"]["output_tokens"]
    for stream in streams:
        begin, *_, delta, _ = events_of(stream)
        usages += [begin["message"]["usage"], delta["usage"]]
        assert 0 < usages[-2]["output_tokens"] <= usages[-1]["output_tokens"] == num_output
    kinds = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    num_tokens = counted.json()["input_tokens"]
    assert [sum(usage[kind] for kind in kinds) for usage in usages] == [num_tokens] * 5
    cached = [usage["cache_read_input_tokens"] for usage in usages]
    assert cached[1:3] == [0, 0]
    assert cached[0] == cached[3] == cached[4] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_tool_use_of_a_message(post, stream):
    tools = [{"name": "weather", "description": "d", "input_schema": SCHEMA}]
    choice = {"type": "tool", "name": "weather"}
    options = {"max_tokens": 60, "tools": tools, "tool_choice": choice, "stream": stream}
    response = post(MESSAGES, messages=[USER], **options)
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
        *(('{"a": NaN}', {}), ('{"a": 1e999}', {}), ('{"a": ' + "[" * 100_000, {})),
        (r'{"a": "\ud800"}', {"a": "\ud800"}),
    ],
)
def test_arguments_that_a_model_wrote_can_be_sent(arguments, expected):
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    usage = {"prompt_tokens": 1, "completion_tokens": 1}
    usage["prompt_tokens_details"] = {"cached_tokens": 0}
    choice = {"message": {"content": None, "tool_calls": [call]}, "finish_reason": "tool_calls"}
    chat = {"id": "msg_1", "model": "m", "created": 0, "choices": [choice | {"stop_reason": None}]}

    sent = one_line(MessagesFormat(()).whole(chat | {"usage": usage})).encode()
    assert [block["input"] for block in json.loads(sent)["content"]] == [expected]


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


def test_key_of_anthropics_clients(send):
    body = {"messages": [USER], "max_tokens": 1}
    headers = ({}, {"x-api-key": "wrong-key"}, {"x-api-key": "sk-a-2f0c77d1"})
    calls = [("POST", MESSAGES, {"json": body, "headers": each}) for each in headers]
    answers = send(*calls, tenant_keys=TenantKeys({"a": ("sk-a-2f0c77d1",)}))
    assert [answer.status_code for answer in answers] == [401, 401, 200]
    assert answers[0].json()["error"]["type"] == "authentication_error"
