"""Parsers of tool calls: whole texts, and the same texts in arbitrary parts."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.errors import RequestError
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
    events = [event for part in parts for event in parser.push(part)]
    return merged(events + parser.finish())


def call(name, arguments):
    return [CallStart(name), Arguments(arguments)]


TEXTS = {
    "hermes": [
        ("Hello", [Content("Hello")]),
        (
            f'Text\n<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>',
            [Content("Text"), *call("f", ARGUMENTS)],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
            '<tool_call>{"arguments": {"z": 1}, "name": "g"}</tool_call>\n',
            [*call("f", "{}"), *call("g", '{"z": 1}')],
        ),
        ('<tool_call>{"name": "f"}</tool_call>', call("f", "{}")),
        (
            r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>',
            call("f", '{"a": 1}'),
        ),
        ('<tool_call>{"name": "f", "arguments": {"a', call("f", '{"a')),
        ('<tool_call>{"name": "f", "arguments": {}} x', [*call("f", "{}"), Content("x")]),
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
        ("[TOOL_CALLS]" + "f" * 300, [Content("[TOOL_CALLS]" + "f" * 300)]),
    ],
}
"""Whole texts of each format, with their events."""


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [(name, text, expected) for name, rows in TEXTS.items() for text, expected in rows],
)
def test_whole_text_is_parsed(name, text, expected):
    assert parse(name, [text]) == expected


OBJECTS = [
    '{"name": "f", "arguments": {"a": "}"}}',
    '{"name": "g", "parameters": [1]}',
    '{"arguments": {}, "name": "h"}',
]
MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]"]
PIECES = st.sampled_from([*OBJECTS, *MARKS, *'[]{}:,; \n"\\f', "{}", "null", '"name"'])


@given(
    name=st.sampled_from(sorted(MAKERS)),
    text=st.lists(PIECES, max_size=8).map("".join),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
@settings(max_examples=400, deadline=None)
@example(name="hermes", text='a <tool_call>{"name": "f"}</tool_call> b', cuts=list(range(40)))
def test_events_do_not_depend_on_the_parts(name, text, cuts):
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    parts = [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]

    events = parse(name, parts)

    assert events == parse(name, [text])
    assert events == parse(name, list(text))


@given(text=st.text("abc <[]{}\n:", max_size=30), name=st.sampled_from(sorted(MAKERS)[:3]))
@settings(max_examples=200, deadline=None)
def test_text_without_calls_is_unchanged_content(text, name):
    assert "".join(event.text for event in parse(name, [text])) == text


# ---- definitions and writer ----------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def tool(name, parameters=None):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize(
    ("tools", "choice", "param", "message"),
    [
        (None, "required", "tool_choice", "needs `tools`"),
        ([{"type": "x"}], None, "tools.0", '"type": "function"'),
        ([TOOL, {"type": "function", "function": {}}], None, "tools.1.function.name", "name"),
        ([tool("a b")], None, "tools.0.function.name", "1 to 128"),
        ([tool("f", [1])], None, "tools.0.function.parameters", "got list"),
        ([TOOL, TOOL], None, "tools", "'f' twice"),
        ([TOOL], "any", "tool_choice", "expected `tool_choice`"),
        ([TOOL], {"type": "function"}, "tool_choice", "expected `tool_choice`"),
        ([TOOL], {"type": "function", "function": {"name": "g"}}, "tool_choice", "names 'g'"),
    ],
)
def test_wrong_tools_are_refused(tools, choice, param, message):
    with pytest.raises(RequestError, match=message) as refused:
        read_tools(tools, choice, parallel=None)

    assert refused.value.param == param


def test_no_tools_and_a_neutral_choice_are_none():
    assert read_tools([], "auto", parallel=False) is None
    assert read_tools(None, None, parallel=None) is None


def test_references_of_forced_schemas_stay_valid():
    parameters = {
        "type": "object",
        "properties": {"p": {"$ref": "#/$defs/point"}, "$ref": {"const": "#/x"}},
        "$defs": {"point": {"type": "array", "items": {"$ref": "#/$defs/point"}}},
    }
    choice = read_tools([TOOL, tool("g", parameters)], "required", parallel=False)

    schema = choice.schema()

    moved = schema["$defs"]["tool1"]
    assert moved["properties"]["p"] == {"$ref": "#/$defs/tool1/$defs/point"}
    assert moved["$defs"]["point"]["items"] == {"$ref": "#/$defs/tool1/$defs/point"}
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)


def test_annotations_are_no_part_of_a_forced_schema():
    parameters = {
        "title": "T",
        "description": "D",
        "properties": {"title": {"type": "string", "default": "x"}, "default": {"enum": ["a"]}},
    }

    schema = read_tools([tool("f", parameters)], "required", parallel=None).schema()

    assert schema["$defs"]["tool0"] == {
        "properties": {"title": {"type": "string"}, "default": {"enum": ["a"]}},
        "additionalProperties": False,
    }


def test_forced_arguments_have_no_further_properties():
    inner = {"type": "object", "properties": {"properties": {"const": {"properties": {}}}}}
    for parameters, expected in (
        ({"properties": {"a": {"type": "string"}}}, False),
        ({"properties": {}, "additionalProperties": True}, True),
        ({"properties": {}, "patternProperties": {"a": {}}}, None),
        ({"properties": {}, "allOf": [{"properties": {}}]}, None),
        ({"type": "object"}, None),
    ):
        schema = read_tools([tool("f", parameters)], "required", parallel=None).schema()
        assert schema["$defs"]["tool0"].get("additionalProperties") == expected

    schema = read_tools([tool("f", {"items": [inner]})], "required", parallel=None).schema()

    closed = inner | {"additionalProperties": False}
    assert schema["$defs"]["tool0"]["items"] == [closed]


def test_deep_schema_of_a_tool_is_refused():
    deep = {}
    for _ in range(200):
        deep = {"items": deep}

    with pytest.raises(RequestError, match="64 levels") as refused:
        read_tools([tool("f", deep)], "required", parallel=None)

    assert refused.value.param == "tools.0.function.parameters"


def writer(mode="auto", *, parallel=True, parser=None):
    choice = ToolChoice(mode=mode, tools=(), definitions=(), parallel=parallel)
    return CallWriter(parser=parser or HermesParser(), choice=choice, new_id=lambda: "call_1")


TWO = 'Hi <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>' * 2


def test_message_has_content_and_calls():
    calls = writer()

    message = calls.message(TWO)

    function = {"name": "f", "arguments": '{"a": 1}'}
    one = {"id": "call_1", "type": "function", "function": function}
    assert message == {"content": "HiHi", "tool_calls": [one, one]}
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
    tools = [{"type": "function", "function": {"name": "f"}}]
    parsers = ToolParsers("mistral", None)
    chat = ChatTools(
        choice=read_tools(tools, choice, parallel=None), parsers=parsers, in_prompt=True
    )

    [call] = chat.writer().message(text)["tool_calls"]

    assert len(call["id"]) == 9
    assert call["id"].isalnum()
