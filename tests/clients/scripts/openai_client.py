import http.server
import json
import threading
from typing import Literal

import httpx
import openai
from checks import MESSAGES, MODEL, PROMPT, URL, check, run
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60)
GREEDY = {"model": MODEL, "temperature": 0}
LONG = 600  # tokens of structured outputs: quire-tiny fills them with white space
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "the weather of a city", "parameters": CITY},
}


class Cat(BaseModel):
    """A cat."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=30)
    colour: Literal["black", "white"]


def complete(**options: object) -> object:
    return client.completions.create(**{**GREEDY, "prompt": PROMPT} | options)


def ask(**options: object) -> object:
    return client.chat.completions.create(**{**GREEDY, "messages": MESSAGES} | options)


@check
def models() -> None:
    [model] = client.models.list().data
    assert model.id == MODEL == client.models.retrieve(MODEL).id


@check
def completion_stream_and_usage() -> None:
    whole = complete(max_tokens=9)
    chunks = list(complete(max_tokens=9, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 9


@check
def several_prompts_n_and_echo() -> None:
    found = client.completions.create(
        model=MODEL, prompt=[PROMPT, "<|doc|>The sea"], n=3, max_tokens=4, seed=1, echo=True
    )
    assert [c.index for c in found.choices] == list(range(6))
    assert all(c.text.startswith("<|doc|>The sea") for c in found.choices[3:])


@check
def logprobs_of_completions_and_chats() -> None:
    logprobs = complete(max_tokens=3, logprobs=2).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 3
    assert all(max(top.values()) <= 0 for top in logprobs.top_logprobs)
    content = ask(max_tokens=3, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [len(token.top_logprobs) for token in content] == [2, 2, 2]


@check
def stop_ends_the_output() -> None:
    whole = complete(max_tokens=30).choices[0].text
    stop = whole[8:12]
    [found] = complete(max_tokens=30, stop=[stop]).choices
    assert (found.finish_reason, found.text) == ("stop", whole[: whole.index(stop)])


@check
def seed_repeats_the_output() -> None:
    found = [complete(max_tokens=12, temperature=1, seed=seed) for seed in (3, 3, 4)]
    texts = [one.choices[0].text for one in found]
    assert texts[0] == texts[1] != texts[2]


@check
def chat_stream() -> None:
    whole, *chunks = ask(max_completion_tokens=6), *ask(max_completion_tokens=6, stream=True)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == whole.choices[0].message.content


@check
def stream_helper_of_chats() -> None:
    with client.chat.completions.stream(messages=MESSAGES, max_tokens=6, **GREEDY) as stream:
        kinds = {event.type for event in stream}
        final = stream.current_completion_snapshot
    assert {"chunk", "content.delta"} <= kinds
    assert final.choices[0].message.content


@check
def parse_returns_the_object() -> None:
    found = client.chat.completions.parse(
        messages=MESSAGES, response_format=Cat, max_tokens=LONG, **GREEDY
    )
    cat = found.choices[0].message.parsed
    assert isinstance(cat, Cat)
    assert 0 <= cat.age <= 30


@check
def json_object_and_extra_body() -> None:
    found = ask(response_format={"type": "json_object"}, max_tokens=60)
    assert found.choices[0].message.content.startswith("{")
    expression = {"regex": r'\{"a": [0-9]{2}\}'}
    found = ask(max_tokens=60, extra_body={"structured_outputs": expression})
    assert 10 <= json.loads(found.choices[0].message.content)["a"] + 10 < 110


@check
def tools_named_and_required() -> None:
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        found = ask(tools=[WEATHER], tool_choice=choice, max_tokens=LONG)
        [call] = found.choices[0].message.tool_calls[:1]
        assert call.function.name == "weather"
        assert '"city"' in call.function.arguments


@check
def parse_returns_the_arguments_of_a_tool() -> None:
    tools = {"tools": [openai.pydantic_function_tool(Cat)], "parallel_tool_calls": False}
    found = client.chat.completions.parse(
        messages=MESSAGES, tool_choice="required", max_tokens=LONG, **tools, **GREEDY
    )
    [call] = found.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Cat)


@check
def tools_in_a_stream() -> None:
    chunks = ask(tools=[WEATHER], tool_choice="required", max_tokens=LONG, stream=True)
    deltas = [c.choices[0].delta.tool_calls or [] for c in chunks if c.choices]
    calls = [call for delta in deltas for call in delta]
    assert calls[0].function.name == "weather"
    assert '"city"' in "".join(call.function.arguments or "" for call in calls)


@check
def answer_of_a_tool_is_read() -> None:
    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    call = {"id": "call_1", "type": "function", "function": function}
    begun = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
    found = ask(messages=[*MESSAGES, begun, result], tools=[WEATHER], max_tokens=4)
    assert found.usage.completion_tokens == 4


@check
def responses_api() -> None:
    found = client.responses.create(model=MODEL, input="Once upon a time", max_output_tokens=6)
    assert found.output_text
    with client.responses.stream(model=MODEL, input="Once", max_output_tokens=6) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    parsed = client.responses.parse(
        model=MODEL, input="Once", text_format=Cat, max_output_tokens=LONG
    )
    assert isinstance(parsed.output_parsed, Cat)


@check
def fields_without_effect_are_named_in_a_header() -> None:
    options = {"reasoning_effort": "low", "verbosity": "medium", "metadata": {"a": "b"}}
    options |= {"user": "u", "store": False, "service_tier": "auto", "tools": []}
    options["response_format"] = {"type": "text"}
    extra = {"chat_template_kwargs": {"enable_thinking": False}, "do_sample": False}
    response = client.chat.completions.with_raw_response.create(
        messages=MESSAGES, max_completion_tokens=3, extra_body=extra, **options, **GREEDY
    )
    ignored = "chat_template_kwargs.enable_thinking, reasoning_effort"
    assert response.headers["x-ignored-fields"] == ignored
    assert response.parse().usage.completion_tokens == 3


@check
def embeddings_have_the_default_encoding_of_the_client() -> None:
    coded = client.embeddings.create(model=MODEL, input=[PROMPT, "<|doc|>The king"])
    plain = client.embeddings.create(model=MODEL, input=PROMPT, encoding_format="float")
    assert [one.index for one in coded.data] == [0, 1]
    pairs = zip(coded.data[0].embedding, plain.data[0].embedding, strict=True)
    assert all(abs(one - other) <= 1e-3 for one, other in pairs)
    assert coded.usage.total_tokens == coded.usage.prompt_tokens > 0


def raised(kind: type[Exception], **options: object) -> Exception:
    try:
        client.completions.create(**{"model": MODEL, "prompt": PROMPT} | options)
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


@check
def errors_have_the_clients_types() -> None:
    assert raised(openai.BadRequestError, temperature=-1).param == "temperature"
    assert raised(openai.BadRequestError, n=10**6).param == "n"
    assert raised(openai.BadRequestError, prompt=[3] * 100_000).param == "prompt"
    assert raised(openai.NotFoundError, model="gpt-9").param == "model"


@check
def timeout_cancels_the_request() -> None:
    raised(openai.APITimeoutError, max_tokens=2_000, timeout=0.2, extra_body={"ignore_eos": True})
    client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1)
    await_no_load()


@check
def closing_a_stream_cancels_its_request() -> None:
    with complete(stream=True, max_tokens=3_000, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))
    await_no_load()


def await_no_load() -> None:
    for _ in range(100):
        if httpx.get(f"{URL}/load").json() == {"server_load": 0}:
            return
    raise AssertionError("the request runs on")


@check
def client_retries_after_503() -> None:
    """A proxy refuses the first request, as a server with a full queue."""
    statuses, kind = [], {"Content-Type": "application/json"}

    class Proxy(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status, content = 503, b'{"error": {"message": "full"}}'
            if statuses:
                found = httpx.post(f"{URL}{self.path}", content=body, headers=kind)
                status, content = found.status_code, found.content
            statuses.append(status)
            self.send_response(status)
            headers = kind | {"Retry-After": "1", "Content-Length": str(len(content))}
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

    proxy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{proxy.server_address[1]}/v1"
    retrying = openai.OpenAI(base_url=url, api_key="none", max_retries=2)
    found = retrying.completions.create(model=MODEL, prompt=PROMPT, max_tokens=2)
    proxy.shutdown()
    assert found.usage.completion_tokens == 2
    assert statuses == [503, 200]


run()
