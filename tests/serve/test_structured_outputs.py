"""Fields that set the structure of the output: JSON schemas, expressions, choices, grammars."""

import asyncio
import json
import re
from functools import reduce

import jsonschema
import pytest

from quire.errors import RequestError
from quire.sampling import grammar
from quire.serve.structured import read_structure
from serve.conftest import CHATS, COMPLETIONS, MESSAGES, RESPONSES, ok, refused

LONG = {"max_tokens": 300, "temperature": 1, "seed": 1}
ONCE = [{"role": "user", "content": "Once"}]
BODIES = {COMPLETIONS: {"prompt": "<|doc|>Once", **LONG}, CHATS: {"messages": ONCE, **LONG}}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
FIELDS = {
    "response_format": FORMAT,
    "structured_outputs": {"json": PERSON, "disable_any_whitespace": True},
    "guided_json": PERSON,
}
WHITESPACE = "guided_whitespace_pattern"


def text_of(response):
    [choice] = ok(response)["choices"]
    assert choice["finish_reason"] == "stop"
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("path", BODIES)
def test_output_matches_the_schema(post, path, field):
    text = text_of(post(path, **BODIES[path], **{field: FIELDS[field]}))
    jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[ab]{2,4}"}, "[ab]{2,4}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'root ::= "x" [0-9] "y"'}, "x[0-9]y"),
        ({"structured_outputs": {"regex": "[ab]{2,4}"}}, "[ab]{2,4}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]/ "y"'}}, "x[0-9]y"),
    ],
)
def test_output_matches_the_expression(post, fields, pattern):
    assert re.fullmatch(pattern, text_of(post(COMPLETIONS, **BODIES[COMPLETIONS], **fields)))


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"guided_json_object": True, "guided_whitespace_pattern": " "},
    ],
)
def test_output_is_an_object(post, fields):
    [choice] = ok(post(CHATS, **BODIES[CHATS], **fields))["choices"]
    assert choice["message"]["content"].startswith("{")


def test_stream_is_the_whole_output(stream, post):
    body = BODIES[CHATS] | {"response_format": FORMAT}
    choices = [chunk["choices"][0] for chunk in stream(CHATS, **body)]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert text == text_of(post(CHATS, **body))
    assert choices[-1]["finish_reason"] == "stop"


def test_choices_have_matchers_of_their_own(post):
    response = post(CHATS, **BODIES[CHATS], response_format=FORMAT, n=3)
    texts = [choice["message"]["content"] for choice in response.json()["choices"]]
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)
    assert len(set(texts)) > 1


DEEP = reduce(lambda inner, _: {"items": inner}, range(70), {"type": "string"})


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"guided_regex": "(a"}, "guided_regex", "unterminated subpattern"),
        ({"guided_regex": "a" * 20_000}, "guided_regex", "16,384 bytes"),
        ({"guided_json": {"type": "foo"}}, "guided_json", "Invalid type"),
        ({"guided_json": "{"}, "guided_json", "invalid JSON"),
        ({"guided_json": DEEP}, "guided_json", "64 levels"),
        ({"guided_grammar": "start: foo"}, "guided_grammar", "unknown name"),
        ({"guided_json": {}, WHITESPACE: "[ "}, "guided_json", "unterminated character set"),
        ({WHITESPACE: " "}, WHITESPACE, "guided_json"),
        ({"guided_regex": "a", WHITESPACE: " "}, WHITESPACE, "needs json"),
        ({"structured_outputs": {}}, "structured_outputs", "got none"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unterminated"),
        ({"guided_regex": "a{400000}"}, "guided_regex", "400,000 characters"),
        ({"guided_regex": "[[:alpha:]]"}, "guided_regex", "POSIX"),
        ({"guided_json": {"$ref": "#"}}, "guided_json", "no JSON that ends"),
        ({"guided_grammar": "start: /(?=a)/"}, "guided_grammar", "lookahead"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice", "list of texts"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs", "structural_tag"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json", "compiled"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"response_format": {"type": DEEP}}, "response_format", "got dict"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "json_schema"),
        ({"response_format": {}}, "response_format", "json_object"),
        ({"response_format": {"type": "json_schema"}}, *["response_format.json_schema"] * 2),
        (
            {"response_format": FORMAT | {"json_schema": {"schema": {"type": 1}}}},
            *("response_format.json_schema", "compiled"),
        ),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "guided_regex"),
        ({"guided_regex": "a", "response_format": FORMAT}, "guided_regex", "response_format"),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        (
            {"guided_regex": "a", "use_beam_search": True, "ignore_eos": True, "temperature": 0},
            *("ignore_eos", "beam"),
        ),
    ],
)
@pytest.mark.parametrize("path", BODIES)
def test_wrong_structure_is_refused_with_its_field(post, path, fields, param, message):
    assert message in refused(post(path, **BODIES[path] | fields), param)


def test_refused_structure_does_not_stop_other_requests(send):
    fields = {"guided_regex": "(a"}, {"guided_regex": "(((a+)+)+)+b" * 200, "max_tokens": 2}, {}
    body = BODIES[COMPLETIONS]
    *_, last = send(*(("POST", COMPLETIONS, {"json": body | more}) for more in fields))
    assert last.status_code == 200


GROWS = {"guided_grammar": 'start: e\ne: e e | "a" | e e e'}


@pytest.fixture
def small_limit(monkeypatch):
    """A limit that an output reaches in its middle: the probes of a compilation do not."""
    monkeypatch.setitem(grammar.LIMITS, "step_max_items", 120)


@pytest.mark.parametrize(
    "options", [{}, {"n": 2}, {"use_beam_search": True, "temperature": 0, "n": 2, "max_tokens": 60}]
)
@pytest.mark.parametrize("path", BODIES)
def test_limit_reached_by_an_output_is_the_clients_and_ends_no_other_request(
    serve, small_limit, path, options
):
    async def main(client):
        body = BODIES[path] | GROWS | options
        return await asyncio.gather(
            client.post(path, json=body), client.post(path, json=BODIES[path] | {"max_tokens": 60})
        )

    failed, other = serve(main)

    assert "too large" in refused(failed, "guided_grammar")
    assert other.status_code == 200


@pytest.mark.parametrize("path", BODIES)
def test_limit_reached_by_a_streamed_output_is_an_event_of_the_client(stream, small_limit, path):
    *_, last = stream(path, **BODIES[path], **GROWS)
    assert last["error"]["code"] == 400
    assert "too large" in last["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        (RESPONSES, {"input": "Once", "max_output_tokens": 200}, '"code": "invalid_prompt"'),
        (MESSAGES, {"messages": ONCE, "max_tokens": 200}, '"type": "invalid_request_error"'),
    ],
)
def test_limit_reached_by_an_output_of_another_api_is_the_clients(
    post, small_limit, path, body, code
):
    body |= {"structured_outputs": {"grammar": GROWS["guided_grammar"]}}
    whole, streamed = (post(path, **body, stream=stream) for stream in (False, True))

    assert whole.status_code == 400
    *_, last = [event for event in streamed.text.split("\n\n") if event]
    assert code in last
    assert "structured_outputs is too large" in last


def test_large_structures_of_all_kinds_are_served_or_refused(post):
    """Objects with many properties, optional parts in a row, and lists in lists."""
    properties = {f"p{number}": {"type": "string"} for number in range(400)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    nested = {"type": "integer"}
    for _ in range(4):
        nested = {"type": "array", "items": nested, "maxItems": 1000}
    regexes = ("a?" * 2000, "(a?){5000}", "((a?){30}){30}", "([a-z]{1,10} ?){1,1000}")
    served = [{"guided_json": schema}, {"guided_json": nested}]
    served += [{"guided_regex": regex} for regex in regexes]
    too_large = [
        {"guided_json": schema | {"properties": {f"p{n}": {} for n in range(3000)}}},
        {"guided_json": {"anyOf": [schema | {"title": str(n)} for n in range(8)]}},
        {"guided_regex": "(([a-z]{1,100}){1,100}){1,100}"},
        {"guided_regex": "a?b?" * 2500},
    ]
    either = {"guided_grammar": "start: " + '"a"? ' * 4000}  # by the time of its compilation

    body = BODIES[COMPLETIONS] | {"max_tokens": 20}
    *statuses, last = (
        post(COMPLETIONS, **body, **fields).status_code for fields in [*served, *too_large, either]
    )
    assert statuses == [200] * len(served) + [400] * len(too_large)
    assert last in (200, 400)


def test_null_fields_set_no_structure_and_unknown_options_are_named():
    assert read_structure(dict.fromkeys(("guided_json", "response_format"))) is None
    assert read_structure({"guided_json_object": False}) is None
    with pytest.raises(RequestError, match="no option 'jason'"):
        read_structure({"structured_outputs": {"jason": {}}})
