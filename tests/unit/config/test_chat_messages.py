"""The reader of messages: what templates get, and refusals with their field."""

import pytest

from quire.config.chat_messages import MAX_EXTRA_FIELDS, read_messages
from quire.errors import RequestError

USER = {"role": "user", "content": "Hi"}
TEXTS = [{"type": "text", "text": text} for text in "ab"]
PARTS = [TEXTS[0], TEXTS[1] | {"cache_control": {}}]
EMPTY = {"role": "assistant", "content": ""}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "4"}


def call_of(arguments):
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (USER, USER),
        (USER | {"name": "ann", "refusal": None, "x": [None]}, USER | {"name": "ann", "x": [None]}),
        (USER | {"tool_calls": []}, USER),
        (USER | {"content": PARTS}, USER | {"content": TEXTS}),
        ({"role": "assistant", "content": None, "tool_calls": None}, EMPTY),
        ({"role": "assistant"}, EMPTY),
        (RESULT, RESULT),
    ],
)
def test_message_is_read(message, expected):
    [found] = read_messages([message])
    assert found == expected
    assert read_messages([found]) == [found]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": [1]}', {"a": [1]}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ('{"a": "cut o', '{"a": "cut o'),  # an output that reached its maximum length
        ("[1]", "[1]"),
        ("{" * 100_000, "{" * 100_000),
    ],
)
def test_arguments_of_calls_are_objects_if_they_are_whole(arguments, expected):
    calls = [call_of("{}"), call_of(arguments)]
    [found] = read_messages([{"role": "assistant", "tool_calls": calls}])
    assert [c["function"]["arguments"] for c in found["tool_calls"]] == [{}, expected]
    assert read_messages([found]) == [found]


@pytest.mark.parametrize(
    ("message", "param", "text"),
    [
        (5, "", "an object with role"),
        ({"content": "a"}, ".role", "a role"),
        ({"role": 1, "content": "a"}, ".role", "got 1"),
        ({"role": "user"}, ".content", "got none"),
        ({"role": "system", "content": None}, ".content", "got none"),
        ({"role": "user", "content": 5}, ".content", "got 5"),
        ({"role": "user", "content": [5]}, ".content.0", "got 5"),
        ({"role": "user", "content": [{"type": "text"}]}, ".content.0", '"text"'),
        ({"role": "user", "content": [{"type": "image_url"}]}, ".content.0.type", "got image_url"),
        (USER | {"contnet": "a"}, ".contnet", "`content`"),
        ({"role": "assistant", "Con-tent": "a"}, ".Con-tent", "`content`"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, ".tool_calls", "a list"),
        ({"role": "assistant", "tool_calls": [1]}, ".tool_calls.0", "got 1"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, ".tool_calls.0", '"name"'),
        (EMPTY | {"tool_calls": [call_of(5)]}, ".tool_calls.0.function.arguments", "got 5"),
    ],
)
def test_wrong_message_is_refused_with_its_field(message, param, text):
    with pytest.raises(RequestError) as refused:
        read_messages([USER, message])
    assert refused.value.param == f"messages.1{param}"
    assert text in str(refused.value)


@pytest.mark.parametrize("messages", [None, "hi", 5, {}, []])
def test_no_list_of_messages_is_refused(messages):
    with pytest.raises(RequestError, match="expected"):
        read_messages(messages)


def test_too_many_names_of_other_fields_are_refused():
    messages = [USER | {f"field-{number}": 1} for number in range(MAX_EXTRA_FIELDS + 1)]
    with pytest.raises(RequestError, match="at most 64 unknown fields in messages, got 65"):
        read_messages(messages)
