"""Server-sent events of completions and chats equal the responses without streaming."""

import json

import pytest

from quire.serve.errors import ReplicaLost, error_events

PROMPT = "<|doc|>Once upon a time"
CHAT = {"messages": [{"role": "user", "content": "Once upon a time"}], "max_tokens": 6}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


def joined(chunks, index=0):
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(choice["text"] for choice in choices), choices


def test_completion_chunks_equal_the_whole_completion(stream, complete):
    whole = complete(max_tokens=6)["choices"][0]

    chunks = stream(COMPLETIONS, prompt=PROMPT, max_tokens=6)

    text, choices = joined(chunks)
    assert text == whole["text"]
    assert len(choices) > 1
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [
        "length"
    ]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


def test_chat_stream_starts_with_the_role_and_ends_with_the_finish_reason(stream, chat):
    whole = chat(**CHAT)["choices"][0]

    chunks = stream(CHATS, **CHAT)

    choices = [chunk["choices"][0] for chunk in chunks]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1]["delta"] == {}
    assert choices[-1]["finish_reason"] == "length"
    middle = [choice["delta"] for choice in choices[1:-1]]
    assert all(set(delta) == {"content"} and delta["content"] for delta in middle)
    assert "".join(delta["content"] for delta in middle) == whole["message"]["content"]


def test_several_choices_share_one_stream(stream, complete):
    options = {"prompt": [PROMPT, "<|doc|>The sea"], "n": 2, "temperature": 1.0, "seed": 4}
    options["ignore_eos"] = True
    whole = complete(**options, max_tokens=5)["choices"]

    chunks = stream(COMPLETIONS, **options, max_tokens=5)

    for choice in whole:
        text, choices = joined(chunks, choice["index"])
        assert text == choice["text"]
        assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]


def test_echoed_prompt_is_streamed_first(stream, complete):
    whole = complete(max_tokens=5, echo=True)["choices"][0]["text"]

    chunks = stream(COMPLETIONS, prompt=PROMPT, max_tokens=5, echo=True)

    assert chunks[0]["choices"][0]["text"].startswith(PROMPT)
    assert joined(chunks)[0] == whole


def test_usage_is_in_a_last_chunk_without_choices(stream, complete, chat):
    options = {"include_usage": True}
    long = {"max_tokens": 1_000, "ignore_eos": True}

    limited = stream(COMPLETIONS, prompt=PROMPT, **long, stream_options=options)
    completion = stream(COMPLETIONS, prompt=PROMPT, max_tokens=4, stream_options=options)
    chat_chunks = stream(CHATS, **CHAT, stream_options=options)

    assert completion[-1]["choices"] == chat_chunks[-1]["choices"] == []
    assert limited[-1]["usage"]["max_tokens_limit"] == "kv_memory"
    assert limited[-1]["usage"] == complete(**long)["usage"]
    assert completion[-1]["usage"] == complete()["usage"]
    assert chat_chunks[-1]["usage"] == chat(**CHAT)["usage"]
    assert all("usage" not in chunk for chunk in completion[:-1] + chat_chunks[:-1])


def test_continuous_usage_stats_are_in_every_chunk(stream):
    chunks = stream(
        COMPLETIONS,
        prompt=PROMPT,
        max_tokens=5,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )

    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 5
    assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == 1


def test_streamed_logprobs_equal_the_whole_logprobs(stream, complete):
    whole = complete(max_tokens=6, logprobs=1)["choices"][0]["logprobs"]

    _, choices = joined(stream(COMPLETIONS, prompt=PROMPT, max_tokens=6, logprobs=1))

    for column in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [v for c in choices for v in c["logprobs"][column]] == whole[column]


@pytest.mark.parametrize("text", ["é", "你", "😀"])
def test_incomplete_characters_are_held_back_with_their_logprobs(stream, llm, text):
    """The bytes of a character are generated one by one: no chunk has an incomplete character."""
    ids = llm.encode(text)
    assert len(ids) > 1

    chunks = stream(CHATS, **CHAT | {"max_tokens": 4}, logprobs=True, allowed_token_ids=ids)

    contents = [c["choices"][0]["delta"].get("content", "") for c in chunks]
    logprobs = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    tokens = [entry for part in logprobs for entry in part["content"]]
    raw = b"".join(bytes(entry["bytes"]) for entry in tokens)
    assert len(tokens) == 4
    assert len(raw) == 4
    assert "".join(contents) == raw.decode(errors="replace")


LINE_ENDS = "\u2028\u2029\x85\v\f\x1c\x1d\x1e\r\n"
"""Characters at which `str.splitlines` splits, and with it many clients of streams."""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": f"<|doc|>a{LINE_ENDS}", "echo": True}),
        (CHATS, CHAT),
        ("/v1/responses", {"input": "A", "metadata": {f"a{LINE_ENDS}": f"b{LINE_ENDS}"}}),
        ("/v1/messages", CHAT),
    ],
)
def test_line_boundaries_of_unicode_do_not_split_events(post, path, body):
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    options = {"structured_outputs": {"choice": ["a\u2028\u2029\x85b"]}, limit: 40, "stream": True}
    response = post(path, **body | options)

    assert response.status_code == 200, response.text
    lines = [line for line in response.text.splitlines() if line not in ("", "data: [DONE]")]
    events = [line for line in lines if not line.startswith("event: ")]
    assert all(json.loads(line.removeprefix("data: ")) for line in events)
    assert all(f"\\u{ord(end):04x}" in response.text for end in "\u2028\u2029\x85")


def test_line_boundaries_of_unicode_do_not_split_errors():
    for path in (COMPLETIONS, "/v1/responses", "/v1/messages"):
        content = error_events(ReplicaLost(f"a{LINE_ENDS}b"), path).decode()

        assert len(content.splitlines()) == len(content.split("\n")) - 1


def test_failed_output_ends_the_stream_with_an_error(stream, llm):
    """min_tokens masks the EOS tokens, which are the only allowed tokens."""
    eos = list(llm.model.generation.eos_token_ids)

    chunks = stream(COMPLETIONS, prompt=PROMPT, allowed_token_ids=eos, min_tokens=2)

    assert [list(chunk) for chunk in chunks] == [["error"]]
    assert chunks[0]["error"]["code"] == 400
    assert "leave no token to sample" in chunks[0]["error"]["message"]
