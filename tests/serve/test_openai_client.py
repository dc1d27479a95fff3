"""The unmodified `openai` client over a real socket."""

import socket

import openai
import pytest

from quire.errors import ConfigError
from quire.serve.connection import bind
from serve.conftest import PATIENCE_S, PROMPT, running_server, wait_until

MESSAGES = [{"role": "user", "content": "Once upon a time"}]


@pytest.fixture(scope="module")
def client(llm):
    options = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE_S}
    with (
        running_server(llm) as address,
        openai.OpenAI(base_url=f"{address}/v1", **options) as client,
    ):
        yield client


def test_client_lists_the_model(client):
    [model] = client.models.list().data

    assert client.models.retrieve(model.id).id == model.id == "quire-tiny"


def test_client_completion(client):
    options = {"model": "quire-tiny", "prompt": PROMPT, "max_tokens": 5, "temperature": 0}

    whole = client.completions.create(**options, logprobs=1)
    chunks = list(
        client.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )

    choice = whole.choices[0]
    assert choice.finish_reason == "length"
    assert len(choice.logprobs.token_logprobs) == 5
    assert whole.usage.completion_tokens == 5
    assert "".join(c.choices[0].text for c in chunks if c.choices) == choice.text
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].usage.kv_peak_bytes > 0


def test_client_chat(client):
    options = {"model": "quire-tiny", "messages": MESSAGES, "max_tokens": 5}

    whole = client.chat.completions.create(**options, logprobs=True, top_logprobs=1)
    chunks = list(client.chat.completions.create(**options, stream=True))

    choice = whole.choices[0]
    assert choice.message.role == "assistant"
    assert len(choice.logprobs.content) == 5
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == choice.message.content
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason == "length"


def test_client_extra_body_options_apply(client):
    completion = client.completions.create(
        model="quire-tiny",
        prompt=PROMPT,
        max_tokens=3,
        extra_body={"allowed_token_ids": [352], "top_k": 3, "ignore_eos": True},
    )

    assert completion.usage.completion_tokens == 3
    assert len(set(completion.choices[0].text.split())) == 1


def test_client_fields_without_effect_are_accepted(client):
    response = client.chat.completions.with_raw_response.create(
        model="quire-tiny",
        messages=MESSAGES,
        max_completion_tokens=3,
        reasoning_effort="low",
        verbosity="medium",
        metadata={"a": "b"},
        user="u",
        store=False,
        service_tier="auto",
        tools=[],
        response_format={"type": "text"},
        extra_body={"chat_template_kwargs": {"enable_thinking": False}, "do_sample": False},
    )

    ignored = "chat_template_kwargs.enable_thinking, reasoning_effort"
    assert response.headers["x-ignored-fields"] == ignored
    assert response.parse().usage.completion_tokens == 3


def test_client_raises_its_error_types(client):
    with pytest.raises(openai.BadRequestError, match="top_p") as bad:
        client.completions.create(model="quire-tiny", prompt=PROMPT, top_p=2)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)

    assert bad.value.type == "BadRequestError"


def test_client_raises_an_error_within_a_stream(client, llm):
    eos = list(llm.model.generation.eos_token_ids)
    stream = client.completions.create(
        model="quire-tiny",
        prompt=PROMPT,
        stream=True,
        extra_body={"allowed_token_ids": eos, "min_tokens": 2},
    )

    with pytest.raises(openai.APIError, match="leave no token to sample"):
        list(stream)


def test_closing_the_stream_cancels_the_request(client, llm):
    before = llm.engine.num_generated_tokens
    with client.completions.create(
        model="quire-tiny",
        prompt=PROMPT,
        stream=True,
        max_tokens=400,
        extra_body={"ignore_eos": True},
    ) as stream:
        next(iter(stream))

    wait_until(lambda: not llm.engine.has_work)
    assert llm.engine.num_generated_tokens - before < 400


def test_port_in_use_is_refused_by_number():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        with pytest.raises(ConfigError, match=f"127.0.0.1 port {port}.*--port"):
            bind("127.0.0.1", port)


def test_client_embeddings_with_its_default_encoding(client):
    coded = client.embeddings.create(model="quire-tiny", input=[PROMPT, "<|doc|>The king"])
    plain = client.embeddings.create(model="quire-tiny", input=PROMPT, encoding_format="float")

    assert [one.index for one in coded.data] == [0, 1]
    assert coded.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-3)
    assert coded.usage.total_tokens == coded.usage.prompt_tokens > 0
