"""Percentiles, fairness and gauges by direct sums; formats of traces, options and errors."""

import gzip
import itertools
import json
import math

import numpy as np
import pytest

from quire.config.sampling_params import SamplingParams
from quire.errors import ConfigError, TraceError, UnknownName
from quire.scheduler.events import KVEvent
from quire.sim.engine import EventTally, ServedTokens, jain_index, token_ids
from quire.sim.metrics import latencies, percentiles, reusable
from quire.sim.records import Gauges, RequestRecord, SimulatedReading
from quire.sim.traces.base import TraceOptions, TraceSegment
from quire.sim.traces.formats import estimated_tokens, find_format
from quire.sim.traces.loading import load_trace
from support.requests import make_request
from support.sim_traces import recorded, request, trace


def record(arrival, admitted, first, finish, answer=5):
    times = {"arrival_s": float(arrival), "admitted_s": admitted, "first_token_s": first}
    sizes = {"line": 1, "prompt_tokens": 10, "answer_tokens": answer}
    return RequestRecord(tenant="default", finish_s=finish, **sizes, **times)


RUNS = [record(i, i + 0.1 * i, i + 0.3 * i, i + 2.0 * i, answer=1 + i % 4) for i in range(1, 40)]


def reading(time_s=0.0, used=0, allocated=0, wasted=0, running=0, waiting=0):
    held = {"used_bytes": used, "allocated_bytes": allocated, "wasted_bytes": wasted}
    return SimulatedReading(time_s=time_s, running=running, waiting=waiting, **held)


@pytest.mark.parametrize("q", [50, 90, 95, 99])
def test_percentiles_equal_numpy(q):
    summary = latencies(RUNS)
    values = {
        "queue": [r.admitted_s - r.arrival_s for r in RUNS],
        "ttft": [r.first_token_s - r.arrival_s for r in RUNS],
        "e2e": [r.finish_s - r.arrival_s for r in RUNS],
        "tpot": [
            (r.finish_s - r.first_token_s) / (r.answer_tokens - 1)
            for r in RUNS
            if r.answer_tokens > 1
        ],
    }
    for name, of_runs in values.items():
        assert summary[f"{name}_p{q}_s"] == np.percentile(of_runs, q)
    assert percentiles("ttft", []) == percentiles("ttft", [math.nan]) == {}


def test_jains_index():
    for served, index in (
        *(({"a": 5.0, "b": 5.0}, 1.0), ({"a": 5.0, "b": 0.0}, 0.5), ({"a": 2.0, "b": 1.0}, 0.9)),
        ({"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.0}, 0.75),
        ({"a": 0.0, "b": 0.0}, None),
    ):
        assert jain_index(served) == index


def requested(tenant):
    return make_request("r", [1], SamplingParams(), tenant=tenant)


def test_served_tokens_count_while_tenants_are_backlogged_for_long_and_by_weight():
    served = ServedTokens(("a", "b"))
    served.arrived("a")
    assert not served.all_backlogged
    served.arrived("b")
    assert served.all_backlogged

    served.served([requested(tenant) for tenant in "aba"], [5, 2, 1])
    served.admitted("b")

    assert served.tokens == {"a": 6, "b": 2}
    assert not served.all_backlogged

    # it waits repeatedly while one request of the other tenant is served
    served = ServedTokens(("flood", "small"))
    flood = requested("flood")
    for _ in range(100):
        for tenant in ("flood", "flood", "small"):
            served.arrived(tenant)
        served.served([flood], [50])
        served.admitted("flood")
        served.admitted("small")
        served.served([flood], [1])

    assert served.tokens == {"flood": 5_100, "small": 0}
    assert jain_index(served.by_weight) is None

    served = ServedTokens(("a", "b"))
    both = [requested(tenant) for tenant in "ab"]
    for tenant in "ab" * 11:
        served.arrived(tenant)
    for _ in range(11):
        served.admitted("a")
        served.admitted("b")
        served.served(both, [3, 1])

    assert served.settled == served.tokens == {"a": 33, "b": 11}
    served = ServedTokens(("a", "b"), {"a": 3.0})
    served.settled.update(a=30, b=10)

    assert jain_index(served.by_weight) == 1.0
    assert jain_index(ServedTokens(("a", "b")).by_weight) is None


def test_event_tally_sums_events():
    def event(kind, **data):
        return KVEvent(kind, 0.0, "r", "default", data)

    tally = EventTally()
    for occurred in (
        event("swapped_out", kv_bytes=100, seconds=0.1),
        event("swapped_in", kv_bytes=60, seconds=0.1),
        event("preempted", how="recompute", reason="", lost_tokens=7, freed_bytes=1),
        event("copied", pages=2, kv_bytes=32),
        event("chunk", tokens=5, kv_bytes=1),
    ):
        tally(occurred)

    assert (tally.num_swaps_out, tally.num_swaps_in, tally.swapped_bytes) == (1, 1, 160)
    assert (tally.lost_tokens, tally.copied_bytes) == (7, 32)


def test_gauges_are_weighted_by_time():
    gauges = Gauges()
    assert gauges.waste_fraction == gauges.mean("running") == 0.0
    gauges.add(reading(used=100, allocated=80, wasted=20, running=2, waiting=4), 3.0)
    gauges.add(reading(used=40, allocated=40, wasted=30, running=1), 1.0)

    assert gauges.mean("used_byte") == (300 + 40) / 4
    assert gauges.mean("running") == 7 / 4
    assert gauges.waste_fraction == (60 + 30) / (240 + 40)
    assert (gauges.peak_used_bytes, gauges.peak_running, gauges.peak_waiting) == (100, 2, 4)

    # a long series is thinned evenly
    gauges = Gauges()
    for i in range(20_000):
        gauges.add(reading(time_s=float(i)), 1.0)
    times = [sample.time_s for sample in gauges.samples]

    assert 2000 < len(times) <= 4096
    assert len({b - a for a, b in itertools.pairwise(times)}) == 1


# ---- traces --------------------------------------------------------------------------------------


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 1500, "input_length": 1030, "output_length": 7, "hash_ids": [0, 1, 9]}
{"timestamp": 3000, "input_length": 512, "output_length": 1, "hash_ids": [7]}
"""
VIDUR = """num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio
3772,54,3826,69.85
2015,156,2171,12.9
"""
TURNS = (("human", "x" * 40), ("gpt", "y" * 8), ("human", "z" * 4), ("gpt", "w" * 5))
TALK = {"id": "a", "conversations": [{"from": name, "value": text} for name, text in TURNS]}
OTHER = {"conversations": [{"from": "user", "value": "q" * 3}, {"from": "gpt", "value": "r"}]}
SHAREGPT = json.dumps([TALK, OTHER])
EXAMPLES = {"azure": AZURE, "mooncake": MOONCAKE, "vidur": VIDUR, "sharegpt": SHAREGPT}


@pytest.fixture
def write(tmp_path):
    def to_file(text, name="trace"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return to_file


def lengths(loaded):
    return [(r.prompt_tokens, r.answer.tokens) for r in loaded.requests]


def arrivals(loaded):
    return [r.arrival_s for r in loaded.requests]


def test_compressed_trace_is_decompressed(write, tmp_path):
    path = write(gzip.compress(AZURE.encode()), "trace.csv.gz")
    assert lengths(load_trace(path)) == [(374, 44), (396, 109), (879, 55)]
    for content in (AZURE.encode(), gzip.compress(AZURE.encode())[:-9]):
        with pytest.raises(TraceError, match="cannot read the trace"):
            load_trace(write(content, "trace.csv.gz"))
    with pytest.raises(TraceError, match="cannot read the trace"):
        load_trace(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("name", "expected", "times"),
    [
        ("azure", [(374, 44), (396, 109), (879, 55)], [0.0, 4.314579, 4.541877]),
        ("mooncake", [(1100, 5), (1030, 7), (512, 1)], [0.0, 1.5, 3.0]),  # milliseconds
        ("vidur", [(3772, 54), (2015, 156)], [0.0, 0.0]),
        ("sharegpt", [(10, 2), (13, 2), (1, 1)], [0.0, 0.0, 0.0]),
    ],
)
def test_format_is_detected_and_byte_order_mark_and_empty_lines_ignored(
    write, name, expected, times
):
    loaded = load_trace(write(EXAMPLES[name]))
    marked = b"\xef\xbb\xbf" + EXAMPLES[name].encode() + b"\n\n"
    assert loaded.format == name
    assert load_trace(write(marked)).requests == loaded.requests
    assert lengths(loaded) == expected
    assert arrivals(loaded) == pytest.approx(times, abs=1e-5)


def test_equal_ids_and_turns_of_conversations_share_tokens(write):
    """Two blocks of 512 tokens are shared; the third ids differ."""
    first, second, third = load_trace(write(MOONCAKE)).requests
    a, b, c = (token_ids(r.prompt) for r in (first, second, third))

    assert (len(a), len(b), len(c)) == (1100, 1030, 512)
    assert a[:1024] == b[:1024]
    assert a[1024] != b[1024]
    assert a[:512] != c
    assert a == token_ids(first.prompt)

    # 10 tokens, output 2; then 10 + 2 + 1, output 2 (5 bytes); the other: 1, output 1
    loaded = load_trace(write(SHAREGPT))
    first, second, other = loaded.requests
    conversation = token_ids([*first.prompt, first.answer])

    assert lengths(loaded) == [(10, 2), (13, 2), (1, 1)]
    assert token_ids(second.prompt)[:12] == conversation
    assert token_ids(other.prompt)[0] != conversation[0]
    texts = ("", "abcd", "abcde", "éé")  # lengths are estimated from bytes
    assert [estimated_tokens(text) for text in texts] == [0, 1, 2, 1]


def test_tokens_depend_only_on_content_and_offset():
    whole = token_ids([TraceSegment(3, 8), TraceSegment(4, 5)])

    assert whole == token_ids([TraceSegment(3, 8)]) + token_ids([TraceSegment(4, 5)])
    assert token_ids([TraceSegment(3, 5)]) == whole[:5]
    assert all(0 <= token < 2**31 for token in whole)
    ids = np.array([token_ids([TraceSegment(content, 100)]) for content in range(-50, 50)])
    assert len(np.unique(ids)) > 0.999 * ids.size


def test_arrivals_and_lengths_are_scaled_and_long_requests_dropped(write):
    header, *lines = AZURE.splitlines()
    shuffled = "\n".join([header, *reversed(lines)])

    loaded = load_trace(write(shuffled), TraceOptions(requests=2))

    assert lengths(loaded) == [(374, 44), (396, 109)]
    half = load_trace(write(AZURE), TraceOptions(time_scale=0.5))
    assert arrivals(half) == pytest.approx([t / 2 for t in arrivals(load_trace(write(AZURE)))])

    first, second, _ = load_trace(write(MOONCAKE), TraceOptions(length_scale=0.25)).requests

    assert [s.tokens for s in first.prompt] == [128, 128, round(76 / 4)]
    assert first.prompt[:2] == second.prompt[:2]
    assert second.prompt[2].tokens == round(6 / 4)
    least = load_trace(write(AZURE), TraceOptions(length_scale=0.0001))
    assert lengths(least) == [(1, 1)] * 3

    loaded = load_trace(write(AZURE), TraceOptions(max_tokens=418))
    assert lengths(loaded) == [(374, 44)]
    assert loaded.num_dropped == 2
    with pytest.raises(TraceError, match="longer than max_tokens=10"):
        load_trace(write(AZURE), TraceOptions(max_tokens=10))


def test_request_rate_and_shares_of_tenants_are_drawn(write):
    rows = "num_prefill_tokens,num_decode_tokens\n" + "5,5\n" * 4000
    options = TraceOptions(request_rate=8.0, seed=3)

    first, second = (arrivals(load_trace(write(rows), options)) for _ in range(2))

    assert first == second == sorted(first)
    assert 4000 / first[-1] == pytest.approx(8.0, rel=0.1)
    shares = TraceOptions(tenants="share:big=0.95,small=0.05", seed=1)
    small = sum(r.tenant == "small" for r in load_trace(write(rows), shares).requests)
    assert small == pytest.approx(200, abs=60)


def test_copies_are_shifted_and_tenants_taken_in_turn(write):
    path = write(MOONCAKE)
    once = load_trace(path)
    three = load_trace(path, TraceOptions(copies=3))
    span_s = once.requests[-1].arrival_s

    assert len(three.requests) == 3 * len(once.requests)
    assert len({request.line for request in three.requests}) == len(three.requests)
    assert [r.arrival_s for r in three.requests] == sorted(r.arrival_s for r in three.requests)
    assert all(0 <= request.arrival_s <= span_s for request in three.requests)
    fractions = [reusable(loaded.requests).token_fraction for loaded in (once, three)]
    one, other = (
        {s.content for r in loaded.requests for s in (*r.prompt, r.answer)}
        for loaded in (once, three)
    )
    assert len(other) == 3 * len(one)
    assert fractions[1] == pytest.approx(fractions[0])

    rows = "TIMESTAMP,ContextTokens,GeneratedTokens,user\n2023-11-16 18:15:46,3,4,ann\n"
    of_column = load_trace(write(rows), TraceOptions(tenants="column:user"))
    in_turn = load_trace(write(AZURE), TraceOptions(tenants="round_robin:a,b"))
    assert of_column.tenants == ("ann",)
    assert [r.tenant for r in in_turn.requests] == ["a", "b", "a"]
    with pytest.raises(TraceError, match="user missing"):
        load_trace(write(AZURE), TraceOptions(tenants="column:user"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(("", "is empty"), ("\n \n", "is empty"), ("hello world\n", "no known format")),
        *((AZURE.splitlines()[0], "has no requests"), ("[]" + " " * 5, "no known format")),
        (AZURE.replace("396", "-1"), "line 3: expected ContextTokens to be a whole number of 1"),
        (AZURE.replace("109", "-109"), "line 3: expected GeneratedTokens to be a whole number of"),
        (AZURE.replace("396", "0"), "line 3"),
        (AZURE.replace("396", "3.5"), "line 3"),
        (AZURE.replace("396", "many"), "line 3: expected a number ContextTokens, got 'many'"),
        (AZURE.replace("396", "1e999"), "line 3: expected a finite number"),
        (AZURE.replace(",109", ""), "line 3: expected 3 fields"),
        (AZURE.replace(",109", ",109,7"), "line 3: expected 3 fields"),
        (AZURE.replace("2023-11-16 18:15:50.9951690", "soon"), "line 3: expected a date and time"),
        (AZURE.replace("GeneratedTokens", "Generated"), "GeneratedTokens missing"),
        (MOONCAKE.replace("[0, 1, 9]", "[0, 1]"), "line 2: expected a hash id for each 512"),
        (MOONCAKE.replace("[0, 1, 9]", "[0, 1, 9, 3]"), "line 2: expected a hash id for each 512"),
        (MOONCAKE.replace("[0, 1, 9]", "[0, 1, -9]"), "line 2: expected hash_ids"),
        (MOONCAKE.replace("[0, 1, 9]", "7"), "line 2: expected hash_ids"),
        (MOONCAKE.replace("1030,", "-1030,"), "line 2: expected input_length"),
        (MOONCAKE.replace("1030,", "true,"), "line 2: expected a number input_length"),
        (MOONCAKE.replace('"output_length": 7, ', ""), "line 2: expected a number output_length"),
        (MOONCAKE.replace('{"timestamp": 1500', '{"timestamp": NaN'), "line 2: expected a finite"),
        (MOONCAKE.replace('{"timestamp": 1500', '{"timestamp" 1500'), "line 2: not JSON"),
        (MOONCAKE + "[1, 2]\n", "line 4: expected a JSON object"),
        (VIDUR.replace("2015", "-2015"), "line 3: expected num_prefill_tokens"),
        (SHAREGPT.replace('"from": "user"', '"to": "user"'), "conversation 2: expected turns"),
        (SHAREGPT[:-9], "not JSON"),
        (b"\xff\xfe\x00bad", "not UTF-8"),
    ],
)
def test_invalid_trace_is_refused_with_its_line(write, text, message):
    with pytest.raises(TraceError) as refused:
        load_trace(write(text))
    assert message in str(refused.value)


def test_invalid_trace_options_and_formats_are_refused(write):
    with pytest.raises(ConfigError, match="did you mean azure"):
        TraceOptions(format="azur")
    with pytest.raises(UnknownName, match="did you mean azure"):
        find_format("azur", write(AZURE))
    zero = dict.fromkeys(("length_scale", "max_tokens", "request_rate"), (0,))
    invalid = {"requests": (0, "many"), "time_scale": (-1.0, float("nan"))} | zero
    for option, values in invalid.items():
        for value in values:
            with pytest.raises(ConfigError, match=option):
                TraceOptions(**{option: value})
    tenants = (
        "random:a",
        "round_robin:",
        "round_robin:a,a",
        "share:a",
        "share:a=-1",
        "share:a=0,b=1",
    )
    for text in tenants:
        with pytest.raises(ConfigError, match="tenant"):
            load_trace(write(AZURE), TraceOptions(tenants=text))


def test_known_prefixes_are_reusable_also_in_recorded_conversations():
    """Of 2 + 3 + 3 segments 0, 2 and 1 are known; the last known one is after a new one."""
    found = reusable(
        trace(
            request(1, 0, 0, 1, shared=[(0, 10), (1, 10)]),
            request(2, 0, 5, 1, shared=[(0, 10), (1, 10)]),
            request(3, 0, 0, 1, shared=[(7, 10), (1, 10), (8, 10)]),
        ).requests
    )

    assert found.block_fraction == 3 / 8
    assert found.token_fraction == 20 / (20 + 25 + 30)

    loaded = load_trace(recorded("mooncake_conversation_trace.jsonl"))

    found = reusable(loaded.requests)

    assert len(loaded.requests) == 12_031
    assert found.block_fraction == pytest.approx(0.366, abs=0.001)
    assert found.token_fraction == pytest.approx(0.374, abs=0.001)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("AzureLLMInferenceTrace_conv.csv", 19_366),
        ("AzureLLMInferenceTrace_code.csv", 8_819),
        ("vidur_arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv", 28_257),
    ],
)
def test_recorded_traces_are_loaded_completely(name, count):
    assert len(load_trace(recorded(name)).requests) == count
