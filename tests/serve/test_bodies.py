import ast
import asyncio
import json
import threading
import time
from collections import defaultdict
from itertools import product
from pathlib import Path

import pytest
from fastapi import HTTPException
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import quire
from quire.serve import json_route
from quire.serve.json_route import MAX_INLINE_BYTES, parse_json, refuse_many_nodes
from quire.serve.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from quire.serve.structured import STRUCTURE_FIELDS
from serve.conftest import CHATS, COMPLETIONS, JSON, USER, ok

JSON_PIECES = (
    *("[", "]", "{", "}", ",", ":", '"', "\\", "1", "-", ".5", "e3", "true", "nul", "null"),
    *("NaN", "Infinity", '"a"', '"b":', " ", "\n", "\\u00e9", "\\ud800", "\x00", "\x0b"),
    *("\xa0", "\ufeff", "1,2,3,", '"x":1', "01", "[]", "{}", "é"),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def outcome(read, raw):
    try:
        return "read", repr(read(raw))
    except RecursionError:
        return RecursionError
    except json.JSONDecodeError as error:
        return error.msg, error.pos
    except ValueError as error:
        return type(error), str(error)


def check(raw):
    assert outcome(parse_json, raw) == outcome(json.loads, raw), raw


@given(VALUES, st.booleans(), st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32-le"]))
def test_values_are_parsed_equally(value, is_ascii, encoding):
    check(json.dumps(value, ensure_ascii=is_ascii, indent=1).encode(encoding))


@given(st.lists(st.sampled_from(JSON_PIECES), max_size=12).map("".join))
def test_any_text_is_parsed_or_refused_equally(text):
    check(text.encode("utf-8", "surrogatepass"))


def test_short_texts_are_parsed_or_refused_equally_and_open_strings_in_linear_time():
    for letters in product('[]{},1":', repeat=4):
        check("".join(letters).encode())
    start_s = time.thread_time()
    refuse_many_nodes('"[' + '\\"[' * 1_000_000 + "\\")
    assert time.thread_time() - start_s < 5


@pytest.mark.parametrize(
    "raw",
    [
        *(b"\xff", b'["a\xff"]', b"[1, " + b"9" * 5_000 + b"]", b"", b'{"a":1,"a":2}', b"[1,]"),
        *(b"[" * 250 + b"]" * 250, b"[" * 100_000, b"1e999", b"-0", b"1.0000000000000001"),
    ],
)
def test_invalid_bytes_are_refused_equally(raw):
    check(raw)


@pytest.mark.parametrize("node", ["[]", "{}", '{"a": "]}::"}', '["[\\"{"]'])
def test_number_of_nodes_is_limited(node, monkeypatch):
    monkeypatch.setattr(json_route, "MAX_NODES", 9)
    most = 8 // (2 if "a" in node else 1)  # one of 9 is the enclosing array
    refuse_many_nodes(f"[{','.join([node] * most)}]")
    with pytest.raises(HTTPException, match="more than 9 arrays"):
        refuse_many_nodes(f"[{','.join([node] * (most + 1))}]")


# ---- large bodies do not block the event loop ----------------------------------------------------

PAD = "x" * MAX_INLINE_BYTES


@pytest.fixture
def readers(monkeypatch):
    seen = []

    def recording(work):
        def recorded(value, **options):
            seen.append(threading.current_thread().name)
            return work(value, **options)

        return recorded

    monkeypatch.setattr(json_route, "from_json", recording(json_route.from_json))
    monkeypatch.setattr(CompletionBody, "model_validate", recording(CompletionBody.model_validate))
    return seen


@pytest.fixture
def post_all(send):
    return lambda path, *contents: send(
        *(("POST", path, {"content": content, "headers": JSON}) for content in contents)
    )


def test_large_body_is_parsed_and_validated_outside_the_event_loop_thread(post_all, readers):
    [response] = post_all(COMPLETIONS, json.dumps({"prompt": [5] * MAX_INLINE_BYTES}).encode())

    assert len(readers) >= 2
    assert all(name.startswith("quire-text") for name in readers)
    assert f"{MAX_INLINE_BYTES} tokens" in response.text

    readers.clear()
    assert post_all(COMPLETIONS, b'{"prompt": [5], "max_tokens": 1}')[0].status_code == 200
    assert set(readers) == {threading.main_thread().name}


def test_event_loop_runs_while_a_large_body_is_read(serve, monkeypatch):
    """Parsing and validation hold the GIL for 0.05 s each; the checks of the values do not."""
    beats, during = 0, []
    read = json_route.read_large

    def counted(raw, model):
        before = beats
        value = read(raw, model)
        during.append(beats - before)
        return value

    async def beat():
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0.001)

    async def main(client):
        task = asyncio.create_task(beat())
        body = b'{"prompt": [' + b"1, " * 2_000_000 + b"1]}"
        response = await client.post(COMPLETIONS, content=body, headers=JSON)
        task.cancel()
        return response.status_code

    monkeypatch.setattr(json_route, "read_large", counted)
    assert serve(main) == 400
    assert during[0] >= 5


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "Once", "max_tokens": 3, "temperature": 0}),
        (CHATS, {"messages": [USER], "max_tokens": 3, "temperature": 0}),
        ("/tokenize", {"prompt": "Once", "return_token_strs": True}),
        ("/detokenize", {"tokens": [5, 6]}),
    ],
)
def test_large_and_small_bodies_have_equal_responses(post_all, readers, path, body):
    large, small = map(ok, post_all(path, *(json.dumps(body | {"user": u}) for u in (PAD, ""))))
    assert any(name.startswith("quire-text") for name in readers)
    names = ("choices", "tokens", "prompt")
    assert [large.get(n) for n in names] == [small.get(n) for n in names]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, '"prompt": "a", "n": 0'),
        (COMPLETIONS, '"prompt": ["a", 1]'),
        (COMPLETIONS, '"prompt": "a", "logit_bias": {"x": 1, "y": 2}'),
        (COMPLETIONS, '"prompt": "a", "temprature": 1'),
        (COMPLETIONS, '"max_tokens": "many", "n": "few"'),
        (CHATS, '"messages": [{"content": 5}]'),
        (CHATS, '"messages": [5, 6, 7]'),
        ("/detokenize", '"tokens": "text"'),
    ],
)
def test_large_and_small_bodies_have_equal_errors(post_all, path, fields):
    large, small = post_all(path, f'{{{fields}, "user": "{PAD}"}}', f"{{{fields}}}")
    assert large.status_code == small.status_code == 400
    assert large.json() == small.json()
    assert large.json()["error"]["param"] is not None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (f'{{"user": "{PAD}", "prompt": "a",}}', "property name enclosed in double quotes at ch"),
        (f'{{"user": "{PAD}", "seed": {"9" * 5_000}}}', "more than 4,300 digits"),
        ("[" * len(PAD) * 2, "nested too deep"),
        (f'["{PAD}"]', "expected a JSON object"),
        (json.dumps({f"field-{n}": n for n in range(9_000)}), "at most 64 may be unknown"),
        (json.dumps({"prompt": "a", "x": [[]] * 140_000}), "more than 131,072 arrays"),
        (json.dumps({"prompt": "a", "x": dict.fromkeys(map(str, range(140_000)))}), "131,072"),
    ],
)
def test_invalid_large_body_is_refused_with_the_reason(post_all, body, message):
    [response] = post_all(COMPLETIONS, body)
    assert response.status_code == 400
    assert len(response.content) < 2_000
    assert message in response.json()["error"]["message"]


MANY = 20_000


@pytest.mark.parametrize(
    ("model", "field", "value"),
    [
        (CompletionBody, "allowed_token_ids", [""] * MANY),
        (CompletionBody, "stop_token_ids", [""] * MANY),
        (CompletionBody, "stop", [1] * MANY),
        (CompletionBody, "bad_token_ids", [[""] * MANY]),
        (CompletionBody, "bad_token_ids", [""] * MANY),
        (CompletionBody, "logit_bias", {f"x{n}": "" for n in range(MANY)}),
        (CompletionBody, "prompt", [["x"]] * MANY),
        (ChatBody, "messages", [1] * MANY),
        (ChatBody, "messages", [{"role": "u", "content": [1] * MANY}]),
        (ChatBody, "messages", [{"role": "u", "content": [{"type": "x"}] * MANY}]),
        (TokenizeBody, "messages", [1] * MANY),
        (DetokenizeBody, "tokens", [""] * MANY),
    ],
)
def test_validation_of_a_list_stops_at_the_first_errors(model, field, value):
    least = {"prompt": "a"} if model is CompletionBody else {}
    with pytest.raises(ValidationError) as refused:
        model.model_validate(least | {field: value})
    assert refused.value.error_count() <= 3


# ---- any JSON in the fields of structures and tools gets 200 or 400 ------------------------------

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
        *("start: <|doc|>", "start: /(/", 'start: "a" start', "root ::= root", "$", "\\p{L}+"),
        "(?i)",
    ]
)
TYPES = ["object", "array", "string", "integer", "#", "#/$defs/a", "auto", "required", "none"]
TEXTS = st.one_of(KEYWORDS, GRAMMARS, st.sampled_from(TYPES), st.text(max_size=12))
JSON_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(-9, 9), TEXTS),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(KEYWORDS | TEXTS, inner, max_size=4)
    ),
    max_leaves=8,
)
FUNCTIONS = st.fixed_dictionaries({"name": TEXTS, "parameters": JSON_VALUES})
TOOLS = st.lists(
    st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTIONS}),
    min_size=1,
    max_size=2,
)
CALLS = st.lists(st.fixed_dictionaries({"id": TEXTS, "function": JSON_VALUES}), max_size=2)
MESSAGE = st.fixed_dictionaries({"role": TEXTS, "tool_calls": CALLS | JSON_VALUES})
SCHEMAS = st.dictionaries(KEYWORDS, JSON_VALUES, max_size=4)
PATHS = st.sampled_from([COMPLETIONS, CHATS])
SHAPED = st.one_of(
    st.fixed_dictionaries({"guided_json": SCHEMAS}, optional={"guided_whitespace_pattern": TEXTS}),
    st.fixed_dictionaries({"guided_regex": TEXTS}),
    st.fixed_dictionaries({"guided_grammar": TEXTS}),
    st.fixed_dictionaries({"guided_choice": st.lists(TEXTS, max_size=3)}),
    SCHEMAS.map(
        lambda one: {"response_format": {"type": "json_schema", "json_schema": {"schema": one}}}
    ),
)
ANY_FIELDS = st.dictionaries(
    st.sampled_from(sorted(STRUCTURE_FIELDS)), JSON_VALUES, min_size=1, max_size=2
)
TOOL_FIELDS = st.fixed_dictionaries(
    {"tools": TOOLS | JSON_VALUES, "tool_choice": TEXTS | JSON_VALUES},
    optional={"parallel_tool_calls": st.booleans() | JSON_VALUES},
)
CHAT_FIELDS = st.fixed_dictionaries({"messages": st.lists(MESSAGE, min_size=1, max_size=2)})
BODIES = st.one_of(
    st.tuples(PATHS, SHAPED),
    st.tuples(PATHS, ANY_FIELDS),
    st.tuples(st.just(CHATS), TOOL_FIELDS),
    st.tuples(st.just(CHATS), CHAT_FIELDS),
)


@pytest.mark.slow
@given(bodies=st.lists(BODIES, min_size=8, max_size=16))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_value_gets_200_or_400(send, bodies):
    plain = {COMPLETIONS: {"prompt": "<|doc|>Once"}, CHATS: {"messages": [USER]}}
    contents = [json.dumps({"max_tokens": 2} | plain[path] | fields) for path, fields in bodies]
    pairs = zip(bodies, contents, strict=True)

    responses = send(
        *(("POST", path, {"content": text, "headers": JSON}) for (path, _), text in pairs)
    )

    for content, response in zip(contents, responses, strict=True):
        assert response.status_code in (200, 400), (content, response.text)
        assert response.status_code == 200 or response.json()["error"]["message"]


# ---- every refusal sets `param` ------------------------------------------------------------------

SOURCE = Path(quire.__file__).parent
MODULES = (
    *("config/sampling_params.py", "engine/input_processor.py", "eviction/eviction_rules.py"),
    *("scheduler/request.py", "scheduler/peaks.py", "tenancy/accounts.py", "models/tokenizer.py"),
    *sorted(str(path.relative_to(SOURCE)) for path in (SOURCE / "serve").glob("*.py")),
)
WITHOUT_A_FIELD = {
    "tenancy/accounts.py": 2,  # the tenant follows from the API key
    "serve/streaming.py": 1,  # several options together leave no token
    "serve/fields.py": 1,  # too many unknown fields: no single field
}


def test_every_refusal_that_a_body_can_cause_names_a_field():
    without = defaultdict(list)
    for name in MODULES:
        for call in ast.walk(ast.parse((SOURCE / name).read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                named = "param" in {word.arg for word in call.keywords}
                if call.func.id in ("RequestError", "NeverFits") and not named:
                    without[name].append(call.lineno)
    assert {name: len(lines) for name, lines in without.items()} == WITHOUT_A_FIELD, without
