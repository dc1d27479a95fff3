import json
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion

from quire import GenerationRequest, StructuredOutputs
from quire.batch.lines import BatchError, BatchLine, LineFormat, LineHead, parse_line
from quire.batch.records import BatchTally, error_record, is_error, output_record
from quire.sampling.outputs import Choice, RequestOutput, Usage, merged
from quire.serve.responses import usage_body

PLAIN = LineFormat()
HI = [{"role": "user", "content": "Hi"}]
COMPLETION = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
COMPLETION["body"] = {"model": "m", "prompt": "Hi", "max_tokens": 3}
CHAT = {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions"}
CHAT["body"] = {"messages": HI, "max_completion_tokens": 4}


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


def test_line_has_prompt_and_options():
    line = parse({"id": "x", "prompt": "Hi", "max_tokens": 5, "stop": ["."], "seed": None})
    assert (line.head.number, line.head.kind, line.head.name) == (3, "plain", "x")
    assert (line.prompt, line.messages) == ("Hi", None)
    assert line.sampling == {"max_tokens": 5, "stop": ["."]}

    line = parse(COMPLETION)
    assert (line.head.kind, line.head.name, line.prompt) == ("completions", "a", "Hi")
    assert line.sampling == {"max_tokens": 3}

    line = parse(CHAT)
    assert (line.head.kind, line.messages, line.sampling) == ("chat", HI, {"max_tokens": 4})
    error = refusal(CHAT | {"body": {"messages": []}})
    assert (error.head.kind, error.head.name) == ("chat", "b")
    assert parse_line(b"\xef\xbb\xbf" + b'{"prompt": "x"}\n', 1, PLAIN).prompt == "x"
    assert parse({"prompt": "x", "logit_bias": {"7": 1.5}}).sampling == {"logit_bias": {7: 1.5}}


RECORDED = {"evict": "h2o:cap=512", "record_evictions": True}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (RECORDED, RECORDED),
        ({"evict": None}, {}),
        ({"priority": 2, "deadline_s": 3}, {"priority": 2, "deadline_s": 3.0}),
        ({}, {}),
    ],
)
def test_line_sets_options_of_the_request(given, expected):
    body = COMPLETION["body"] | given

    for line in (parse({"prompt": "Hi"} | body), parse(COMPLETION | {"body": body})):
        assert line.options == expected
        assert line.sampling == {"max_tokens": 3}
    for salt in ("mine", "", None):
        salted = body | {"cache_salt": salt}
        for line in (parse({"prompt": "Hi"} | salted), parse(COMPLETION | {"body": salted})):
            assert GenerationRequest("Hi", **line.options).cache_salt == (salt or "")


def test_messages_prefixes_and_prompt_keys_are_read():
    parts = [{"type": "text", "text": text} for text in "ab"]
    user = {"role": "user", "name": "ann", "content": parts}
    calls = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f"}}]}
    result = {"role": "tool", "tool_call_id": "c", "content": "4"}

    found = parse({"messages": [user, calls, result]}).messages

    assert [found[0], found[2]] == [user, result]
    assert found[1]["tool_calls"][0]["id"] == "c"

    for prompt, expected in (("Hi", "<|doc|>Hi"), ([1, 2], [1, 2])):
        assert parse({"prompt": prompt}, LineFormat(prefix="<|doc|>")).prompt == expected
    assert parse(COMPLETION, LineFormat(prefix="<|doc|>")).prompt == "<|doc|>Hi"
    row = {"question": "Why?", "answer": "So.", "seed": "not an option", "id": 7}
    line = parse(row, LineFormat(prompt_key="question"))
    assert (line.prompt, line.sampling, line.head.name) == ("Why?", {}, "7")
    assert "question" in str(refusal({"prompt": "x"}, LineFormat(prompt_key="question")))
    both = {"max_tokens": 5, "max_completion_tokens": 7}
    for body in (both, dict(reversed(both.items()))):
        assert parse({"prompt": "Hi", **body}).sampling == {"max_tokens": 7}


STRUCTURES = (
    *({"response_format": {"type": "json_object"}}, {"guided_json_object": True}),
    {"structured_outputs": {"json_object": True}},
)


@pytest.mark.parametrize(
    "member",
    [
        *({"stream": False}, {"echo": False}, {"logprobs": False}, {"user": "me"}, {"top_p": None}),
        *({"response_format": {"type": "text"}}, {"metadata": {"a": "b"}}, {"tools": []}),
        *({"modalities": ["text"]}, {"parallel_tool_calls": True}, {"no_repeat_ngram_size": 0}),
        *({"typical_p": 1.0}, {"evcit": None}, *STRUCTURES),
    ],
)
def test_fields_with_neutral_values_are_accepted_and_those_of_a_structure_set(member):
    structure = {"structured_outputs": StructuredOutputs(json_object=True)}
    expected = {"max_tokens": 3} | (structure if member in STRUCTURES else {})
    assert parse(COMPLETION | {"body": COMPLETION["body"] | member}).sampling == expected


@pytest.mark.parametrize(
    "member",
    [
        *({"stream": True}, {"echo": True}, {"logprobs": 0}, {"logprobs": True}, {"suffix": "x"}),
        *({"response_format": {"type": "xml"}}, {"tools": [{"type": "function"}]}),
        *({"max_token": 3}, {"no_repeat_ngram_size": 3}, {"messages": HI}),
        {"stream_options": {"include_usage": True}},
    ],
)
def test_unsupported_fields_are_refused_by_name(member):
    error = refusal(COMPLETION | {"body": COMPLETION["body"] | member})
    assert next(iter(member)) in str(error)
    assert (error.head.number, error.head.name) == (3, "a")


@pytest.mark.parametrize("prompts", [["a", ""], [[1], []], ["a", 5], ["a", [1]], [[1], [True]]])
def test_each_of_several_prompts_is_validated(prompts):
    assert "expected a prompt" in str(refusal(COMPLETION | {"body": {"prompt": prompts}}))
    for accepted in (["a", "b"], [[1, 2], [3]], [[4]]):
        assert list(parse(COMPLETION | {"body": {"prompt": accepted}}).prompts) == accepted


@pytest.mark.parametrize(
    "value",
    [
        *(7, [], None, {}),
        *({"prompt": prompt} for prompt in ("", [], ["a", "b"], [1, True], 5)),
        *({"prompt": "x", "messages": []}, {"messages": []}, {"messages": [{"role": "user"}]}),
        *({"id": name, "prompt": "x"} for name in ([1], True)),
        *(COMPLETION | {"url": url} for url in ("/v1/embeddings", ["/v1/completions"])),
        *(COMPLETION | {"custom_id": name} for name in (5, "")),
        *(COMPLETION | {"method": "GET"}, COMPLETION | {"body": "x"}),
        {"custom_id": "a", "url": "/v1/completions"},
        CHAT | {"body": {"prompt": "x"}},
    ],
)
def test_invalid_request_is_refused_with_its_line_number(value):
    assert refusal(value).head.number == 3


@pytest.mark.parametrize("value", [{}, {"prompt": "x"}, {"method": "POST", "id": "a"}])
def test_custom_id_without_a_body_is_told_where_it_belongs(value):
    error = refusal({"custom_id": "c"} | value)
    assert "custom_id belongs to a line with url and body, whose body is missing" in str(error)
    assert str(error).endswith("add them, or name a line of a prompt with id")
    assert error.head.name == value.get("id")


@given(raw=st.binary(max_size=60))
def test_any_bytes_parse_or_are_refused(raw: bytes):
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
def test_any_json_object_parses_or_is_refused(value: dict):
    found = outcome(json.dumps(value).encode(), 3)
    assert found.head.number == 3
    if isinstance(found, BatchLine):
        assert (found.prompt is None) != (found.messages is None)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"prompt": \n', r"not JSON: Expecting value at character 13$"),
        (b"[" * 200_000, "not JSON"),
        (b'{"prompt": "a', "Unterminated string starting at character 12"),
        (b'{"prompt": "a\t"}', "Invalid control character at character 14"),
    ],
    ids=["position", "nested", "text", "control"],
)
def test_line_that_is_not_json_is_refused(raw, message):
    with pytest.raises(BatchError, match=message):
        parse_line(raw, 7, PLAIN)
    kinds = {"null": None, "true": True, "3": 3, '"x"': "x", "a list": [1]}
    assert all(str(refusal(value)).endswith(kind) for kind, value in kinds.items())


@pytest.mark.parametrize(
    ("member", "message"),
    [
        ({"evict": 3}, "expected evict to be "),
        ({"record_evictions": "yes"}, "expected record_evictions to be "),
        ({"cache_salt": ["x"]}, "expected cache_salt to be a text"),
        ({"priority": 0.5}, "expected priority to be a"),
        ({"priority": True}, "expected priority to be a"),
        ({"deadline_s": "soon"}, "expected deadline_s to be a"),
        ({"deadline_s": True}, "expected deadline_s to be a"),
        ({"prompt": ["a", "b"]}, "write one line per prompt"),
        ({"max_token": 1}, "max_tokens"),
        ({"max_new_tokens": 3}, "max_tok"),
        ({"top_logprobs": 3}, "leave it out"),  # a hint names only fields that batch supports
        ({"n_probs": 3}, "leave it out"),
        ({"do_sample": False, "temperature": 0.7}, "do_sample"),
        ({"do_sample": 0}, "do_sample"),
    ],
)
def test_wrong_field_of_a_line_is_refused_with_what_is_expected(member, message):
    assert message in str(refusal({"prompt": "Hi"} | member))


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


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"promt": "x"}, "unknown field `promt`: did you mean `prompt`?"),
        ({"id": "a", "max_tokens": 3, "message": []}, "unknown field `message`: did you mean"),
        ({"zzz": "x"}, "unknown field `zzz`"),
        ({"id": "a"}, "expected either a prompt or messages in the line"),
        ({"prompt": "x", "messages": []}, "expected either a prompt or messages in the line"),
    ],
)
def test_line_without_a_prompt_names_the_unknown_field(line, expected):
    message = str(refusal(line))
    assert expected in message
    assert ("unknown field" in message) == ("unknown field" in expected)


# ---- records -------------------------------------------------------------------------------------


COUNTS = {
    "prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 1, "preemptions": 4,
    "evictions": 5, "evicted_tokens": 0, "recomputed_tokens": 6, "kv_peak_bytes": 64,
    "first_token_s": 0.5, "total_s": 1.0,
}  # fmt: skip
USAGE = Usage(**COUNTS)


def output(**changes: object) -> RequestOutput:
    plain: dict = {"request_id": "r", "prompt_token_ids": (1, 2, 3), "usage": USAGE}
    plain |= {"text": "Hello", "token_ids": (4, 5), "finish_reason": "stop"}
    unset = ("score", "stop_reason", "error", "logprobs", "prompt_logprobs")
    values = dict.fromkeys(unset) | plain | changes
    names = {field.name for field in fields(Choice)} - {"index"}
    choice = Choice(index=0, **{name: values[name] for name in names})
    return RequestOutput(**{"choices": (choice,)} | values)


def line(kind: str = "plain", name: str | None = "a") -> BatchLine:
    head = LineHead(number=7, kind=kind, name=name)  # type: ignore[arg-type]
    messages = [{"role": "user", "content": "Hi"}] if kind == "chat" else None
    return BatchLine(head=head, prompt=None if messages else "Hi", messages=messages)


def test_plain_records_and_those_of_the_openai_client():
    record = output_record(line(), output(), model="m")
    named = {"id": "a", "line": 7, "text": "Hello", "finish_reason": "stop", "error": None}
    assert json.loads(json.dumps(record)) == named | {"usage": COUNTS}
    assert output_record(line(name=None), output(), model="m")["id"] == "line-7"
    assert output_record(line(), output(), model="m", with_prompt=True)["prompt"] == "Hi"

    record = output_record(line("completions"), output(), model="m")

    assert (record["custom_id"], record["error"]) == ("a", None)
    assert record["response"]["status_code"] == 200
    body = Completion.model_validate(record["response"]["body"], strict=True)
    assert (body.choices[0].text, body.usage.total_tokens) == ("Hello", 5)
    usage = record["response"]["body"]["usage"]
    assert usage == usage_body([USAGE])
    record = output_record(line("chat"), output(finish_reason="length"), model="m")
    body = ChatCompletion.model_validate(record["response"]["body"], strict=True)
    assert body.choices[0].message.content == "Hello"
    assert body.choices[0].finish_reason == "length"


@pytest.mark.parametrize("kind", ["plain", "completions", "chat"])
def test_failed_output_is_an_error_record(kind: str):
    record = output_record(line(kind), output(error="broken", finish_reason="error"), model="m")

    assert is_error(record)
    assert record == error_record(line(kind).head, "broken")
    assert record["line"] == 7
    if kind == "chat":
        assert record["response"]["status_code"] == 400
        assert record["response"]["body"]["error"]["message"] == "broken"
        assert record["error"] == {"code": "invalid_request", "message": "broken"}


def test_tally_counts_outputs_and_errors():
    tally = BatchTally()
    tally.add(output_record(line(), output(), model="m"))
    tally.add(output_record(line("chat"), output(), model="m"))
    tally.add(error_record(line().head, "no"))
    of_another_server = output_record(line("chat"), output(), model="m")
    of_another_server["response"]["body"]["usage"] = {"prompt_tokens": 4}
    tally.add(of_another_server)

    assert (tally.completed, tally.errors) == (4, 1)
    expected = {"prompt_tokens": 10, "completion_tokens": 4, "cached_tokens": 2}
    expected |= {"evictions": 10, "evicted_tokens": 0, "recomputed_tokens": 12}
    assert tally.usage == expected
    assert tally.finish_reasons == {"stop": 3, "error": 1}


def test_merged_usage_equals_the_servers_usage():
    """`evicted_tokens` is the maximum over choices of a prompt and the sum over prompts."""
    usages = [
        replace(USAGE, evicted_tokens=evicted, kv_peak_bytes=peak, total_s=total_s)
        for evicted, peak, total_s in ((10, 64, 1.0), (30, 128, 3.0), (0, 32, 2.0))
    ]
    together = merged([output(usage=usage) for usage in usages]).usage

    sums = {name: 3 * count for name, count in COUNTS.items()}
    own = {"evicted_tokens": 40, "kv_peak_bytes": 224, "first_token_s": 0.5, "total_s": 3.0}
    assert together == Usage(**sums | own)
    body = usage_body(usages)
    for name in ("prompt_tokens", "completion_tokens", "evicted_tokens", "kv_peak_bytes"):
        assert body[name] == getattr(together, name)
