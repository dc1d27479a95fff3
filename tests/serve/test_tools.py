"""Tools: parsers and definitions of calls; forced calls, calls that the model chooses, streams."""

import json
from functools import reduce

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.errors import RequestError
from quire.sampling.sampler import SampledToken
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
from serve.conftest import CHATS, USER, ok, refused

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


def test_no_tools_and_a_neutral_choice_are_none():
    assert read_tools([], "auto", parallel=False) is read_tools(None, None, parallel=None) is None


def test_references_of_forced_schemas_stay_valid():
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


def test_annotations_are_no_part_of_a_forced_schema():
    properties = {"title": {"type": "string", "default": "x"}, "default": {"enum": ["a"]}}
    assert forced_schema({"title": "T", "description": "D", "properties": properties}) == {
        "properties": {"title": {"type": "string"}, "default": {"enum": ["a"]}},
        "additionalProperties": False,
    }


def test_forced_arguments_have_no_further_properties():
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


def test_required_choice_gives_valid_calls(asked):
    """Also for a model whose template does not use tools."""
    choice = asked(tools=[TOOL], **ONE)

    [call] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert call["function"]["name"] == "weather"
    jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER)


@pytest.mark.parametrize(("max_tokens", "reason"), [(250, "stop"), (3, "length")])
def test_named_choice_gives_the_arguments_of_the_tool(asked, max_tokens, reason):
    choice = asked(tools=[CLOCK, TOOL], tool_choice=NAMED, max_tokens=max_tokens)
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert choice["finish_reason"] == reason
    if reason == "stop":
        jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER)


def test_required_choice_selects_one_of_the_tools(post):
    body = ok(post(CHATS, **OPTIONS | {"n": 2, "max_tokens": 200}, tools=[TOOL, CLOCK], **ONE))
    messages = [choice["message"] for choice in body["choices"]]
    calls = [call for message in messages for call in message["tool_calls"] or ()]
    assert {call["function"]["name"] for call in calls} <= {"weather", "clock"}
    assert calls


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


def test_template_gets_the_tools(hermes, post, llm):
    tokens = post("/tokenize", messages=[USER], tools=[TOOL]).json()["tokens"]
    response = post(CHATS, **OPTIONS | {"max_tokens": 2}, tools=[TOOL])
    assert '"name": "weather"' in llm.model.tokenizer.decode(tokens)
    assert response.json()["usage"]["prompt_tokens"] == len(tokens)


def test_tools_are_refused_if_the_template_does_not_use_them(post, asked):
    for choice in (None, "auto"):
        message = refused(post(CHATS, **OPTIONS, tools=[TOOL], tool_choice=choice), "tools")
        assert "chat template does not use tools" in message
    assert asked(max_tokens=2, tools=[TOOL], tool_choice="none")


def test_tools_are_refused_if_the_format_of_calls_is_unknown(send, llm, monkeypatch):
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


def test_special_marker_is_kept_in_the_text(llm, monkeypatch, hermes):
    tokenizer = llm.model.tokenizer
    assert not ToolParsers("hermes", tokenizer).marker_is_special
    monkeypatch.setattr(type(tokenizer), "all_special_tokens", property(lambda _: ["<tool_call>"]))
    assert ToolParsers("hermes", tokenizer).marker_is_special
