"""POST /v1/chat/completions, whole bodies."""

import pytest

from quire.config.sampling_params import SamplingParams
from quire.layout.eviction import KEEP_ALL

MESSAGES = [{"role": "user", "content": "Once upon a time"}]


def python_output(llm, messages=MESSAGES, **options):
    return llm.generate(llm.encode_chat(messages), SamplingParams(**options))[0]


def test_chat_response_has_the_openai_format(chat, llm):
    body = chat()

    output = python_output(llm, max_tokens=4)
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": output.text,
                "refusal": None,
                "tool_calls": None,
            },
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert body["usage"]["prompt_tokens"] == len(output.prompt_token_ids)
    assert body["usage"]["kv_peak_bytes"] == output.usage.kv_peak_bytes > 0


def test_unlimited_output_is_limited_by_the_kv_memory(chat, llm):
    """4 MiB hold fewer tokens than quire-tiny's context: the pool limits the output."""
    content = "word " * 480

    usage = chat(messages=[{"role": "user", "content": content}], max_tokens=None, ignore_eos=True)[
        "usage"
    ]

    longest = llm.engine.scheduler.peaks.longest_request(llm.model.spec.max_positions, KEEP_ALL)
    assert longest < llm.model.spec.max_positions
    assert usage["total_tokens"] == longest


def test_logprobs_list_tokens_with_their_bytes(chat, llm):
    content = chat(logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]

    output = python_output(llm, max_tokens=4, logprobs=2)
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == output.text
    assert [entry["logprob"] for entry in content] == pytest.approx(
        [token.logprob for token in output.logprobs]
    )
    for entry in content:
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["token"] == entry["token"]
    plain = chat(logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in plain] == [[], [], [], []]
