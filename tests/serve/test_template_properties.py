"""Chat templates with any messages and variables: a prompt or a refusal, never a server error."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ConfigError, RequestError
from quire.models.chat_template import ChatTemplate, with_chat_template
from serve.conftest import client_of

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
JSON_VALUES = VALUES.filter(lambda value: "nan" not in repr(value) and "inf" not in repr(value))
ROLES = st.sampled_from(["user", "assistant", "system", "tool", "developer"]) | st.text(max_size=6)
PARTS = st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=9)})
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": ROLES, "content": st.text(max_size=12) | st.lists(PARTS, max_size=2) | st.none()},
        optional={"name": st.text(max_size=5), "tool_calls": JSON_VALUES, "extra": JSON_VALUES},
    ),
    max_size=4,
)
PIECES = (
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{{ messages[0].role }}",
    "{{ messages[9].content }}",
    "{{ messages | tojson }}",
    "{{ level + 1 }}",
    "{{ 1 // level }}",
    "{{ raise_exception('no') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ self._TemplateReference__context }}",
    "{% set x = messages.append(1) %}",
    "{{ 'a' * 9 }}",
    "{{ '%s' | format(level) }}",
    "{{ tools }}",
    "{% if add_generation_prompt %}go{% endif %}",
    "{% for i in range(10 ** 9) %}{% endfor %}",
    "{% include 'x' %}",
    "{{ strftime_now('%Y') }}",
    "text {# comment #}",
)


def answered(llm, path, body):
    async def main():
        async with client_of(llm) as client:
            return await client.post(path, json=body)

    return asyncio.run(asyncio.wait_for(main(), 30))


@settings(max_examples=15)
@given(messages=MESSAGES, kwargs=st.dictionaries(st.text(max_size=6), JSON_VALUES, max_size=2))
def test_any_messages_get_a_prompt_or_a_refusal(llm, messages, kwargs):
    body = {"messages": messages, "chat_template_kwargs": kwargs}

    response = answered(llm, "/tokenize", body)

    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert response.json()["error"]["message"]
    else:
        assert response.json()["count"] == len(response.json()["tokens"])


@settings(max_examples=40)
@given(
    pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=4),
    messages=MESSAGES.filter(bool),
    level=JSON_VALUES,
)
def test_any_template_gives_a_prompt_or_an_error_of_quire(llm, pieces, messages, level):
    try:
        model = with_chat_template(llm.model, "".join(pieces) + "{{ '' }}")
        ids = ChatTemplate(model.tokenizer).encode(messages, template_kwargs={"level": level})
    except (ConfigError, RequestError):
        return

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
    messages = [{"role": "user", "content": "a"}]
    model = with_chat_template(llm.model, escape)

    with pytest.raises(RequestError):
        ChatTemplate(model.tokenizer).encode(messages)


@given(st.sampled_from(PIECES))
@settings(max_examples=len(PIECES))
def test_template_in_a_message_is_text(llm, piece):
    messages = [{"role": "user", "content": piece}]

    text = llm.model.tokenizer.decode(llm.encode_chat(messages))

    assert piece in text
