"""Records of a batch output file, in the plain and in OpenAI's format."""

import json
from dataclasses import fields, replace

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from quire.batch.lines import BatchLine, LineHead
from quire.batch.records import BatchTally, error_record, is_error, output_record
from quire.sampling.outputs import Choice, RequestOutput, Usage, merged
from quire.serve.responses import usage_body

COUNTS = {
    "prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 1, "preemptions": 4,
    "evictions": 5, "evicted_tokens": 0, "recomputed_tokens": 6, "kv_peak_bytes": 64,
    "first_token_s": 0.5, "total_s": 1.0,
}  # fmt: skip
USAGE = Usage(**COUNTS)


def output(**changes: object) -> RequestOutput:
    plain: dict = {"request_id": "r", "prompt_token_ids": (1, 2, 3), "usage": USAGE}
    plain |= {"text": "Hello", "token_ids": (4, 5), "finish_reason": "stop"}
    unset = ("score", "stop_reason", "error", "logprobs", "prompt_logprobs")
    values = dict.fromkeys(unset) | plain | changes
    names = {field.name for field in fields(Choice)} - {"index"}
    choice = Choice(index=0, **{name: values[name] for name in names})
    return RequestOutput(**{"choices": (choice,)} | values)


def line(kind: str = "plain", name: str | None = "a") -> BatchLine:
    head = LineHead(number=7, kind=kind, name=name)  # type: ignore[arg-type]
    messages = [{"role": "user", "content": "Hi"}] if kind == "chat" else None
    return BatchLine(head=head, prompt=None if messages else "Hi", messages=messages)


def test_plain_output_record():
    record = output_record(line(), output(), model="m")
    named = {"id": "a", "line": 7, "text": "Hello", "finish_reason": "stop", "error": None}
    assert json.loads(json.dumps(record)) == named | {"usage": COUNTS}
    assert output_record(line(name=None), output(), model="m")["id"] == "line-7"
    assert output_record(line(), output(), model="m", with_prompt=True)["prompt"] == "Hi"


def test_completion_record_parses_with_the_openai_client():
    record = output_record(line("completions"), output(), model="m")

    assert (record["custom_id"], record["error"]) == ("a", None)
    assert record["response"]["status_code"] == 200
    body = Completion.model_validate(record["response"]["body"], strict=True)
    assert (body.choices[0].text, body.usage.total_tokens) == ("Hello", 5)
    usage = record["response"]["body"]["usage"]
    assert usage == usage_body([USAGE])


def test_chat_record_parses_with_the_openai_client():
    record = output_record(line("chat"), output(finish_reason="length"), model="m")
    body = ChatCompletion.model_validate(record["response"]["body"], strict=True)
    assert body.choices[0].message.content == "Hello"
    assert body.choices[0].finish_reason == "length"


@pytest.mark.parametrize("kind", ["plain", "completions", "chat"])
def test_failed_output_is_an_error_record(kind: str):
    record = output_record(line(kind), output(error="broken", finish_reason="error"), model="m")

    assert is_error(record)
    assert record == error_record(line(kind).head, "broken")
    assert record["line"] == 7
    if kind == "chat":
        assert record["response"]["status_code"] == 400
        assert record["response"]["body"]["error"]["message"] == "broken"
        assert record["error"] == {"code": "invalid_request", "message": "broken"}


def test_tally_counts_outputs_and_errors():
    tally = BatchTally()
    tally.add(output_record(line(), output(), model="m"))
    tally.add(output_record(line("chat"), output(), model="m"))
    tally.add(error_record(line().head, "no"))
    of_another_server = output_record(line("chat"), output(), model="m")
    of_another_server["response"]["body"]["usage"] = {"prompt_tokens": 4}
    tally.add(of_another_server)

    assert (tally.completed, tally.errors) == (4, 1)
    expected = {"prompt_tokens": 10, "completion_tokens": 4, "cached_tokens": 2}
    expected |= {"evictions": 10, "evicted_tokens": 0, "recomputed_tokens": 12}
    assert tally.usage == expected
    assert tally.finish_reasons == {"stop": 3, "error": 1}


def test_merged_usage_equals_the_servers_usage():
    """`evicted_tokens` is the maximum over choices of a prompt and the sum over prompts."""
    usages = [
        replace(USAGE, evicted_tokens=evicted, kv_peak_bytes=peak, total_s=total_s)
        for evicted, peak, total_s in ((10, 64, 1.0), (30, 128, 3.0), (0, 32, 2.0))
    ]
    together = merged([output(usage=usage) for usage in usages]).usage

    sums = {name: 3 * count for name, count in COUNTS.items()}
    own = {"evicted_tokens": 40, "kv_peak_bytes": 224, "first_token_s": 0.5, "total_s": 3.0}
    assert together == Usage(**sums | own)
    body = usage_body(usages)
    for name in ("prompt_tokens", "completion_tokens", "evicted_tokens", "kv_peak_bytes"):
        assert body[name] == getattr(together, name)
