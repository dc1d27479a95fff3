"""`chat_template_kwargs`: variables of the chat template set by a request."""

import pytest

from serve.conftest import refused

CHATS = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Once"}]
TEMPLATE = (
    "<|doc|>{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking %} Think{% endif %}"
    "{% if level %}{{ 10 // level }}{% endif %}"
    "{% if label %}{{ label + '!' }}{% endif %}"
    "{% if reasoning_effort %} effort {{ reasoning_effort }}{% endif %}"
)


@pytest.fixture
def text_of(serve, llm, monkeypatch):
    """The prompt text of a chat under a template with variables, by `/tokenize`."""
    monkeypatch.setattr(llm.model.tokenizer, "chat_template", TEMPLATE)

    def send(**kwargs):
        body = {"messages": MESSAGES, "chat_template_kwargs": kwargs}
        response = serve(lambda client: client.post("/tokenize", json=body))
        assert response.status_code == 200, response.text
        return llm.model.tokenizer.decode(response.json()["tokens"])

    return send


def prompt_tokens(response):
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens"]


def test_template_reads_the_variables_of_a_request(text_of):
    assert text_of() == "<|doc|>Once"
    assert text_of(enable_thinking=True) == "<|doc|>Once Think"
    assert text_of(enable_thinking=False, label="x", level=5) == "<|doc|>Once2x!"


def test_chat_and_tokenize_have_the_same_prompt(text_of, post, llm):
    options = {"max_tokens": 1, "chat_template_kwargs": {"enable_thinking": True}}

    with_variables = prompt_tokens(post(CHATS, messages=MESSAGES, **options))

    assert with_variables == len(llm.encode(text_of(enable_thinking=True)))
    assert with_variables > prompt_tokens(post(CHATS, messages=MESSAGES, max_tokens=1))


def test_template_that_reads_reasoning_effort_gets_it(text_of, post, llm):
    expected = len(llm.encode(text_of(reasoning_effort="high")))

    response = post(CHATS, messages=MESSAGES, max_tokens=1, reasoning_effort="high")

    assert prompt_tokens(response) == expected
    assert "x-ignored-fields" not in response.headers


def test_variable_overrides_the_field_of_the_same_name(text_of, post, llm):
    options = {"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": ""}}

    response = post(CHATS, messages=MESSAGES, max_tokens=1, **options)

    assert prompt_tokens(response) == len(llm.encode(text_of()))


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
def test_variables_refused_by_the_template_name_the_field(text_of, post, path, kwargs, message):
    param = "chat_template_kwargs" + (".label" if kwargs == {"label": "\ud800"} else "")

    assert message in refused(post(path, messages=MESSAGES, chat_template_kwargs=kwargs), param)


def test_messages_refused_by_the_template_name_messages(post, llm, monkeypatch):
    template = "{{ raise_exception('roles must alternate') }}{{ level }}"
    monkeypatch.setattr(llm.model.tokenizer, "chat_template", template)

    response = post(CHATS, messages=MESSAGES, chat_template_kwargs={"level": 1})

    assert "roles must alternate" in refused(response, "messages")


def test_variables_unused_by_the_template_are_unknown_fields(text_of, serve, caplog):
    options = {"chat_template_kwargs": {"enable_thinking": True, "thinking": True, "x" * 9000: 1}}
    body = {"messages": MESSAGES, "max_tokens": 1} | options

    warned = serve(lambda client: client.post(CHATS, json=body))
    strict = serve(lambda client: client.post(CHATS, json=body), unknown_fields="refuse")

    assert warned.status_code == 200, warned.text
    header = warned.headers["x-ignored-fields"]
    assert header.startswith("chat_template_kwargs.thinking, chat_template_kwargs.xxx")
    assert len(header) < 200
    assert f"ignored unknown fields: {header}" in caplog.text
    refused(strict, "chat_template_kwargs.thinking")


def test_empty_template_kwargs_have_no_effect(post):
    response = post(CHATS, messages=MESSAGES, max_tokens=1, chat_template_kwargs={})

    assert response.status_code == 200
    assert "x-ignored-fields" not in response.headers
