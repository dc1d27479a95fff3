"""Metrics of a run, against values computed by hand."""

import pytest

from quire.bench.config import BenchServeConfig
from quire.bench.load import Run
from quire.bench.metrics import metrics
from quire.bench.result import result_of, without_details
from quire.bench.stream import Outcome, read_stream

KEYS = {
    *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "output_throughput", "total_token_throughput"),
    *("max_output_tokens_per_s", "max_concurrent_requests", "request_goodput"),
    *(
        f"{spread}_{name}_ms"
        for spread in ("mean", "median", "std", "p50", "p99")
        for name in ("ttft", "tpot", "itl", "e2el")
    ),
}
DESCRIPTION = {
    *("date", "backend", "model_id", "tokenizer_id", "num_prompts", "request_rate"),
    *("burstiness", "max_concurrency"),
}
DETAILS = {
    *("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors"),
}


def outcome(start_s, first_s, *gaps_s, tokens=None, prompt=10):
    found = Outcome(start_s=start_s, prompt_tokens=prompt)
    now_s = first_s
    found.note_text(now_s)
    for gap_s in gaps_s:
        now_s += gap_s
        found.note_text(now_s)
    found.end_s, found.output_tokens = now_s, tokens or 1 + len(gaps_s)
    return found


RUN = Run(
    outcomes=(
        outcome(0.0, 0.5, 0.1, 0.3),
        outcome(0.0, 1.0),
        Outcome(start_s=0.0, prompt_tokens=10, end_s=0.1, error="status 503"),
    ),
    duration_s=2.0,
    start_s=0.0,
)
CONFIG = BenchServeConfig(metric_percentiles="50,99", goodput=("ttft:600", "tpot:250"))


def test_counts_and_latencies_are_those_of_successful_requests():
    found = metrics(RUN, CONFIG)

    assert found.keys() == KEYS
    assert (found["completed"], found["failed"]) == (2, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (20, 4)
    assert found["request_throughput"] == 1.0
    assert found["output_throughput"] == 2.0
    assert found["total_token_throughput"] == 12.0
    assert found["mean_ttft_ms"] == pytest.approx(750)
    assert found["std_ttft_ms"] == pytest.approx(250)
    assert found["mean_tpot_ms"] == pytest.approx(200)  # (0.9 - 0.5) / 2; one token has no TPOT
    assert found["mean_itl_ms"] == pytest.approx(200)
    assert found["median_e2el_ms"] == pytest.approx(950)
    assert found["max_concurrent_requests"] == 2


def test_goodput_counts_requests_that_meet_every_limit():
    assert metrics(RUN, CONFIG)["request_goodput"] == 0.5
    strict = BenchServeConfig(goodput=("ttft:600", "tpot:150"))
    assert metrics(RUN, strict)["request_goodput"] == 0.0


def test_a_run_without_a_successful_request_has_zero_latencies():
    failed = Run(outcomes=RUN.outcomes[2:], duration_s=0.1, start_s=0.0)

    found = metrics(failed, BenchServeConfig())

    assert (found["completed"], found["failed"], found["p99_ttft_ms"]) == (0, 1, 0.0)


def test_the_result_has_the_keys_of_vllm():
    found = metrics(RUN, CONFIG)

    result = result_of(CONFIG, RUN, found, model="m", tokenizer=None)

    assert result.keys() >= KEYS | DESCRIPTION | DETAILS
    assert result["request_rate"] == "inf"
    assert DETAILS.isdisjoint(without_details(result))


def events(*texts):
    return [(float(now_s), text.encode()) for now_s, text in enumerate(texts, start=1)]


def test_a_stream_split_inside_an_event_is_read_with_its_times():
    found = Outcome(start_s=0.0, prompt_tokens=1)

    read_stream(
        events(
            ": keep-alive\n\n",
            'data: {"choices":[{"text":"a"}]}\n\ndata: {"choices":[{"te',
            'xt":"b"}]}\r\n\r\n',
            'data: {"choices":[],"usage":{"completion_tokens":7}}\n\ndata: [DONE]\n\n',
        ),
        found,
    )

    assert (found.text, found.output_tokens, found.error) == ("ab", 7, "")
    assert (found.ttft_s, found.itl_s, found.e2el_s) == (2.0, [1.0], 3.0)


def test_a_chat_begins_with_its_first_content():
    found = Outcome(start_s=0.0, prompt_tokens=1)

    read_stream(
        events(
            'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n',
            'data: {"choices":[{"delta":{"reasoning_content":"r"}}]}\n\n',
            'data: {"choices":[{"delta":{"content":"c"}}]}\n\n',
        ),
        found,
    )

    assert (found.text, found.ttft_s, found.output_tokens) == ("rc", 2.0, 2)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('data: {"error":{"message":"no memory"}}\n\n', "no memory"),
        ("data: [DONE]\n\n", "no output"),
        ("", "no output"),
    ],
)
def test_a_stream_with_an_error_or_without_output_fails(text, error):
    found = Outcome(start_s=0.0, prompt_tokens=1)

    read_stream(events(text), found)

    assert error in found.error
    assert not found.succeeded


def run_of(*outcomes):
    end_s = max(one.end_s for one in outcomes)
    return Run(outcomes=outcomes, duration_s=end_s, start_s=0.0)


def test_requests_one_after_the_other_are_not_concurrent():
    found = metrics(run_of(*(outcome(i / 8, (i + 1) / 8) for i in range(20))), CONFIG)

    assert found["max_concurrent_requests"] == 1


def test_peak_throughput_is_that_of_the_best_second():
    burst = outcome(0.0, 2.6, *[0.1] * 8)  # 9 tokens from 2.6 s to 3.4 s
    late = outcome(0.0, 9.0)

    assert metrics(run_of(burst, late), CONFIG)["max_output_tokens_per_s"] == pytest.approx(9)


@pytest.mark.parametrize("duration_s", [0.25, 0.9, 1.5, 7.3])
def test_peak_throughput_is_not_below_the_mean(duration_s):
    pair = outcome(0.0, duration_s / 10, 0.9 * duration_s), outcome(0.0, duration_s)

    found = metrics(run_of(*pair), CONFIG)

    assert found["max_output_tokens_per_s"] >= found["output_throughput"] * (1 - 1e-9)
