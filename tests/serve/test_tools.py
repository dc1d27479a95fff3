"""Tools of chats: forced calls, calls that the model chooses, and streams."""

import json

import jsonschema
import pytest

from quire.sampling.sampler import SampledToken
from quire.serve.tools.parsers import ToolParsers
from serve.conftest import refused

CHATS = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "What is the weather in Rome?"}]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Weather now.", "parameters": WEATHER},
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
OPTIONS = {"messages": MESSAGES, "max_tokens": 250, "temperature": 1.0, "seed": 3}
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


def choice_of(response):
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    return choice


# ---- forced calls --------------------------------------------------------------------------------


def test_required_choice_gives_valid_calls(post):
    """Also for a model whose template does not use tools."""
    response = post(
        CHATS, **OPTIONS, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    )

    choice = choice_of(response)
    [call] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert call["function"]["name"] == "weather"
    jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER)


def test_named_choice_gives_the_arguments_of_the_tool(post):
    choice = choice_of(post(CHATS, **OPTIONS, tools=[CLOCK, TOOL], tool_choice=NAMED))

    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER)


def test_required_choice_selects_one_of_the_tools(post):
    options = OPTIONS | {"n": 2, "max_tokens": 200}

    response = post(
        CHATS, **options, tools=[TOOL, CLOCK], tool_choice="required", parallel_tool_calls=False
    )

    names = {
        call["function"]["name"]
        for choice in response.json()["choices"]
        for call in choice["message"]["tool_calls"] or ()
    }
    assert names <= {"weather", "clock"}
    assert names


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_streamed_forced_call_is_the_whole_call(stream, post, choice):
    body = OPTIONS | {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}

    chunks = stream(CHATS, **body)

    whole = choice_of(post(CHATS, **body))
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


def test_call_that_reaches_max_tokens_has_finish_reason_length(post):
    options = OPTIONS | {"max_tokens": 3}

    choice = choice_of(post(CHATS, **options, tools=[TOOL], tool_choice=NAMED))

    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"


# ---- calls that the model chooses ----------------------------------------------------------------


def test_model_may_call_a_tool(says, post):
    says(f"Wait. {CALL}")

    choice = choice_of(post(CHATS, **OPTIONS, tools=[TOOL]))

    [call] = choice["message"]["tool_calls"]
    assert choice["message"]["content"] == "Wait."
    assert choice["finish_reason"] == "tool_calls"
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome", "unit": "C"}'}


def test_model_may_answer_without_a_tool(says, post):
    says("Sunny.")

    choice = choice_of(post(CHATS, **OPTIONS, tools=[TOOL]))

    assert choice["message"] == {
        "role": "assistant",
        "content": "Sunny.",
        "refusal": None,
        "tool_calls": None,
    }
    assert choice["finish_reason"] == "stop"


def test_streamed_text_and_calls(says, stream):
    says(f"Wait. {CALL}{CALL}")

    chunks = stream(CHATS, **OPTIONS, tools=[TOOL], logprobs=True)

    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Wait."
    parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
    for index in (0, 1):
        texts = [p["function"]["arguments"] for p in parts if p["index"] == index]
        assert json.loads("".join(texts)) == {"city": "Rome", "unit": "C"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    counted = [
        len(chunk["choices"][0]["logprobs"]["content"])
        for chunk in chunks
        if chunk["choices"][0]["logprobs"]
    ]
    assert sum(counted) > 20


def test_without_parallel_calls_only_the_first_is_returned(says, post):
    says(CALL * 2)

    choice = choice_of(post(CHATS, **OPTIONS, tools=[TOOL], parallel_tool_calls=False))

    assert len(choice["message"]["tool_calls"]) == 1


def test_choice_none_returns_calls_as_text(says, post):
    says(CALL)

    choice = choice_of(post(CHATS, **OPTIONS, tools=[TOOL], tool_choice="none"))

    assert choice["message"]["content"] == CALL
    assert choice["message"]["tool_calls"] is None


def test_template_gets_the_tools(hermes, post, llm):
    tokens = post("/tokenize", messages=MESSAGES, tools=[TOOL]).json()["tokens"]

    response = post(CHATS, **OPTIONS | {"max_tokens": 2}, tools=[TOOL])

    assert '"name": "weather"' in llm.model.tokenizer.decode(tokens)
    assert response.json()["usage"]["prompt_tokens"] == len(tokens)


# ---- refusals ------------------------------------------------------------------------------------


def test_tools_are_refused_if_the_template_does_not_use_them(post):
    for choice in (None, "auto"):
        message = refused(post(CHATS, **OPTIONS, tools=[TOOL], tool_choice=choice), "tools")
        assert "chat template does not use tools" in message
    options = OPTIONS | {"max_tokens": 2}
    assert post(CHATS, **options, tools=[TOOL], tool_choice="none").status_code == 200


def test_tools_are_refused_if_the_format_of_calls_is_unknown(post, serve, llm, monkeypatch):
    monkeypatch.setattr(llm.model.tokenizer, "chat_template", "<|doc|>{{ tools }}{{ messages }}")
    body = OPTIONS | {"tools": [TOOL], "max_tokens": 2}

    assert "--tool-parser" in refused(post(CHATS, **body), "tools")

    with_parser = serve(lambda client: client.post(CHATS, json=body), tool_parser="hermes")
    assert with_parser.status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [TOOL] * 200}, "tools", "at most 128"),
        ({"tools": [TOOL], "tool_choice": 5}, "tool_choice", "string"),
        (
            {
                "tools": [TOOL],
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "response_format",
            "both determine",
        ),
        ({"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"}, "guided_regex", "both"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
                ],
                "tool_choice": "required",
            },
            "tools",
            "cannot be compiled",
        ),
        ({"functions": [{"name": "f"}]}, "functions", "use `tools`"),
        ({"function_call": {"name": "f"}}, "function_call", "use `tool_choice`"),
    ],
)
def test_wrong_tools_are_refused_with_their_field(post, fields, param, message):
    assert message in refused(post(CHATS, **OPTIONS, **fields), param)


# ---- detection -----------------------------------------------------------------------------------


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
