import pytest

from quire.errors import InvariantError
from serve.conftest import CHATS, COMPLETIONS, JSON, PROMPT, USER, error_of

STRICT = {"limit_max_tokens": False}
BEAMS = {"use_beam_search": True}
LONG_NAME = "max_completion_tokens"


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"prompt": None}, "prompt", "a text, a list of texts"),
        ({"prompt": []}, "prompt", "a text, a list of texts"),
        ({"prompt": ["a", 1]}, "prompt", "a text, a list of texts"),
        ({"prompt": [True]}, "prompt", "a text, a list of texts"),
        ({"prompt": [[1], []]}, "prompt", "a text, a list of texts"),
        ({"prompt": [["x"] * 5]}, "prompt", "a text, a list of texts"),
        ({"prompt": ""}, "prompt", "at least one token"),
        ({"prompt": "\ud800"}, "prompt", "Unicode"),
        ({"prompt": "\ud800", "add_special_tokens": False}, "prompt", "Unicode"),
        ({"prompt": [5_000]}, "prompt", "from 0 to 2047"),
        ({"prompt": [-1], "echo": True}, "prompt", "2047"),
        ({"prompt": [3] * 5_000}, "prompt", "context"),
        (STRICT | {"max_tokens": 1_000}, "max_tokens", "B of KV, the whole KV memory has"),
        (STRICT | {"max_tokens": 1_000, "stream": True}, "max_tokens", "the whole KV memory has"),
        (STRICT | {"max_tokens": 5_000}, "max_tokens", "fit into the KV memory after a prompt"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens=0"),
        ({"max_tokens": "many"}, "max_tokens", "integer"),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"top_p": 0}, "top_p", "top_p"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 128, "prompt": [[3]] * 17}, "prompt", "exceed the limit of 2048"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", "integer"),
        ({"logit_bias": {"5000": 1}}, "logit_bias", "vocabulary ends at 2047"),
        ({"stop": [""]}, "stop", "stop"),
        ({"stop": ["x"] * 1_025}, "stop", "at most 1024"),
        ({"stop": [1]}, "stop.0", "expected a valid string, got 1"),
        ({"stop": 1}, "stop", "stop: expected a valid string or a valid list, got 1"),
        ({"stop_token_ids": [1] * 1_025}, "stop_token_ids", "at most 1024"),
        ({"bad_token_ids": [[1]] * 1_025}, "bad_token_ids", "at most 1024"),
        ({"deadline_s": -1}, "deadline_s", "above 0"),
        ({"cache_salt": "x" * 129}, "cache_salt", "128 characters"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs `stream`"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo", "cannot be streamed"),
        ({"best_of": 2, "n": 3}, "best_of", "less than n=3"),
        ({"suffix": "the end"}, "suffix", "not supported"),
        ({"length_penalty": 2.0}, "length_penalty", "is an option of beam search"),
        (STRICT | {LONG_NAME: 1_000}, LONG_NAME, "lower max_completion_tokens"),
        ({LONG_NAME: 1, "min_tokens": 2}, "min_tokens", "min_tokens=2 is more than"),
        ({"min_tokens": 17}, "min_tokens", "more than max_tokens=16"),
        ({"prompt": [3] * 600, "max_tokens": 1}, "prompt", "600 prompt tokens"),
        ({"prompt": [3] * 600, "max_tokens": 0, "echo": True}, "prompt", "600 prompt tokens"),
        ({"prompt": [3] * 4_096}, "prompt", "fill the model's whole context"),
        (STRICT | {"prompt": [3] * 500, "max_tokens": 100}, "max_tokens", "500 prompt tokens"),
        (STRICT | {"prompt": [3] * 500}, "prompt", "500 prompt tokens"),
        ({"evict": "nothing"}, "evict", "unknown eviction policy"),
        ({"evict": ""}, "evict", "expected a policy"),
        ({"evict": "h2o:cap=4"}, "evict", "this engine serves full"),
        (BEAMS | {"n": 128}, "n", "128 beams"),
        (BEAMS | {"beam_width": 100}, "beam_width", "100 beams"),
        (BEAMS | {"beam_width": 2, "n": 3}, "beam_width", "beam_width=2 is less than n=3"),
        (BEAMS | {"beam_width": 2, "best_of": 3}, "beam_width", "both set"),
        (BEAMS | {"max_tokens": 0, "echo": True}, "max_tokens", "raise max_tokens"),
        (BEAMS | {"stop": ["a"]}, "stop", "stop is not supported"),
        (BEAMS | {"temperature": 1}, "temperature", "an option of random sampling"),
        (BEAMS | {"top_p": 0.5}, "top_p", "an option of random sampling"),
        ({"beam_width": 2}, "beam_width", "is an option of beam search"),
        ({"cache_salt": "\n"}, "cache_salt", "printable"),
        ({"cache_salt": "\u200b"}, "cache_salt", "printable"),
    ],
)
def test_invalid_completion_is_refused(post, options, param, message):
    error = error_of(post(COMPLETIONS, **{"prompt": PROMPT} | options), 400)
    assert (error["type"], error["param"]) == ("BadRequestError", param)
    assert message in error["message"]


def said(content):
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 1_000}),
        (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 1_000, "n": 2, "seed": 1}),
        (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 1_000, "use_beam_search": True}),
        (COMPLETIONS, {"prompt": [3] * 500, "max_tokens": 100}),
        (COMPLETIONS, {"prompt": [PROMPT, PROMPT], "max_tokens": 1_000}),
        (CHATS, {"messages": [USER], "max_completion_tokens": 1_000}),
    ],
)
def test_output_longer_than_the_kv_memory_is_limited_and_says_so(post, endpoint, body):
    answer = post(endpoint, **body, ignore_eos=True).json()

    usage, finish = answer["usage"], {choice["finish_reason"] for choice in answer["choices"]}
    assert usage["max_tokens_limit"] == "kv_memory"
    assert 1 <= usage["max_tokens"] < 1_000
    strict = body | {"limit_max_tokens": False, "ignore_eos": True}
    strict.pop("max_completion_tokens", None)
    for more, status in ((0, 200), (1, 400)):  # the limit fits exactly
        response = post(endpoint, **strict | {"max_tokens": usage["max_tokens"] + more})
        assert response.status_code == status, response.text
    assert usage["completion_tokens"] == usage["max_tokens"] * len(answer["choices"])
    assert finish == {"length"}


def test_output_that_fits_has_no_limit(post):
    usage = post(COMPLETIONS, prompt=PROMPT, max_tokens=4).json()["usage"]
    assert not {"max_tokens", "max_tokens_limit"} & set(usage)


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"messages": []}, "messages", "messages: expected at least 1 item, got 0"),
        ({"messages": [{"content": "x"}]}, "messages.0.role", "required"),
        (
            {"messages": [USER, USER | {"role": "usr"}]},
            "messages.1.role",
            "expected system, developer, user, assistant, tool or function, got 'usr'",
        ),
        ({"messages": [USER, {"role": "user", "contnt": "x"}]}, "messages.1.contnt", "`content`"),
        (said(5), "messages.0.content", "got 5"),
        (said([{"type": "text"}]), "messages.0.content.0.text", "required"),
        (
            said([{"type": "image_url", "image_url": {"url": "data:,"}}]),
            "messages.0.content.0.type",
            "messages.0.content.0.type: expected text, got image_url: images, audio and files are "
            "not supported",
        ),
        ({"messages": [USER] * 16_385}, "messages", "at most 16384"),
        (said("\ud800"), "messages.0.content", "not Unicode"),
        ({"messages": [USER] * 3_000}, "messages", "prompt tokens"),
        (STRICT | {"max_tokens": 1_000}, "max_tokens", "lower max_tokens"),
        ({LONG_NAME: 0}, LONG_NAME, "max_completion_tokens=0"),
        ({"top_logprobs": 2}, "top_logprobs", "needs `logprobs`"),
    ],
)
def test_invalid_chat_is_refused(post, options, param, message):
    error = error_of(post(CHATS, **{"messages": [USER]} | options), 400)
    assert error["param"] == param
    assert message in error["message"]


HUGE = (10**30, -(10**30), 2**63, 10**400)
INTEGERS = (
    *("max_tokens", "max_completion_tokens", "min_tokens", "top_k", "seed", "priority", "n"),
    *("best_of", "beam_width", "logprobs", "top_logprobs", "deadline_s"),
    *("allowed_token_ids", "stop_token_ids", "bad_token_ids", "logit_bias"),
)
SHAPES = {
    "allowed_token_ids": lambda number: [number],
    "stop_token_ids": lambda number: [number],
    "bad_token_ids": lambda number: [[number]],
    "logit_bias": lambda number: {str(number): 1},
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
@pytest.mark.parametrize("name", INTEGERS)
def test_huge_integers_are_refused_by_name(send, path, name):
    """With a temperature, because a greedy request does not read `top_k`."""
    body = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": [USER]}
    body |= {"temperature": 1, "max_tokens": 1}
    shape = SHAPES.get(name, lambda number: number)
    responses = send(*(("POST", path, {"json": body | {name: shape(n)}}) for n in HUGE))

    for number, response in zip(HUGE, responses, strict=True):
        if name in ("seed", "deadline_s") and response.status_code == 200:
            assert 0 < number < 10**31  # 2**63 is a valid seed, and 10**30 s a valid time
            continue
        error = error_of(response, 400)
        assert str(error["param"]).startswith(name)
        assert name in error["message"]


UNUSABLE = ("1e-320", "1e-40", "NaN", "Infinity", "1e999", "-1e-320")
NUMBERS = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "length_penalty", "logit_bias"),
)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_float32_cannot_hold_are_refused_by_name(send, name):
    template = '{{"7": {}}}' if name == "logit_bias" else "{}"
    beams = ', "use_beam_search": true, "n": 2' if name == "length_penalty" else ""
    values = [template.format(number) for number in UNUSABLE]
    contents = [f'{{"prompt": "Once", "{name}": {value}{beams}}}' for value in values]

    for response in send(
        *(("POST", COMPLETIONS, {"content": c, "headers": JSON}) for c in contents)
    ):
        error = error_of(response, 400)
        assert error["param"] in (name, f"{name}.7")
        assert name in error["message"]


@pytest.mark.parametrize(
    "options",
    [
        *({"repetition_penalty": 1e-6}, {"repetition_penalty": 1e6}),
        *({"temperature": 1e-38 * 2}, {"temperature": 3e38}),
        *(BEAMS | {"n": 2, "length_penalty": p, "max_tokens": 8} for p in (10, -10)),
        {"top_k": 2**31 - 1, "temperature": 1, "seed": 2**64 - 1, "priority": 2**63 - 1},
        {"deadline_s": 1e300},
    ],
)
def test_range_limits_are_accepted(complete, options):
    assert complete(**{"ignore_eos": True, "seed": 1} | options)["usage"]["completion_tokens"] >= 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 1_000}, "n: expected a number less than or equal to 128, got 1000"),
        ({"n": True}, "n: expected a value other than true or false, got true"),
        ({"metadata": {"a": 1}}, "metadata.a: expected a valid string, got 1"),
        ({"metadata": []}, "metadata: expected a JSON object, got a list"),
        ({"deadline_s": "soon"}, 'deadline_s: expected a valid number, got "soon"'),
        ({"priority": 1.5}, "priority: expected a valid integer, got 1.5"),
        ({"evict": {}}, "evict: expected a valid string, got an object"),
    ],
)
def test_field_of_wrong_type_is_refused_with_its_value(post, options, message):
    assert error_of(post(COMPLETIONS, prompt=PROMPT, **options), 400)["message"] == message


@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, {"prompt": PROMPT}), (CHATS, {"messages": [USER]})]
)
def test_unknown_model_is_not_found(post, path, body):
    error = error_of(post(path, model="gpt-9", **body), 404)
    assert error["type"] == "NotFoundError"
    assert error["message"].startswith("The model `gpt-9` does not exist.")


def test_large_invalid_request_has_a_small_response(post):
    for options, status in (
        *(({"model": "\ud800" * 100_000}, 400), ({"model": "\x00" * 100_000}, 404)),
        *(({"prompt": [["x"]] * 50_000}, 400), ({"stop": [1] * 10_000}, 400)),
        *(({"logit_bias": {"k" * 50_000: "x"}}, 400), ({"seed": 10**400}, 400)),
        ({"messages": [{"role": 1}] * 10_000}, 400),
    ):
        path, body = (CHATS, {}) if "messages" in options else (COMPLETIONS, {"prompt": PROMPT})
        error_of(post(path, **body | options), status)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{prompt", "Expecting property name enclosed in double quotes at character 2"),
        (b'{"prompt":\n a}', "Expecting value at character 13 (line 2, column 2)"),
        (b"", "body: expected a JSON object, got nothing"),
        (b'{"prompt": "\xff"}', "byte 13 is not utf-8"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"seed": ' + b"9" * 5_000 + b"}", "more than 4,300 digits"),
        (b"[1]", "body: expected a JSON object, got a list"),
    ],
)
def test_invalid_json_is_refused_with_the_position(send, content, message):
    [response] = send(("POST", COMPLETIONS, {"content": content, "headers": JSON}))
    error = error_of(response, 400)
    assert message in error["message"]
    assert error["param"] is None


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", None])
def test_body_without_json_content_type_is_refused(send, path, content_type):
    headers = {} if content_type is None else {"content-type": content_type}
    [response] = send(("POST", path, {"content": b'{"prompt": "a"}', "headers": headers}))
    error = error_of(response, 415)
    assert error["type"] == "UnsupportedMediaTypeError"
    assert "send the header Content-Type: application/json" in error["message"]


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/x+JSON"])
def test_json_content_types_are_accepted(send, content_type):
    body = {"content": b'{"prompt": "Once"}', "headers": {"content-type": content_type}}
    assert send(("POST", COMPLETIONS, body))[0].status_code == 200


def test_unknown_paths_and_options_that_fail_an_output_have_the_error_format(get, post, llm):
    error = error_of(get("/v1/images/generations"), 404)
    assert error["type"] == "NotFoundError"
    message = "this server has no path /v1/images/generations: see /docs for its API"
    assert error["message"] == message
    message = f"{COMPLETIONS} does not take GET: use POST"
    assert error_of(get(COMPLETIONS), 405)["message"] == message
    eos = list(llm.model.generation.eos_token_ids)
    response = post(COMPLETIONS, prompt=PROMPT, allowed_token_ids=eos, min_tokens=2)
    assert "leave no token to sample" in error_of(response, 400)["message"]


def test_internal_error_does_not_expose_details(serve, llm, monkeypatch):
    def main(client):
        fails = property(lambda _: 1 / 0)
        monkeypatch.setattr(llm.model.generation.__class__, "temperature", fails)
        return client.post(COMPLETIONS, json={"prompt": PROMPT})

    response = serve(main)

    assert "ZeroDivisionError" in error_of(response, 500)["message"]
    assert "division by zero" not in response.text


def test_dead_engine_is_unhealthy_and_refuses_requests(serve, llm, monkeypatch):
    def broken_step():
        llm.engine.__class__.step(llm.engine)  # the fixture requires an idle engine
        raise InvariantError("off by one page")

    async def main(client):
        before = await client.get("/health")
        monkeypatch.setattr(llm.engine, "step", broken_step)
        body = {"prompt": PROMPT, "max_tokens": 1}
        refusals = [await client.post(COMPLETIONS, json=body) for _ in range(2)]
        after = [await client.get(path) for path in ("/health", "/ready")]
        monkeypatch.undo()
        return before, refusals, after

    before, refusals, after = serve(main)
    assert (before.status_code, before.content) == (200, b"")
    assert [(one.status_code, one.content) for one in after] == [(503, b"")] * 2
    for response in refusals:
        error = error_of(response, 503)
        assert error["type"] == "ServiceUnavailable"
        assert "off by one page" in error["message"]
