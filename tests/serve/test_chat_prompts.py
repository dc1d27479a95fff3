import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.batch.lines import BatchError, LineFormat, parse_line
from quire.errors import ConfigError, RequestError
from quire.models.chat_template import ChatTemplate, with_chat_template
from serve.conftest import CHATS, COMPLETIONS, MESSAGES, RESPONSES, ok, post_to, refused

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
USER, ONCE = ({"role": "user", "content": text} for text in ("count to five", "Once"))
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}}
TOOL = {"name": "weather", "parameters": SCHEMA}


@pytest.fixture
def template(llm, monkeypatch):
    return lambda text: monkeypatch.setattr(llm.model.tokenizer, "chat_template", text)


@pytest.fixture
def text_of(post, llm):
    def tokenize(messages, **options):
        body = ok(post("/tokenize", messages=messages, **options))
        return llm.model.tokenizer.decode(body["tokens"])

    return tokenize


def part(text, kind="text"):
    return {"type": kind, "text": text}


def of(role, *contents):
    return [{"role": role, "content": content} for content in contents]


def prompt_tokens(response):
    usage = ok(response)["usage"]
    cached = usage.get("cache_read_input_tokens", 0)
    return usage["prompt_tokens"] if "prompt_tokens" in usage else usage["input_tokens"] + cached


@pytest.fixture
def counted(post):
    """The number of prompt tokens of /v1/messages/count_tokens."""
    return lambda turns: ok(post(f"{MESSAGES}/count_tokens", messages=turns))["input_tokens"]


@pytest.fixture
def length(post):
    return lambda text: post("/tokenize", prompt=text).json()["count"]


# ---- contents ------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["what is two plus two", "user", "a"])
def test_template_of_parts_gets_the_text_in_every_api(template, text_of, post, llm, counted, text):
    template(PARTS)
    expected = f"<user>{text}</user>"
    count = len(llm.encode(expected))

    for content in (text, [part(text)]):
        chat = of("user", content)
        line = parse_line(json.dumps({"messages": chat}).encode(), 1, LineFormat())
        assert text_of(chat) == expected
        assert llm.model.tokenizer.decode(llm.encode_chat(chat)) == expected
        assert llm.encode_chat(line.messages) == llm.encode_chat(chat)
        for path in (CHATS, MESSAGES):
            assert prompt_tokens(post(path, messages=chat, max_tokens=1)) == count
        assert counted(chat) == count
    for value in (text, of("user", [part(text, "input_text")])):
        assert prompt_tokens(post(RESPONSES, input=value, max_output_tokens=1)) == count


def test_messages_that_vanish_or_are_refused_are_named_in_every_api(template, post):
    template("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}")
    chat = [*of("system", "Be brief."), USER]
    for path in (CHATS, "/tokenize"):
        assert "role 'system'" in refused(post(path, messages=chat), "messages.0")
    refused(post(RESPONSES, instructions="Be brief.", input="Hi"), "instructions")
    message = refused(post(RESPONSES, input=[USER, *of("developer", "Be brief.")]), "input.1")
    assert message.startswith("the text of input.1 (role 'system') does not appear in the prompt")
    body = {"messages": [USER], "system": "Be brief.", "max_tokens": 1}
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        assert "the text of system (" in refused(post(path, **body), "none")

    template("{{ messages[0].content }}{{ messages[1].content }}")
    turns = [USER, USER, *of("assistant", "yes"), *of("user", "w")]
    message = refused(post(MESSAGES, messages=turns, max_tokens=1), "none")
    assert "the text of messages.3 (role 'user')" in message
    template("{{ raise_exception('roles must alternate') }}{{ level }}")
    response = post(CHATS, messages=[ONCE], chat_template_kwargs={"level": 1})
    assert "roles must alternate" in refused(response, "messages")


@pytest.mark.parametrize("stream", [False, True])
def test_forced_form_that_the_template_does_not_read_is_refused(
    template, llm, post, monkeypatch, stream
):
    template(PARTS)
    monkeypatch.setattr(llm, "content_format", "string")
    message = refused(post(CHATS, messages=[USER], max_tokens=1, stream=stream), "messages.0")
    assert "set --chat-template-content-format to auto or openai (now string)" in message


# ---- continued messages --------------------------------------------------------------------------

GREEDY = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
CONTINUED = "[user] count to five[end][assistant] 1, 2,"


@pytest.mark.parametrize("content", ["1, 2,", [part("1, "), part("2,")]])
def test_last_message_of_the_assistant_is_continued(template, post, counted, content):
    template(TURNS)
    turns = [USER, *of("assistant", content)]
    expected = post(COMPLETIONS, prompt=CONTINUED, **GREEDY).json()
    response = post(MESSAGES, messages=turns, **GREEDY)
    assert response.json()["content"][0]["text"] == expected["choices"][0]["text"]
    assert prompt_tokens(response) == counted(turns) == expected["usage"]["prompt_tokens"]


def test_chat_continues_its_final_message_on_request(template, post, text_of):
    template(TURNS)
    begun = [USER, *of("assistant", "1, 2,")]
    options = {"add_generation_prompt": False, "continue_final_message": True}

    assert text_of(begun, **options) == CONTINUED
    assert text_of(begun) == f"{CONTINUED}[end][assistant] "
    expected = post(COMPLETIONS, prompt=CONTINUED, **GREEDY).json()["choices"][0]["text"]
    continued = ok(post(CHATS, messages=begun, **GREEDY, **options))
    assert continued["choices"][0]["message"]["content"] == expected
    for path in (CHATS, "/tokenize"):
        wrong = post(path, messages=begun, continue_final_message=True)
        assert "`add_generation_prompt`" in refused(wrong, "continue_final_message")


@pytest.mark.parametrize("content", ["", [], [part("")], [{"type": "thinking", "thinking": "a"}]])
def test_empty_last_message_begins_a_new_one(template, counted, content):
    template(TURNS)
    assert counted([USER, *of("assistant", content)]) == counted([USER])


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
def test_last_message_that_cannot_be_continued_is_refused(post, content, fields, text):
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    body = {"messages": [USER, *of("assistant", content)], "max_tokens": 4, "tools": tools} | fields
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        assert text in refused(post(path, **body), "none")


# ---- turns ---------------------------------------------------------------------------------------


def test_consecutive_messages_are_one_turn_with_results_of_tools_first(
    template, post, counted, length
):
    template(STRICT)
    turns = of("user", "one", [part("two")], "") + of("assistant", "three", "four")
    turns += of("user", [part("fi"), part("ve")], "six")
    chat = [*of("user", "one\ntwo"), *of("assistant", "three\nfour"), *of("user", "five\nsix")]
    assert counted(turns) == prompt_tokens(post(CHATS, messages=chat, max_tokens=1))

    template(TURNS)
    uses = [{"type": "tool_use", "id": i, "name": "f", "input": {"a": 1}} for i in ("t1", "t2")]
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": [part("o"), part("ne")]},
        {"type": "tool_result", "tool_use_id": "t2", "content": None},
    ]
    turns = [USER, *of("assistant", "I call.", uses)]
    turns += of("user", [part("Go on."), results[0]], [results[1]])
    text = (
        '[user] count to five[end][assistant] I call.<t1 f {"a": 1}><t2 f {"a": 1}>[end]'
        "[tool] onet1[end][tool] t2[end][user] Go on.[end][assistant] "
    )

    assert counted(turns) == length(text)


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
    body = ok(post(CHATS, messages=[USER], max_tokens=max_tokens, **options))
    message = body["choices"][0]["message"]
    [call] = message["tool_calls"]
    content = [part("21 "), part("C")] if parts else "21 C"
    result = {"role": "tool", "tool_call_id": call["id"], "content": content}

    without_content = {key: value for key, value in message.items() if key != "content"}
    for answer in (message, message | {"content": ""}, without_content):
        history = [USER, answer, result]
        text = text_of(history)
        assert f"<{call['id']} weather " in text
        assert f"[tool] 21 C{call['id']}[end][assistant] " in text
        assert post(CHATS, messages=history, max_tokens=1).status_code == 200
        line = parse_line(json.dumps({"messages": history}).encode(), 1, LineFormat())
        assert llm.model.tokenizer.decode(llm.encode_chat(line.messages)) == text


CALLED = "[user] count to five[end][assistant] <{} weather {}>[end][tool] 21 C{}[end][assistant] "


@pytest.mark.parametrize("output", ["21 C", [part("21 ", "input_text"), part("C", "input_text")]])
def test_calls_of_a_response_are_accepted_in_its_input(template, post, length, output):
    template(TURNS)
    tools, choice = [{"type": "function", **TOOL}], {"type": "function", "name": "weather"}
    options = {"tools": tools, "tool_choice": choice, "max_output_tokens": 80}
    [call] = post(RESPONSES, input="count to five", **options).json()["output"]
    call_id = call["call_id"]
    result = {"type": "function_call_output", "call_id": call_id, "output": output}

    response = post(RESPONSES, input=[USER, call, result], max_output_tokens=1)
    arguments = json.dumps(json.loads(call["arguments"]))
    assert prompt_tokens(response) == length(CALLED.format(call_id, arguments, call_id))


@pytest.mark.parametrize("max_tokens", [3, 80])
def test_calls_of_a_message_are_accepted_in_its_history(
    template, post, counted, length, max_tokens
):
    template(TURNS)
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    options = {"tools": tools, "tool_choice": {"type": "tool", "name": "weather"}}
    first = post(MESSAGES, messages=[USER], max_tokens=max_tokens, **options).json()
    [use] = first["content"]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": [part("21 C")]}
    turns = [USER, *of(first["role"], first["content"]), *of("user", [result])]

    text = CALLED.format(use["id"], json.dumps(use["input"]), use["id"])
    assert counted(turns) == length(text)
    assert post(MESSAGES, messages=turns, max_tokens=1).status_code == 200


# ---- batch ---------------------------------------------------------------------------------------


WRITTEN = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "name": "ann", "content": "hi"}],
        [USER, {"role": "tool", "tool_call_id": "call_1", "content": "4"}],
        [
            *(USER, {"role": "assistant", "content": None, "tool_calls": [WRITTEN]}),
            {"role": "tool", "tool_call_id": "c", "content": [part("4")]},
        ],
        [{"role": "user"}],
        [USER | {"contnet": "a"}],
        of("user", [{"type": "image_url"}]),
    ],
)
@pytest.mark.parametrize("plain", [False, True])
def test_batch_and_server_read_the_same_messages(template, post, llm, messages, plain):
    template(TURNS.replace("{{ m.role }}", "{{ m.role }} {{ m.name }}"))
    body = {"messages": messages, "max_tokens": 1}
    line = body if plain else {"custom_id": "a", "method": "POST", "url": CHATS, "body": body}
    response, line = post(CHATS, **body), json.dumps(line).encode()

    if response.status_code == 200:
        read = parse_line(line, 1, LineFormat()).messages
        assert len(llm.encode_chat(read)) == prompt_tokens(response)
    else:
        with pytest.raises(BatchError, match=r"messages\.0"):
            parse_line(line, 1, LineFormat())


# ---- `chat_template_kwargs`: variables of the template set by a request --------------------------

VARIABLES = (
    "<|doc|>{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking %} Think{% endif %}"
    "{% if level %}{{ 10 // level }}{% endif %}"
    "{% if label %}{{ label + '!' }}{% endif %}"
    "{% if reasoning_effort %} effort {{ reasoning_effort }}{% endif %}"
)


@pytest.fixture
def with_variables(template, text_of):
    """The prompt text of a chat under a template with variables."""
    template(VARIABLES)
    return lambda **kwargs: text_of([ONCE], chat_template_kwargs=kwargs)


def test_template_reads_the_variables_of_a_request(with_variables):
    assert with_variables() == "<|doc|>Once"
    assert with_variables(enable_thinking=True) == "<|doc|>Once Think"
    assert with_variables(enable_thinking=False, label="x", level=5) == "<|doc|>Once2x!"


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        ({"chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        # a variable overrides the field of the same name
        ({"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": ""}}, {}),
        ({"chat_template_kwargs": {}}, {}),
    ],
)
def test_chat_and_tokenize_have_the_same_prompt(with_variables, post, llm, options, variables):
    response = post(CHATS, messages=[ONCE], max_tokens=1, **options)
    assert prompt_tokens(response) == len(llm.encode(with_variables(**variables)))
    assert "x-ignored-fields" not in response.headers


@pytest.mark.parametrize("path", [CHATS, "/tokenize"])
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"level": "x"}, "unsupported operand"),
        ({"level": -0.0001, "label": 3}, "unsupported operand"),
        ({"level": [1]}, "unsupported operand"),
        ({"label": "\ud800"}, "not Unicode"),
        ({"chat_template": "{{ 1 }}"}, "cannot contain 'chat_template'"),
        ({"tokenize": True}, "cannot contain 'tokenize'"),
        ({"messages": []}, "cannot contain 'messages'"),
        ({"tools": [{}]}, "cannot contain 'tools'"),
        (["enable_thinking"], "expected a JSON object"),
        ({f"x{number}": 1 for number in range(65)}, "at most 64"),
    ],
)
def test_variables_refused_by_the_template_name_the_field(
    with_variables, post, path, kwargs, message
):
    param = "chat_template_kwargs" + (".label" if kwargs == {"label": "\ud800"} else "")
    assert message in refused(post(path, messages=[ONCE], chat_template_kwargs=kwargs), param)


def test_variables_unused_by_the_template_are_unknown_fields(with_variables, send, caplog):
    options = {"chat_template_kwargs": {"enable_thinking": True, "thinking": True, "x" * 9000: 1}}
    call = ("POST", CHATS, {"json": {"messages": [ONCE], "max_tokens": 1} | options})
    [warned], [strict] = send(call), send(call, unknown_fields="refuse")

    assert warned.status_code == 200, warned.text
    header = warned.headers["x-ignored-fields"]
    assert header.startswith("chat_template_kwargs.thinking, chat_template_kwargs.xxx")
    assert len(header) < 200
    assert f"ignored unknown fields: {header}" in caplog.text
    refused(strict, "chat_template_kwargs.thinking")


# ---- any messages and variables: a prompt or a refusal, never a server error ---------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
JSON_VALUES = VALUES.filter(lambda value: "nan" not in repr(value) and "inf" not in repr(value))
ROLES = st.sampled_from(["user", "assistant", "system", "tool", "developer"]) | st.text(max_size=6)
ANY_PARTS = st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=9)})
ANY_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": ROLES,
            "content": st.text(max_size=12) | st.lists(ANY_PARTS, max_size=2) | st.none(),
        },
        optional={"name": st.text(max_size=5), "tool_calls": JSON_VALUES, "extra": JSON_VALUES},
    ),
    max_size=4,
)
PIECES = (
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    *("{{ messages[0].role }}", "{{ messages[9].content }}", "{{ messages | tojson }}"),
    *("{{ level + 1 }}", "{{ 1 // level }}", "{{ raise_exception('no') }}"),
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    *("{{ self._TemplateReference__context }}", "{% set x = messages.append(1) %}"),
    *("{{ 'a' * 9 }}", "{{ '%s' | format(level) }}", "{{ tools }}"),
    *("{% if add_generation_prompt %}go{% endif %}", "{% for i in range(10 ** 9) %}{% endfor %}"),
    *("{% include 'x' %}", "{{ strftime_now('%Y') }}", "text {# comment #}"),
)


@settings(max_examples=15)
@given(messages=ANY_MESSAGES, kwargs=st.dictionaries(st.text(max_size=6), JSON_VALUES, max_size=2))
def test_any_messages_get_a_prompt_or_a_refusal(llm, messages, kwargs):
    response = post_to(llm, "/tokenize", {"messages": messages, "chat_template_kwargs": kwargs})

    assert response.status_code in (200, 400), response.text
    found = response.json()
    if response.status_code == 400:
        assert found["error"]["message"]
    else:
        assert found["count"] == len(found["tokens"])


@settings(max_examples=40)
@given(
    pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=4),
    messages=ANY_MESSAGES.filter(bool),
    level=JSON_VALUES,
)
def test_any_template_gives_a_prompt_or_an_error_of_quire(llm, pieces, messages, level):
    with suppress(ConfigError, RequestError):
        model = with_chat_template(llm.model, "".join(pieces) + "{{ '' }}")
        ids = ChatTemplate(model.tokenizer).encode(messages, template_kwargs={"level": level})
        assert isinstance(ids, list)


@pytest.mark.parametrize(
    "escape",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.__class__.__base__ }}x",
        "{{ lipsum.__globals__['os'] }}",
    ],
)
def test_template_cannot_reach_python(llm, escape):
    template = ChatTemplate(with_chat_template(llm.model, escape).tokenizer)
    with pytest.raises(RequestError):
        template.encode([{"role": "user", "content": "a"}])


def test_template_in_a_message_is_text(llm):
    for piece in PIECES:
        ids = llm.encode_chat([{"role": "user", "content": piece}])
        assert piece in llm.model.tokenizer.decode(ids)
