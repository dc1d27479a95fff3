"""Prompts of chats in every API: contents, continued messages, turns, and calls that come back."""

import json

import pytest

from quire.batch.lines import BatchError, LineFormat, parse_line
from serve.conftest import refused

CHATS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{% if p.type == 'text' %}"
    "{{ p.text }}{% endif %}{% endfor %}</{{ m.role }}>{% endfor %}"
)
TURNS = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.id }} {{ c.function.name }} "
    "{{ c.function.arguments | tojson }}>{% endfor %}{{ m.tool_call_id }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
)
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
USER = {"role": "user", "content": "count to five"}
TOOL = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}},
}


@pytest.fixture
def template(llm, monkeypatch):
    """Set the chat template of the model."""
    return lambda text: monkeypatch.setattr(llm.model.tokenizer, "chat_template", text)


@pytest.fixture
def text_of(post, llm):
    """The prompt of a chat, by /tokenize."""

    def tokenize(messages, **options):
        response = post("/tokenize", messages=messages, **options)
        assert response.status_code == 200, response.text
        return llm.model.tokenizer.decode(response.json()["tokens"])

    return tokenize


def part(text, kind="text"):
    return {"type": kind, "text": text}


def prompt_tokens(response):
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    cached = usage.get("cache_read_input_tokens", 0)
    return usage["prompt_tokens"] if "prompt_tokens" in usage else usage["input_tokens"] + cached


# ---- contents ------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["what is two plus two", "user", "a"])
def test_template_of_parts_gets_the_text_in_every_api(template, text_of, post, llm, text):
    template(PARTS)
    expected = f"<user>{text}</user>"
    count = len(llm.encode(expected))

    for content in (text, [part(text)]):
        chat = [{"role": "user", "content": content}]
        line = parse_line(json.dumps({"messages": chat}).encode(), 1, LineFormat())
        assert text_of(chat) == expected
        assert llm.model.tokenizer.decode(llm.encode_chat(chat)) == expected
        assert llm.encode_chat(line.messages) == llm.encode_chat(chat)
        assert prompt_tokens(post(CHATS, messages=chat, max_tokens=1)) == count
        assert prompt_tokens(post(MESSAGES, messages=chat, max_tokens=1)) == count
        counted = post(f"{MESSAGES}/count_tokens", messages=chat).json()
        assert counted == {"input_tokens": count}
    items = [{"role": "user", "content": [part(text, "input_text")]}]
    for value in (text, items):
        assert prompt_tokens(post(RESPONSES, input=value, max_output_tokens=1)) == count


def test_message_whose_text_vanishes_is_refused_in_every_api(template, post, llm):
    template(NO_SYSTEM)
    system = {"role": "system", "content": "Be brief."}
    chat = [system, USER]
    instructed = {"instructions": "Be brief.", "input": "Hi"}
    item = {"role": "developer", "content": "Be brief."}

    for path in (CHATS, "/tokenize"):
        assert "role 'system'" in refused(post(path, messages=chat), "messages.0")
    refused(post(RESPONSES, **instructed), "instructions")
    message = refused(post(RESPONSES, input=[USER, item]), "input.1")
    assert message.startswith("the text of input.1 (role 'system') does not appear in the prompt")
    body = {"messages": [USER], "system": "Be brief.", "max_tokens": 1}
    assert "the text of system (" in refused(post(MESSAGES, **body), "none")
    assert "the text of system (" in refused(post(f"{MESSAGES}/count_tokens", **body), "none")


def test_later_message_that_vanishes_is_named_by_its_field(template, post):
    template("{{ messages[0].content }}{{ messages[1].content }}")
    turns = [USER, USER, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "w"}]

    message = refused(post(MESSAGES, messages=turns, max_tokens=1), "none")

    assert "the text of messages.3 (role 'user')" in message


@pytest.mark.parametrize("stream", [False, True])
def test_forced_form_that_the_template_does_not_read_is_refused(
    template, llm, post, monkeypatch, stream
):
    template(PARTS)
    monkeypatch.setattr(llm, "content_format", "string")

    response = post(CHATS, messages=[USER], max_tokens=1, stream=stream)

    message = refused(response, "messages.0")
    assert "set --chat-template-content-format to auto or openai (now string)" in message


# ---- continued messages --------------------------------------------------------------------------

BEGUN = [USER, {"role": "assistant", "content": "1, 2,"}]
CONTINUED = "[user] count to five[end][assistant] 1, 2,"


@pytest.mark.parametrize("content", ["1, 2,", [part("1, "), part("2,")]])
def test_last_message_of_the_assistant_is_continued(template, post, llm, content):
    template(TURNS)
    turns = [USER, {"role": "assistant", "content": content}]
    expected = post(
        "/v1/completions", prompt=CONTINUED, max_tokens=5, temperature=0, ignore_eos=True
    ).json()

    body = {"messages": turns, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    response = post(MESSAGES, **body)

    assert prompt_tokens(response) == expected["usage"]["prompt_tokens"]
    assert response.json()["content"][0]["text"] == expected["choices"][0]["text"]
    counted = post(f"{MESSAGES}/count_tokens", messages=turns).json()
    assert counted["input_tokens"] == expected["usage"]["prompt_tokens"]


def test_chat_continues_its_final_message_on_request(template, post, text_of):
    template(TURNS)
    options = {"add_generation_prompt": False, "continue_final_message": True}
    body = {"messages": BEGUN, "max_tokens": 5, "temperature": 0, "seed": 1}

    continued = post(CHATS, **body, **options)

    assert text_of(BEGUN, **options) == CONTINUED
    assert text_of(BEGUN) == f"{CONTINUED}[end][assistant] "
    expected = post("/v1/completions", prompt=CONTINUED, max_tokens=5, temperature=0).json()
    message = continued.json()["choices"][0]["message"]
    assert message["content"] == expected["choices"][0]["text"]
    for path in (CHATS, "/tokenize"):
        wrong = post(path, messages=BEGUN, continue_final_message=True)
        assert "`add_generation_prompt`" in refused(wrong, "continue_final_message")


@pytest.mark.parametrize("content", ["", [], [part("")], [{"type": "thinking", "thinking": "a"}]])
def test_empty_last_message_begins_a_new_one(template, post, content):
    template(TURNS)

    body = {"messages": [USER, {"role": "assistant", "content": content}], "max_tokens": 1}

    assert prompt_tokens(post(MESSAGES, **body)) == prompt_tokens(
        post(MESSAGES, messages=[USER], max_tokens=1)
    )


@pytest.mark.parametrize(
    ("content", "fields", "text"),
    [
        ("1, 2, ", {}, "final assistant content cannot end with trailing whitespace"),
        ("\n", {}, "final assistant content cannot end with trailing whitespace"),
        ([part("1,"), part("\n")], {}, "final assistant content cannot end with"),
        ([{"type": "tool_use", "id": "t", "name": "f", "input": {}}], {}, "`tool_result`"),
        ("1,", {"tool_choice": {"type": "any"}}, "a forced call cannot continue"),
        ("1,", {"tool_choice": {"type": "tool", "name": "f"}}, "a forced call cannot continue"),
        ("1,", {"thinking": {"type": "enabled", "budget_tokens": 2000}}, "`thinking`"),
    ],
)
@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
def test_last_message_that_cannot_be_continued_is_refused(post, path, content, fields, text):
    turns = [USER, {"role": "assistant", "content": content}]
    tools = [{"name": "f", "input_schema": {"type": "object"}}]

    response = post(path, messages=turns, max_tokens=4, tools=tools, **fields)
    assert text in refused(response, "none")


# ---- turns ---------------------------------------------------------------------------------------


def test_consecutive_messages_of_a_role_are_one_turn(template, post, text_of):
    def of(role, *contents):
        return [{"role": role, "content": content} for content in contents]

    template(STRICT)
    turns = [
        *of("user", "one", [part("two")], ""),
        *of("assistant", "three", "four"),
        *of("user", [part("fi"), part("ve")], "six"),
    ]
    chat = [
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": "three\nfour"},
        {"role": "user", "content": "five\nsix"},
    ]

    response = post(MESSAGES, messages=turns, max_tokens=1)

    assert prompt_tokens(response) == prompt_tokens(post(CHATS, messages=chat, max_tokens=1))


def test_results_of_tools_in_consecutive_messages_come_first(template, post, text_of):
    template(TURNS)
    uses = [{"type": "tool_use", "id": i, "name": "f", "input": {"a": 1}} for i in ("t1", "t2")]
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": [part("o"), part("ne")]},
        {"type": "tool_result", "tool_use_id": "t2", "content": None},
    ]
    turns = [
        USER,
        {"role": "assistant", "content": "I call."},
        {"role": "assistant", "content": uses},
        {"role": "user", "content": [part("Go on."), results[0]]},
        {"role": "user", "content": [results[1]]},
    ]
    text = (
        '[user] count to five[end][assistant] I call.<t1 f {"a": 1}><t2 f {"a": 1}>[end]'
        "[tool] onet1[end][tool] t2[end][user] Go on.[end][assistant] "
    )

    counted = post(f"{MESSAGES}/count_tokens", messages=turns).json()["input_tokens"]

    assert counted == post("/tokenize", prompt=text).json()["count"]


# ---- calls that come back ------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [3, 80])
@pytest.mark.parametrize("parts", [False, True])
def test_calls_of_a_chat_are_accepted_in_its_history(
    template, post, text_of, llm, max_tokens, parts
):
    """Also calls that ended early, whose arguments are no JSON; in batch and in Python."""
    template(TURNS)
    named = {"type": "function", "function": {"name": "weather"}}
    options = {"tools": [{"type": "function", "function": TOOL}], "tool_choice": named}
    message = post(CHATS, messages=[USER], max_tokens=max_tokens, **options).json()
    message = message["choices"][0]["message"]
    [call] = message["tool_calls"]
    result = [part("21 "), part("C")] if parts else "21 C"

    without_content = {key: value for key, value in message.items() if key != "content"}
    for answer in (message, message | {"content": ""}, without_content):
        history = [
            USER,
            answer,
            {"role": "tool", "tool_call_id": call["id"], "content": result},
        ]
        text = text_of(history)
        assert f"<{call['id']} weather " in text
        assert f"[tool] 21 C{call['id']}[end][assistant] " in text
        assert post(CHATS, messages=history, max_tokens=1).status_code == 200
        line = parse_line(json.dumps({"messages": history}).encode(), 1, LineFormat())
        assert llm.model.tokenizer.decode(llm.encode_chat(line.messages)) == text


@pytest.mark.parametrize("output", ["21 C", [part("21 ", "input_text"), part("C", "input_text")]])
def test_calls_of_a_response_are_accepted_in_its_input(template, post, output):
    template(TURNS)
    options = {
        "tools": [{"type": "function", **TOOL}],
        "tool_choice": {"type": "function", "name": "weather"},
    }
    first = post(RESPONSES, input="count to five", max_output_tokens=80, **options).json()
    [call] = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": output}

    items = [USER, *first["output"], result]
    response = post(RESPONSES, input=items, max_output_tokens=1)

    arguments = json.dumps(json.loads(call["arguments"]))
    text = (
        f"[user] count to five[end][assistant] <{call['call_id']} weather {arguments}>[end]"
        f"[tool] 21 C{call['call_id']}[end][assistant] "
    )
    assert prompt_tokens(response) == post("/tokenize", prompt=text).json()["count"]


@pytest.mark.parametrize("max_tokens", [3, 80])
def test_calls_of_a_message_are_accepted_in_its_history(template, post, max_tokens):
    template(TURNS)
    tool = {"name": "weather", "input_schema": TOOL["parameters"]}
    options = {"tools": [tool], "tool_choice": {"type": "tool", "name": "weather"}}
    first = post(MESSAGES, messages=[USER], max_tokens=max_tokens, **options).json()
    [use] = first["content"]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": [part("21 C")]}
    turns = [
        USER,
        {"role": first["role"], "content": first["content"]},
        {"role": "user", "content": [result]},
    ]

    counted = post(f"{MESSAGES}/count_tokens", messages=turns).json()["input_tokens"]

    text = (
        f"[user] count to five[end][assistant] <{use['id']} weather {json.dumps(use['input'])}>"
        f"[end][tool] 21 C{use['id']}[end][assistant] "
    )
    assert counted == post("/tokenize", prompt=text).json()["count"]
    assert post(MESSAGES, messages=turns, max_tokens=1).status_code == 200


# ---- batch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "name": "ann", "content": "hi"}],
        [USER, {"role": "tool", "tool_call_id": "call_1", "content": "4"}],
        [
            USER,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": [part("4")]},
        ],
        [{"role": "user"}],
        [USER | {"contnet": "a"}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
    ],
)
@pytest.mark.parametrize("plain", [False, True])
def test_batch_and_server_read_the_same_messages(template, post, llm, messages, plain):
    template(TURNS.replace("{{ m.role }}", "{{ m.role }} {{ m.name }}"))
    body = {"messages": messages, "max_tokens": 1}
    line = body if plain else {"custom_id": "a", "method": "POST", "url": CHATS, "body": body}

    response = post(CHATS, **body)

    if response.status_code == 200:
        read = parse_line(json.dumps(line).encode(), 1, LineFormat()).messages
        assert len(llm.encode_chat(read)) == prompt_tokens(response)
    else:
        with pytest.raises(BatchError, match=r"messages\.0"):
            parse_line(json.dumps(line).encode(), 1, LineFormat())
