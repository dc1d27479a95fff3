"""Lines of a batch: what is a request, what is an error, and what nobody may drop silently."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cli.batch_io import BatchError, BatchLine, LineFormat, parse_line
from quire.config.generation_request import GenerationRequest

PLAIN = LineFormat()
COMPLETION = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"model": "m", "prompt": "Hi", "max_tokens": 3},
}
CHAT = {
    "custom_id": "b",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 4},
}


def parse(value: object, form: LineFormat = PLAIN, number: int = 3):
    return parse_line(json.dumps(value).encode(), number, form)


def refusal(value: object, form: LineFormat = PLAIN) -> BatchError:
    with pytest.raises(BatchError) as caught:
        parse(value, form)
    return caught.value


def outcome(raw: bytes, number: int) -> BatchLine | BatchError:
    try:
        return parse_line(raw, number, PLAIN)
    except BatchError as error:
        return error


def test_a_line_says_which_of_its_tokens_stay():
    line = parse({"prompt": "Hi", "evict": "h2o:cap=512", "record_evictions": True})

    assert line.options == {"evict": "h2o:cap=512", "record_evictions": True}
    assert line.sampling == {}
    assert parse({"prompt": "Hi", "evict": None}).options == {}


@pytest.mark.parametrize("member", [{"evict": 3}, {"record_evictions": "yes"}])
def test_what_says_so_has_its_type(member):
    [name] = member

    assert f"expected {name} to be " in str(refusal({"prompt": "Hi", **member}))


def test_a_plain_line_is_a_prompt_and_options():
    line = parse({"id": "x", "prompt": "Hi", "max_tokens": 5, "stop": ["."], "seed": None})

    assert (line.head.number, line.head.kind, line.head.name) == (3, "plain", "x")
    assert (line.prompt, line.messages) == ("Hi", None)
    assert line.sampling == {"max_tokens": 5, "stop": ["."]}


def test_a_completion_of_openais_format():
    line = parse(COMPLETION)

    assert (line.head.kind, line.head.name, line.prompt) == ("completions", "a", "Hi")
    assert line.sampling == {"max_tokens": 3}


@pytest.mark.parametrize(("salt", "read"), [("mine", "mine"), ("", ""), (None, "")])
def test_a_line_says_with_whom_it_shares_kv(salt, read):
    body = COMPLETION["body"] | {"cache_salt": salt}

    for line in (parse({"prompt": "Hi", "cache_salt": salt}), parse(COMPLETION | {"body": body})):
        assert GenerationRequest("Hi", **line.options).cache_salt == read
    assert "expected cache_salt to be a text" in str(refusal({"prompt": "Hi", "cache_salt": ["x"]}))


def test_a_line_says_its_place_in_line():
    body = COMPLETION["body"] | {"priority": 2, "deadline_s": 3}

    for line in (parse({"prompt": "Hi", **body}), parse(COMPLETION | {"body": body})):
        assert line.options == {"priority": 2, "deadline_s": 3.0}
    assert parse(COMPLETION).options == {}
    for key, wrong in {"priority": 0.5, "deadline_s": "soon"}.items():
        for value in (wrong, True):
            assert f"expected {key} to be a" in str(refusal({"prompt": "Hi", key: value}))


def test_a_chat_of_openais_format():
    line = parse(CHAT)

    assert line.head.kind == "chat"
    assert line.messages == [{"role": "user", "content": "Hi"}]
    assert line.sampling == {"max_tokens": 4}


def test_text_parts_of_a_message_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    line = parse({"messages": [{"role": "user", "content": parts}]})

    assert line.messages == [{"role": "user", "content": "ab"}]


def test_a_prompt_may_be_token_ids_and_gets_no_prefix():
    assert parse({"prompt": [1, 2]}, LineFormat(prefix="P")).prompt == [1, 2]


def test_a_prefix_stands_before_every_text_prompt():
    assert parse({"prompt": "Hi"}, LineFormat(prefix="<|doc|>")).prompt == "<|doc|>Hi"
    assert parse(COMPLETION, LineFormat(prefix="<|doc|>")).prompt == "<|doc|>Hi"


def test_with_a_prompt_key_lines_are_data_rows():
    row = {"question": "Why?", "answer": "So.", "seed": "not an option", "id": 7}

    line = parse(row, LineFormat(prompt_key="question"))

    assert (line.prompt, line.sampling, line.head.name) == ("Why?", {}, "7")


def test_a_data_row_without_its_key_is_refused():
    assert "question" in str(refusal({"prompt": "x"}, LineFormat(prompt_key="question")))


def test_a_byte_order_mark_may_open_the_file():
    raw = b"\xef\xbb\xbf" + b'{"prompt": "x"}\n'

    assert parse_line(raw, 1, PLAIN).prompt == "x"


def test_keys_of_a_logit_bias_become_token_ids():
    assert parse({"prompt": "x", "logit_bias": {"7": 1.5}}).sampling == {"logit_bias": {7: 1.5}}


@pytest.mark.parametrize(
    "member",
    [
        {"stream": False},
        {"echo": False},
        {"logprobs": False},
        {"response_format": {"type": "text"}},
        {"user": "me"},
        {"metadata": {"a": "b"}},
        {"top_p": None},
        {"tools": []},
        {"modalities": ["text"]},
        {"parallel_tool_calls": True},
        {"no_repeat_ngram_size": 0},
        {"typical_p": 1.0},
        {"evcit": None},
    ],
)
def test_members_that_ask_for_nothing_are_accepted(member):
    body = COMPLETION["body"] | member

    assert parse(COMPLETION | {"body": body}).sampling == {"max_tokens": 3}


@pytest.mark.parametrize(
    "member",
    [
        {"stream": True},
        {"echo": True},
        {"logprobs": 0},
        {"logprobs": True},
        {"suffix": "x"},
        {"response_format": {"type": "json_object"}},
        {"tools": [{"type": "function"}]},
        {"max_token": 3},
        {"no_repeat_ngram_size": 3},
        {"stream_options": {"include_usage": True}},
        {"messages": [{"role": "user", "content": "x"}]},
    ],
)
def test_members_that_would_be_dropped_are_refused_by_name(member):
    error = refusal(COMPLETION | {"body": COMPLETION["body"] | member})

    assert next(iter(member)) in str(error)
    assert (error.head.number, error.head.name) == (3, "a")


def test_openais_newer_name_goes_first():
    both = {"max_tokens": 5, "max_completion_tokens": 7}

    for body in (both, dict(reversed(both.items()))):
        assert parse({"prompt": "Hi", **body}).sampling == {"max_tokens": 7}


@pytest.mark.parametrize("prompts", [["a", "b"], [[1, 2], [3]], [[4]]])
def test_a_completion_may_have_several_prompts(prompts):
    line = parse(COMPLETION | {"body": {"prompt": prompts}})

    assert list(line.prompts) == prompts


@pytest.mark.parametrize("prompts", [["a", ""], [[1], []], ["a", 5], ["a", [1]], [[1], [True]]])
def test_each_of_several_prompts_is_checked(prompts):
    assert "expected a prompt" in str(refusal(COMPLETION | {"body": {"prompt": prompts}}))


def test_a_plain_line_has_one_prompt():
    assert "write one line per prompt" in str(refusal({"prompt": ["a", "b"]}))


def test_a_wrong_member_offers_the_nearest():
    assert "max_tokens" in str(refusal({"prompt": "x", "max_token": 1}))


@pytest.mark.parametrize(
    "value",
    [
        7,
        [],
        None,
        {},
        {"prompt": ""},
        {"prompt": []},
        {"prompt": ["a", "b"]},
        {"prompt": [1, True]},
        {"prompt": 5},
        {"prompt": "x", "messages": []},
        {"messages": []},
        {"messages": "hi"},
        {"messages": ["hi"]},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"id": [1], "prompt": "x"},
        {"id": True, "prompt": "x"},
        COMPLETION | {"url": "/v1/embeddings"},
        COMPLETION | {"url": ["/v1/completions"]},
        COMPLETION | {"method": "GET"},
        COMPLETION | {"custom_id": 5},
        COMPLETION | {"custom_id": ""},
        COMPLETION | {"body": "x"},
        {"custom_id": "a", "url": "/v1/completions"},
        CHAT | {"body": {"prompt": "x"}},
    ],
)
def test_what_is_no_request_is_refused_with_its_line(value):
    assert refusal(value).head.number == 3


def test_an_error_in_a_chat_is_answered_like_a_chat():
    error = refusal(CHAT | {"body": {"messages": []}})

    assert (error.head.kind, error.head.name) == ("chat", "b")


@given(raw=st.binary(max_size=60))
def test_any_bytes_are_a_request_or_a_refusal(raw: bytes):
    assert outcome(raw, 2).head.number == 2


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
names = st.sampled_from(
    ["prompt", "messages", "id", "custom_id", "url", "method", "body", "max_tokens", "logit_bias"]
)


@given(value=st.dictionaries(names, json_values))
def test_any_object_is_a_request_or_a_refusal(value: dict):
    found = outcome(json.dumps(value).encode(), 3)

    assert found.head.number == 3
    if isinstance(found, BatchLine):
        assert (found.prompt is None) != (found.messages is None)


def test_a_broken_line_is_placed_within_itself():
    with pytest.raises(BatchError, match=r"not JSON: Expecting value at character 13$"):
        parse_line(b'{"prompt": \n', 7, PLAIN)


def test_json_nested_without_end_is_refused():
    with pytest.raises(BatchError, match="not JSON"):
        parse_line(b"[" * 200_000, 1, PLAIN)


@pytest.mark.parametrize(
    ("field", "hint"),
    [("top_logprobs", "leave it out"), ("n_probs", "leave it out"), ("max_new_tokens", "max_tok")],
)
def test_a_hint_names_only_fields_that_a_batch_reads(field, hint):
    assert hint in str(refusal({"prompt": "x", field: 3}))


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0}, {"temperature": 0.0}),
        ({"do_sample": True, "temperature": 0.5}, {"temperature": 0.5}),
        ({"do_sample": None}, {}),
    ],
)
def test_do_sample_false_is_temperature_0(members, expected):
    assert parse({"prompt": "a"} | members).sampling == expected


@pytest.mark.parametrize("members", [{"do_sample": False, "temperature": 0.7}, {"do_sample": 0}])
def test_do_sample_that_says_two_things_is_refused(members):
    with pytest.raises(BatchError, match="do_sample"):
        parse({"prompt": "a"} | members)


@pytest.mark.parametrize(
    ("value", "kind"), [(None, "null"), (True, "true"), (3, "3"), ("x", '"x"'), ([1], "a list")]
)
def test_a_line_that_is_no_object_is_named_in_the_words_of_json(value, kind):
    assert str(refusal(value)).endswith(kind)
