"""Large bodies are read in the threads that tokenize, and do not stop the event loop."""

import asyncio
import json
import threading

import pytest
from pydantic import ValidationError

from quire.serve import json_route, protocol
from quire.serve.json_route import MOST_INLINE_BYTES
from quire.serve.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
PAD = "x" * MOST_INLINE_BYTES
MESSAGES = [{"role": "user", "content": "Once"}]


@pytest.fixture
def readers(monkeypatch):
    """Names of the threads that parse and validate bodies."""
    seen = []

    def noting(work):
        def noted(value):
            seen.append(threading.current_thread().name)
            return work(value)

        return noted

    monkeypatch.setattr(json_route, "loads_in_slices", noting(json_route.loads_in_slices))
    monkeypatch.setattr(json_route.json, "loads", noting(json.loads))
    monkeypatch.setattr(protocol, "_are_ids", noting(protocol._are_ids))
    return seen


def answers(serve, path, *bodies):
    async def main(client):
        return [await client.post(path, content=body, headers=JSON) for body in bodies]

    return serve(main)


def test_a_large_body_is_parsed_and_validated_outside_the_loops_thread(serve, readers):
    prompt = [5] * MOST_INLINE_BYTES

    [response] = answers(serve, COMPLETIONS, json.dumps({"prompt": prompt}).encode())

    assert len(readers) >= 2
    assert all(name.startswith("quire-text") for name in readers)
    assert f"{len(prompt)} tokens" in response.text


def test_a_small_body_is_parsed_at_once(serve, readers):
    [response] = answers(serve, COMPLETIONS, b'{"prompt": [5], "max_tokens": 1}')

    assert response.status_code == 200
    assert set(readers) == {threading.main_thread().name}


def test_the_loop_runs_while_a_large_body_is_parsed(serve, monkeypatch):
    """`json.loads` in a thread would not do: it holds the interpreter's lock until it returns."""
    beats, during = 0, []
    read = json_route.loads_in_slices

    def counted(raw):
        before = beats
        value = read(raw)
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

    monkeypatch.setattr(json_route, "loads_in_slices", counted)
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
def test_a_large_body_is_answered_like_a_small_one(serve, readers, path, body):
    large, small = answers(
        serve, path, json.dumps(body | {"user": PAD}).encode(), json.dumps(body).encode()
    )

    assert large.status_code == small.status_code == 200
    assert any(name.startswith("quire-text") for name in readers)
    names = ("choices", "tokens", "prompt")
    assert [large.json().get(n) for n in names] == [small.json().get(n) for n in names]


@pytest.mark.parametrize(
    ("path", "wrong"),
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
def test_a_large_body_is_refused_like_a_small_one(serve, path, wrong):
    large, small = answers(
        serve, path, f'{{{wrong}, "user": "{PAD}"}}'.encode(), f"{{{wrong}}}".encode()
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
        (f'["{PAD}"]', "valid dictionary"),
        (json.dumps({f"field-{n}": n for n in range(9_000)}), "at most 64 may be unknown"),
        (json.dumps({"prompt": "a", "x": [[]] * 140_000}), "more than 131,072 arrays"),
        (json.dumps({"prompt": "a", "x": dict.fromkeys(map(str, range(140_000)))}), "131,072"),
    ],
)
def test_what_is_wrong_with_a_large_body_as_a_whole_is_said(serve, body, message):
    [response] = answers(serve, COMPLETIONS, body.encode())

    assert response.status_code == 400
    assert len(response.content) < 2_000
    assert message in response.json()["error"]["message"]


NUMBER = 20_000


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompletionBody, {"prompt": "a", "allowed_token_ids": [""] * NUMBER}),
        (CompletionBody, {"prompt": "a", "stop_token_ids": [""] * NUMBER}),
        (CompletionBody, {"prompt": "a", "stop": [1] * NUMBER}),
        (CompletionBody, {"prompt": "a", "bad_token_ids": [[""] * NUMBER]}),
        (CompletionBody, {"prompt": "a", "bad_token_ids": [""] * NUMBER}),
        (CompletionBody, {"prompt": "a", "logit_bias": {f"x{n}": "" for n in range(NUMBER)}}),
        (CompletionBody, {"prompt": [["x"]] * NUMBER}),
        (ChatBody, {"messages": [1] * NUMBER}),
        (ChatBody, {"messages": [{"role": "u", "content": [1] * NUMBER}]}),
        (ChatBody, {"messages": [{"role": "u", "content": [{"type": "x"}] * NUMBER}]}),
        (TokenizeBody, {"messages": [1] * NUMBER}),
        (DetokenizeBody, {"tokens": [""] * NUMBER}),
    ],
)
def test_the_first_error_of_a_list_is_the_last_one_looked_for(model, body):
    with pytest.raises(ValidationError) as wrong:
        model.model_validate(body)

    assert wrong.value.error_count() <= 3
