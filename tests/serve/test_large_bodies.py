"""Large bodies are parsed in the tokenizer threads and do not block the event loop."""

import asyncio
import json
import threading

import pytest
from pydantic import ValidationError

from quire.serve import json_route
from quire.serve.json_route import MAX_INLINE_BYTES
from quire.serve.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
PAD = "x" * MAX_INLINE_BYTES
MESSAGES = [{"role": "user", "content": "Once"}]


@pytest.fixture
def readers(monkeypatch):
    """Names of the threads that parse and validate bodies."""
    seen = []

    def recording(work):
        def recorded(value, **options):
            seen.append(threading.current_thread().name)
            return work(value, **options)

        return recorded

    monkeypatch.setattr(json_route, "from_json", recording(json_route.from_json))
    monkeypatch.setattr(CompletionBody, "model_validate", recording(CompletionBody.model_validate))
    return seen


def post_all(serve, path, *bodies):
    async def main(client):
        return [await client.post(path, content=body, headers=JSON) for body in bodies]

    return serve(main)


def test_large_body_is_parsed_and_validated_outside_the_event_loop_thread(serve, readers):
    prompt = [5] * MAX_INLINE_BYTES

    [response] = post_all(serve, COMPLETIONS, json.dumps({"prompt": prompt}).encode())

    assert len(readers) >= 2
    assert all(name.startswith("quire-text") for name in readers)
    assert f"{len(prompt)} tokens" in response.text


def test_small_body_is_parsed_in_the_event_loop_thread(serve, readers):
    [response] = post_all(serve, COMPLETIONS, b'{"prompt": [5], "max_tokens": 1}')

    assert response.status_code == 200
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
        return response

    monkeypatch.setattr(json_route, "read_large", counted)
    response = serve(main)

    assert response.status_code == 400
    assert during[0] >= 5


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "Once", "max_tokens": 3, "temperature": 0}),
        (CHATS, {"messages": MESSAGES, "max_tokens": 3, "temperature": 0}),
        ("/tokenize", {"prompt": "Once", "return_token_strs": True}),
        ("/detokenize", {"tokens": [5, 6]}),
    ],
)
def test_large_and_small_bodies_have_equal_responses(serve, readers, path, body):
    large, small = post_all(
        serve, path, json.dumps(body | {"user": PAD}).encode(), json.dumps(body).encode()
    )

    assert large.status_code == small.status_code == 200
    assert any(name.startswith("quire-text") for name in readers)
    names = ("choices", "tokens", "prompt")
    assert [large.json().get(n) for n in names] == [small.json().get(n) for n in names]


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
def test_large_and_small_bodies_have_equal_errors(serve, path, fields):
    large, small = post_all(
        serve, path, f'{{{fields}, "user": "{PAD}"}}'.encode(), f"{{{fields}}}".encode()
    )

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
def test_invalid_large_body_is_refused_with_the_reason(serve, body, message):
    [response] = post_all(serve, COMPLETIONS, body.encode())

    assert response.status_code == 400
    assert len(response.content) < 2_000
    assert message in response.json()["error"]["message"]


LENGTH = 20_000


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompletionBody, {"prompt": "a", "allowed_token_ids": [""] * LENGTH}),
        (CompletionBody, {"prompt": "a", "stop_token_ids": [""] * LENGTH}),
        (CompletionBody, {"prompt": "a", "stop": [1] * LENGTH}),
        (CompletionBody, {"prompt": "a", "bad_token_ids": [[""] * LENGTH]}),
        (CompletionBody, {"prompt": "a", "bad_token_ids": [""] * LENGTH}),
        (CompletionBody, {"prompt": "a", "logit_bias": {f"x{n}": "" for n in range(LENGTH)}}),
        (CompletionBody, {"prompt": [["x"]] * LENGTH}),
        (ChatBody, {"messages": [1] * LENGTH}),
        (ChatBody, {"messages": [{"role": "u", "content": [1] * LENGTH}]}),
        (ChatBody, {"messages": [{"role": "u", "content": [{"type": "x"}] * LENGTH}]}),
        (TokenizeBody, {"messages": [1] * LENGTH}),
        (DetokenizeBody, {"tokens": [""] * LENGTH}),
    ],
)
def test_validation_of_a_list_stops_at_the_first_errors(model, body):
    with pytest.raises(ValidationError) as refused:
        model.model_validate(body)

    assert refused.value.error_count() <= 3
