"""Any JSON in the fields of structures and tools: status 200 or 400 with a field, never 5xx."""

import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.serve.structured import STRUCTURE_FIELDS

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
SCHEMA_WORDS = [
    *("type", "properties", "items", "anyOf", "allOf", "$ref", "$defs", "const", "enum", "pattern"),
    *("required", "minItems", "maxLength", "additionalProperties", "format", "x-guidance"),
]
FIELD_WORDS = [
    *("json", "regex", "choice", "grammar", "json_object", "json_schema", "schema", "name"),
    *("function", "parameters", "arguments", "id", "whitespace_pattern", "description"),
]
KEYWORDS = st.sampled_from(SCHEMA_WORDS + FIELD_WORDS)
GRAMMARS = st.sampled_from(
    [
        *("(a", "a|b", "[a-z]{3}", 'start: "a"', 'root ::= "a"', "{", '{"type": "object"}'),
        *("\ud800", "\x00", "%llguidance {}", "start: <[1]>", "start: %json {}", "(?P<a>a)\\1"),
        *(
            "start: <|doc|>",
            "start: /(/",
            'start: "a" start',
            "root ::= root",
            "$",
            "\\p{L}+",
            "(?i)",
        ),
    ]
)
WORDS = st.sampled_from(
    ["object", "array", "string", "integer", "#", "#/$defs/a", "auto", "required", "none"]
)
TEXTS = st.one_of(KEYWORDS, GRAMMARS, WORDS, st.text(max_size=12))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(-9, 9), TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(KEYWORDS, TEXTS), inner, max_size=4)
    ),
    max_leaves=8,
)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": TEXTS, "parameters": VALUES}),
        }
    ),
    min_size=1,
    max_size=2,
)
CALLS = st.lists(st.fixed_dictionaries({"id": TEXTS, "function": VALUES}), max_size=2)
SCHEMAS = st.dictionaries(KEYWORDS, VALUES, max_size=4)
SHAPED = st.one_of(
    st.fixed_dictionaries({"guided_json": SCHEMAS}, optional={"guided_whitespace_pattern": TEXTS}),
    st.fixed_dictionaries({"guided_regex": TEXTS}),
    st.fixed_dictionaries({"guided_grammar": TEXTS}),
    st.fixed_dictionaries({"guided_choice": st.lists(TEXTS, max_size=3)}),
    SCHEMAS.map(lambda schema: {"type": "json_schema", "json_schema": {"schema": schema}}).map(
        lambda wanted: {"response_format": wanted}
    ),
)
BODIES = st.one_of(
    st.tuples(st.sampled_from([COMPLETIONS, CHATS]), SHAPED),
    st.tuples(
        st.sampled_from([COMPLETIONS, CHATS]),
        st.dictionaries(st.sampled_from(sorted(STRUCTURE_FIELDS)), VALUES, min_size=1, max_size=2),
    ),
    st.tuples(
        st.just(CHATS),
        st.fixed_dictionaries(
            {"tools": st.one_of(TOOLS, VALUES), "tool_choice": st.one_of(TEXTS, VALUES)},
            optional={"parallel_tool_calls": st.one_of(st.booleans(), VALUES)},
        ),
    ),
    st.tuples(
        st.just(CHATS),
        st.fixed_dictionaries(
            {
                "messages": st.lists(
                    st.fixed_dictionaries({"role": TEXTS, "tool_calls": st.one_of(CALLS, VALUES)}),
                    min_size=1,
                    max_size=2,
                )
            }
        ),
    ),
)
HEADERS = {"content-type": "application/json"}
PLAIN = {
    COMPLETIONS: {"prompt": "<|doc|>Once", "max_tokens": 2},
    CHATS: {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 2},
}


@given(bodies=st.lists(BODIES, min_size=8, max_size=16))
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_value_gets_200_or_400(serve, bodies):
    async def main(client):
        return [
            (
                path,
                fields,
                await client.post(path, content=json.dumps(PLAIN[path] | fields), headers=HEADERS),
            )
            for path, fields in bodies
        ]

    for path, fields, response in serve(main):
        assert response.status_code in (200, 400), (path, fields, response.text)
        if response.status_code == 400:
            assert response.json()["error"]["message"]
