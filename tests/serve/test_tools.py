"""Tools: definitions, forced and chosen calls, streams; fields that set the structure."""

import asyncio
import json
import re
from functools import reduce

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.errors import RequestError
from quire.sampling import grammar
from quire.sampling.sampler import SampledToken
from quire.serve.structured import read_structure
from quire.serve.tools.chat import CallWriter, ChatTools
from quire.serve.tools.definitions import ToolChoice, read_tools
from quire.serve.tools.parsers import (
    Arguments,
    CallStart,
    Content,
    HermesParser,
    Llama3Parser,
    MistralParser,
    NamedParser,
    RequiredParser,
    ToolParsers,
    merged,
)
from serve.conftest import CHATS, COMPLETIONS, MESSAGES, RESPONSES, USER, ok, refused

# ---- parsers: whole texts, and the same texts in arbitrary parts ---------------------------------

MAKERS = {
    "hermes": HermesParser,
    "llama3_json": Llama3Parser,
    "mistral": MistralParser,
    "required": RequiredParser,
    "named": lambda: NamedParser("f"),
}
ARGUMENTS = r'{"a": "x}\"{<tool_call>", "b": [1, {"c": null}]}'


def parse(name, parts):
    parser = MAKERS[name]()
    return merged([event for part in parts for event in parser.push(part)] + parser.finish())


def call(name, arguments):
    return [CallStart(name), Arguments(arguments)]


HERMES_F = '<tool_call>{"name": "f", "arguments": {}}'
LONG_NAME = "[TOOL_CALLS]" + "f" * 300
TEXTS = {
    "hermes": [
        ("Hello", [Content("Hello")]),
        (
            f'Text\n<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>',
            [Content("Text"), *call("f", ARGUMENTS)],
        ),
        (
            f"{HERMES_F}</tool_call>\n"
            '<tool_call>{"arguments": {"z": 1}, "name": "g"}</tool_call>\n',
            [*call("f", "{}"), *call("g", '{"z": 1}')],
        ),
        ('<tool_call>{"name": "f"}</tool_call>', call("f", "{}")),
        (r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>', call("f", '{"a": 1}')),
        ('<tool_call>{"name": "f", "arguments": {"a', call("f", '{"a')),
        (f"{HERMES_F} x", [*call("f", "{}"), Content("x")]),
        ("<tool_call>{'name'", [Content("<tool_call>{'name'")]),
        ('a <tool_call>{"x": 1}</tool_call>', [Content('a <tool_call>{"x": 1}</tool_call>')]),
        ("a <tool_", [Content("a <tool_")]),
        (" \n", [Content(" \n")]),
    ],
    "llama3_json": [
        ("Hello {}", [Content("Hello {}")]),
        (f'{{"name": "f", "parameters": {ARGUMENTS}}}', call("f", ARGUMENTS)),
        (
            '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
            [*call("f", "{}"), *call("g", "{}")],
        ),
        (
            'So: <|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}',
            [Content("So:"), *call("f", '{"a": 1}')],
        ),
        ('{"answer": 3}', [Content('{"answer": 3}')]),
        (' {"name": "f", "parameters": {}} done', [*call("f", "{}"), Content(" done")]),
        ("<|python", [Content("<|python")]),
    ],
    "mistral": [
        ("Hello [1]", [Content("Hello [1]")]),
        (
            f'Text [TOOL_CALLS] [{{"name": "f", "arguments": {ARGUMENTS}}}, '
            '{"name": "g", "arguments": {}}]',
            [Content("Text"), *call("f", ARGUMENTS), *call("g", "{}")],
        ),
        (
            f'[TOOL_CALLS]f[ARGS]{ARGUMENTS}[TOOL_CALLS]g{{"b": 2}}',
            [*call("f", ARGUMENTS), *call("g", '{"b": 2}')],
        ),
        ('[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}', call("f", '{"a": 1}')),
        ("[TOOL_CALLS]???{}", [Content("[TOOL_CALLS]???{}")]),
        ('[TOOL_CALLS][{"x": 1}]', [Content('[TOOL_CALLS][{"x": 1}]')]),
        ("[TOOL_CALLS]f", [Content("[TOOL_CALLS]f")]),
        (LONG_NAME, [Content(LONG_NAME)]),
    ],
}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [(name, text, expected) for name, rows in TEXTS.items() for text, expected in rows],
)
def test_whole_text_is_parsed(name, text, expected):
    assert parse(name, [text]) == expected


PIECES = [
    '{"name": "f", "arguments": {"a": "}"}}',
    '{"name": "g", "parameters": [1]}',
    '{"arguments": {}, "name": "h"}',
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]"),
    *'[]{}:,; \n"\\f',
    *("{}", "null", '"name"'),
]


@given(
    name=st.sampled_from(sorted(MAKERS)),
    text=st.lists(st.sampled_from(PIECES), max_size=8).map("".join),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
@settings(max_examples=400)
@example(name="hermes", text='a <tool_call>{"name": "f"}</tool_call> b', cuts=list(range(40)))
def test_events_do_not_depend_on_the_parts(name, text, cuts):
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    parts = [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    assert parse(name, parts) == parse(name, [text]) == parse(name, list(text))


@given(text=st.text("abc <[]{}\n:", max_size=30), name=st.sampled_from(sorted(MAKERS)[:3]))
@settings(max_examples=200, deadline=None)
def test_text_without_calls_is_unchanged_content(text, name):
    assert "".join(event.text for event in parse(name, [text])) == text


# ---- definitions and writer ----------------------------------------------------------------------

TOOL_F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def tool(name, parameters=None):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def forced_schema(parameters):
    """The schema of a call's arguments if the call is forced."""
    return read_tools([tool("f", parameters)], "required", parallel=None).schema()["$defs"]["tool0"]


DEEP_ITEMS = reduce(lambda inner, _: {"items": inner}, range(200), {})


@pytest.mark.parametrize(
    ("tools", "choice", "param", "message"),
    [
        (None, "required", "tool_choice", "needs `tools`"),
        ([{"type": "x"}], None, "tools.0", '"type": "function"'),
        ([TOOL_F, {"type": "function", "function": {}}], None, "tools.1.function.name", "name"),
        ([tool("a b")], None, "tools.0.function.name", "1 to 128"),
        ([tool("f", [1])], None, "tools.0.function.parameters", "got list"),
        ([TOOL_F, TOOL_F], None, "tools", "'f' twice"),
        ([TOOL_F], "any", "tool_choice", "expected `tool_choice`"),
        ([TOOL_F], {"type": "function"}, "tool_choice", "expected `tool_choice`"),
        ([TOOL_F], {"type": "function", "function": {"name": "g"}}, "tool_choice", "names 'g'"),
        ([tool("f", DEEP_ITEMS)], "required", "tools.0.function.parameters", "64 levels"),
    ],
)
def test_wrong_tools_are_refused_by_name(tools, choice, param, message):
    with pytest.raises(RequestError, match=message) as refused:
        read_tools(tools, choice, parallel=None)
    assert refused.value.param == param


def test_neutral_choices_are_none_and_forced_schemas_closed_without_annotations():
    assert read_tools([], "auto", parallel=False) is read_tools(None, None, parallel=None) is None
    properties = {"title": {"type": "string", "default": "x"}, "default": {"enum": ["a"]}}
    assert forced_schema({"title": "T", "description": "D", "properties": properties}) == {
        "properties": {"title": {"type": "string"}, "default": {"enum": ["a"]}},
        "additionalProperties": False,
    }

    parameters = {
        "type": "object",
        "properties": {"p": {"$ref": "#/$defs/point"}, "$ref": {"const": "#/x"}},
        "$defs": {"point": {"type": "array", "items": {"$ref": "#/$defs/point"}}},
    }
    schema = read_tools([TOOL_F, tool("g", parameters)], "required", parallel=False).schema()

    moved = schema["$defs"]["tool1"]
    assert moved["properties"]["p"] == {"$ref": "#/$defs/tool1/$defs/point"}
    assert moved["$defs"]["point"]["items"] == {"$ref": "#/$defs/tool1/$defs/point"}
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)

    for parameters, expected in (
        ({"properties": {"a": {"type": "string"}}}, False),
        ({"properties": {}, "additionalProperties": True}, True),
        ({"properties": {}, "patternProperties": {"a": {}}}, None),
        ({"properties": {}, "allOf": [{"properties": {}}]}, None),
        ({"type": "object"}, None),
    ):
        assert forced_schema(parameters).get("additionalProperties") == expected

    inner = {"type": "object", "properties": {"properties": {"const": {"properties": {}}}}}
    assert forced_schema({"items": [inner]})["items"] == [inner | {"additionalProperties": False}]


def test_message_has_content_and_calls():
    choice = ToolChoice(mode="auto", tools=(), definitions=(), parallel=True)
    calls = CallWriter(parser=HermesParser(), choice=choice, new_id=lambda: "call_1")
    text = 'Hi <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'

    one = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert calls.message(text * 2) == {"content": "HiHi", "tool_calls": [one, one]}
    assert calls.finish_reason("stop") == "tool_calls"
    assert calls.finish_reason("length") == "length"


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ("auto", '[TOOL_CALLS]f{"a": 1}'),
        ("required", '[{"name": "f", "arguments": {"a": 1}}]'),
        ({"type": "function", "function": {"name": "f"}}, '{"a": 1}'),
    ],
)
def test_ids_have_the_length_that_the_template_accepts(choice, text):
    """Templates of Mistral refuse other ids, also those of forced calls."""
    choice = read_tools([TOOL_F], choice, parallel=None)
    chat = ChatTools(choice=choice, parsers=ToolParsers("mistral", None), in_prompt=True)
    [call] = chat.writer().message(text)["tool_calls"]
    assert len(call["id"]) == 9
    assert call["id"].isalnum()


# ---- through the server --------------------------------------------------------------------------

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "Weather now.", "parameters": WEATHER}
TOOL = {"type": "function", "function": FUNCTION}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
OPTIONS = {"messages": [USER], "max_tokens": 250, "temperature": 1.0, "seed": 3}
ONE = {"tool_choice": "required", "parallel_tool_calls": False}
HERMES = (
    "<|doc|>{% if tools %}{{ tools | tojson }} Answer in <tool_call></tool_call>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}{% endfor %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "unit": "C"}}\n</tool_call>'


class Script:
    """A sampler whose output is a given text, then the end token."""

    one_by_one = False

    def __init__(self, llm, text):
        self.vocab_size, self.eos_token_ids = llm.model.spec.vocab_size, (1, 2)
        self._ids = [*llm.model.tokenizer(text, add_special_tokens=False).input_ids, 1]

    def sample(self, logits, rows):
        return [
            SampledToken(self._ids[len(row.output_token_ids)], logprob=-1.0, top_logprobs=())
            for row in rows
        ]


@pytest.fixture
def hermes(llm, monkeypatch):
    monkeypatch.setattr(llm.model.tokenizer, "chat_template", HERMES)


@pytest.fixture
def says(llm, monkeypatch, hermes):
    """Make the model write a text."""

    def script(text):
        monkeypatch.setattr(llm.engine.sampling_step, "sampler", Script(llm, text))

    return script


@pytest.fixture
def asked(post):
    """The only choice of a chat that must succeed."""

    def run(**options):
        [choice] = ok(post(CHATS, **OPTIONS | options))["choices"]
        return choice

    return run


def test_required_choice_gives_valid_calls_of_the_tools(asked, post):
    """Also for a model whose template does not use tools."""
    choice = asked(tools=[TOOL], **ONE)

    [call] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert call["function"]["name"] == "weather"
    jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER)

    body = ok(post(CHATS, **OPTIONS | {"n": 2, "max_tokens": 200}, tools=[TOOL, CLOCK], **ONE))
    messages = [choice["message"] for choice in body["choices"]]
    calls = [call for message in messages for call in message["tool_calls"] or ()]
    assert {call["function"]["name"] for call in calls} <= {"weather", "clock"}
    assert calls


@pytest.mark.parametrize(("max_tokens", "reason"), [(250, "stop"), (3, "length")])
def test_named_choice_gives_the_arguments_of_the_tool(asked, max_tokens, reason):
    choice = asked(tools=[CLOCK, TOOL], tool_choice=NAMED, max_tokens=max_tokens)
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert choice["finish_reason"] == reason
    if reason == "stop":
        jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_streamed_forced_call_is_the_whole_call(stream, asked, choice):
    options = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    chunks, whole = stream(CHATS, **OPTIONS, **options), asked(**options)

    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
    [call] = whole["message"]["tool_calls"]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert parts[0]["function"] == {"name": "weather", "arguments": ""}
    assert {part["index"] for part in parts} == {0}
    assert [part["id"] for part in parts if "id" in part] == [parts[0]["id"]]
    assert "".join(p["function"]["arguments"] for p in parts) == call["function"]["arguments"]
    assert len(parts) > 3
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]


WRITTEN = {"name": "weather", "arguments": '{"city": "Rome", "unit": "C"}'}


def test_model_may_call_a_tool(says, asked):
    for text, options, content, calls, reason in (
        (f"Wait. {CALL}", {}, "Wait.", [WRITTEN], "tool_calls"),
        ("Sunny.", {}, "Sunny.", None, "stop"),
        (CALL * 2, {}, None, [WRITTEN] * 2, "tool_calls"),
        (CALL * 2, {"parallel_tool_calls": False}, None, [WRITTEN], "tool_calls"),
        (CALL, {"tool_choice": "none"}, CALL, None, "stop"),
    ):
        says(text)
        choice = asked(tools=[TOOL], **options)
        message = choice["message"]
        found = message["tool_calls"]
        assert (message["role"], message["refusal"]) == ("assistant", None)
        assert (message["content"], choice["finish_reason"]) == (content, reason)
        assert (None if found is None else [call["function"] for call in found]) == calls


def test_streamed_text_and_calls(says, stream):
    says(f"Wait. {CALL}{CALL}")
    chunks = stream(CHATS, **OPTIONS, tools=[TOOL], logprobs=True)

    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "Wait."
    parts = [part for choice in choices for part in choice["delta"].get("tool_calls", ())]
    for index in (0, 1):
        texts = [p["function"]["arguments"] for p in parts if p["index"] == index]
        assert json.loads("".join(texts)) == {"city": "Rome", "unit": "C"}
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert sum(len(c["logprobs"]["content"]) for c in choices if c["logprobs"]) > 20


def test_template_gets_the_tools_and_a_special_marker_is_kept(hermes, post, llm, monkeypatch):
    tokens = post("/tokenize", messages=[USER], tools=[TOOL]).json()["tokens"]
    response = post(CHATS, **OPTIONS | {"max_tokens": 2}, tools=[TOOL])
    assert '"name": "weather"' in llm.model.tokenizer.decode(tokens)
    assert response.json()["usage"]["prompt_tokens"] == len(tokens)

    tokenizer = llm.model.tokenizer
    assert not ToolParsers("hermes", tokenizer).marker_is_special
    monkeypatch.setattr(type(tokenizer), "all_special_tokens", property(lambda _: ["<tool_call>"]))
    assert ToolParsers("hermes", tokenizer).marker_is_special


def test_tools_of_unknown_templates_or_calls_are_refused(post, asked, send, llm, monkeypatch):
    for choice in (None, "auto"):
        message = refused(post(CHATS, **OPTIONS, tools=[TOOL], tool_choice=choice), "tools")
        assert "chat template does not use tools" in message
    assert asked(max_tokens=2, tools=[TOOL], tool_choice="none")

    monkeypatch.setattr(llm.model.tokenizer, "chat_template", "<|doc|>{{ tools }}{{ messages }}")
    call = ("POST", CHATS, {"json": OPTIONS | {"tools": [TOOL], "max_tokens": 2}})
    assert "--tool-parser" in refused(send(call)[0], "tools")
    assert send(call, tool_parser="hermes")[0].status_code == 200


UNCOMPILED = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
REQUIRED = {"tools": [TOOL], "tool_choice": "required"}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [TOOL] * 200}, "tools", "at most 128"),
        ({"tools": [TOOL], "tool_choice": 5}, "tool_choice", "string"),
        (
            REQUIRED | {"response_format": {"type": "json_object"}},
            *("response_format", "both determine"),
        ),
        (REQUIRED | {"guided_regex": "a"}, "guided_regex", "both"),
        (REQUIRED | {"tools": [UNCOMPILED]}, "tools", "cannot be compiled"),
        ({"functions": [{"name": "f"}]}, "functions", "use `tools`"),
        ({"function_call": {"name": "f"}}, "function_call", "use `tool_choice`"),
    ],
)
def test_wrong_tools_are_refused_with_their_field(post, fields, param, message):
    assert message in refused(post(CHATS, **OPTIONS, **fields), param)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ tools }} <tool_call>", "hermes"),
        ("{{ tools }} [TOOL_CALLS]", "mistral"),
        ("{{ tools }} <|python_tag|>", "llama3_json"),
        ("{{ tools }} <tool_call><function=f>", None),
        ("{{ messages }}", None),
        (None, None),
        ({"default": "{{ messages }}", "tool_use": "{{ tools }}<tool_call>"}, "hermes"),
    ],
)
def test_parser_is_detected_from_the_template(llm, monkeypatch, template, expected):
    monkeypatch.setattr(llm.model.tokenizer, "chat_template", template)
    assert ToolParsers("auto", llm.model.tokenizer).name == expected
    assert ToolParsers("mistral", llm.model.tokenizer).name == "mistral"


# ---- structured outputs --------------------------------------------------------------------------


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


def test_stream_is_the_whole_output_and_choices_have_matchers_of_their_own(stream, post):
    body = BODIES[CHATS] | {"response_format": FORMAT}
    choices = [chunk["choices"][0] for chunk in stream(CHATS, **body)]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert text == text_of(post(CHATS, **body))
    assert choices[-1]["finish_reason"] == "stop"
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


def test_structures_that_are_null_unknown_or_refused_affect_no_other_request(send):
    fields = {"guided_regex": "(a"}, {"guided_regex": "(((a+)+)+)+b" * 200, "max_tokens": 2}, {}
    body = BODIES[COMPLETIONS]
    *_, last = send(*(("POST", COMPLETIONS, {"json": body | more}) for more in fields))
    assert last.status_code == 200
    assert read_structure(dict.fromkeys(("guided_json", "response_format"))) is None
    assert read_structure({"guided_json_object": False}) is None
    with pytest.raises(RequestError, match="no option 'jason'"):
        read_structure({"structured_outputs": {"jason": {}}})


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
