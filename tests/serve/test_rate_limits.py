"""Rate limits: arithmetic of the buckets, headers, and requests over HTTP."""

import asyncio
import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError, RequestError
from quire.serve import rate_limits
from quire.serve.rate_limits import RateLimit, RateLimited, RateLimits
from quire.serve.tenant_keys import TenantKeys
from serve.conftest import CHATS, COMPLETIONS, error_of, ok

KEY_A, KEY_B = "sk-a-2f0c77d1", "sk-b-51d09a3e"
BODY = {"prompt": [5, 6, 7, 8], "max_tokens": 6, "temperature": 0, "ignore_eos": True}


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


def limits_of(clock=None, **limits):
    return RateLimits(RateLimit(**limits), clock=clock or Clock())


def test_without_limits_nothing_is_charged():
    assert limits_of().charge("a", requests=10**6, tokens=10**9).headers == {}


def remaining(headers):
    """The requests and tokens that are left."""
    return tuple(headers.get(f"x-ratelimit-remaining-{kind}") for kind in ("requests", "tokens"))


def test_bucket_refills_continuously():
    clock = Clock()
    limits = limits_of(clock, requests_per_minute=2)
    for _ in range(2):
        limits.charge("a", requests=1, tokens=5)
    with pytest.raises(RateLimited, match="2 requests per minute, of which 0 are left") as refused:
        limits.charge("a", requests=1, tokens=5)
    assert refused.value.retry_after_s == pytest.approx(30)
    assert refused.value.headers["Retry-After"] == "30"

    clock.now_s += 30
    limits.charge("a", requests=1, tokens=5)


def test_tenants_have_separate_buckets():
    own = {"b": RateLimit(requests_per_minute=2)}
    limits = RateLimits(RateLimit(requests_per_minute=1), own, Clock())
    limits.charge("a", requests=1, tokens=0)
    limits.charge("b", requests=2, tokens=0)

    for tenant in ("a", "b"):
        with pytest.raises(RateLimited):
            limits.charge(tenant, requests=1, tokens=0)


def test_refused_request_is_not_charged():
    limits = limits_of(requests_per_minute=5, tokens_per_minute=100)
    limits.charge("a", requests=1, tokens=90)
    with pytest.raises(RateLimited, match="tokens per minute, of which 10 are left"):
        limits.charge("a", requests=1, tokens=20)

    headers = limits.charge("a", requests=1, tokens=10).headers
    assert remaining(headers) == ("3", "0")
    assert headers["x-ratelimit-reset-tokens"] == "1m0s"


def test_unused_tokens_are_returned_once():
    limits = limits_of(tokens_per_minute=100)
    charge = limits.charge("a", requests=1, tokens=100)
    charge.settle(40)
    charge.settle(0)
    assert remaining(limits.charge("a", requests=1, tokens=60).headers) == (None, "0")


def test_refund_returns_requests_and_tokens_once():
    limits = limits_of(requests_per_minute=2, tokens_per_minute=100)
    charge = limits.charge("a", requests=2, tokens=100)
    charge.refund()
    charge.refund()
    charge.settle(0)
    assert remaining(limits.charge("a", requests=1, tokens=60).headers) == ("1", "40")


@pytest.mark.parametrize(("requests", "tokens", "param"), [(3, 1, "prompt"), (1, 11, "max_tokens")])
def test_more_than_a_minute_is_an_invalid_request(requests, tokens, param):
    limits = limits_of(requests_per_minute=2, tokens_per_minute=10)
    with pytest.raises(RequestError, match="the rate limit is") as refused:
        limits.charge("a", requests=requests, tokens=tokens)
    assert refused.value.param == param


@given(st.lists(st.tuples(st.floats(0, 40), st.integers(0, 60), st.integers(0, 60)), max_size=60))
def test_a_tenant_never_gets_more_than_the_limit_and_one_burst(steps):
    clock = Clock()
    limits, limit, used = limits_of(clock, tokens_per_minute=60), 60, 0
    for pause_s, tokens, really_used in steps:
        clock.now_s += pause_s
        try:
            charge = limits.charge("a", requests=1, tokens=tokens)
        except RateLimited:
            continue
        charge.settle(min(tokens, really_used))
        used += min(tokens, really_used)
    assert used <= limit + limit * (clock.now_s - 100) / 60 + 1e-6


def test_buckets_are_bounded(monkeypatch):
    monkeypatch.setattr(rate_limits, "MAX_TENANTS", 4)
    limits = limits_of(requests_per_minute=1)
    for number in range(100):
        limits.charge(f"t{number}", requests=1, tokens=0)
    assert len(limits._buckets) <= 8


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "5", 10**13])
def test_invalid_limits_are_refused(value):
    init = inspect.unwrap(RateLimit.__init__)  # values of a file have any type
    with pytest.raises(ConfigError, match="requests_per_minute"):
        init(RateLimit.__new__(RateLimit), requests_per_minute=value)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0004, "1ms"), (0.5, "500ms"), (7.46, "7.5s"), (90.0, "1m30s")]
)
def test_durations_have_the_format_of_openai(seconds, text):
    assert rate_limits._duration(seconds) == text


POSTED = ("POST", COMPLETIONS, {"json": BODY})


def test_server_refuses_with_429_and_headers(send):
    first, second, third = send(POSTED, POSTED, POSTED, requests_per_minute=2)
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert remaining(second.headers) == ("0", None)
    assert error_of(third, 429)["type"] == "RateLimitError"
    assert 1 <= int(third.headers["retry-after"]) <= 30


@pytest.mark.parametrize(
    ("options", "status", "left"),
    [
        # the request uses its prompt and one token
        ({"max_tokens": 50, "allowed_token_ids": [9], "stop_token_ids": [9]}, 200, 100 - 5 - 10),
        ({"prompt": [10**6] * 4}, 400, 90),
        ({"stream": True}, 200, 80),
    ],
)
def test_server_returns_tokens_that_were_not_generated(send, options, status, left):
    call = ("POST", COMPLETIONS, {"json": BODY | options})
    first, response = send(call, POSTED, tokens_per_minute=100)
    assert first.status_code == status
    assert left <= int(remaining(response.headers)[1]) < left + 30  # the bucket refills
    if status == 200:
        assert first.headers["x-ratelimit-limit-tokens"] == "100"


def test_estimate_is_lowered_to_the_limit_and_charged_exactly_at_the_end():
    limits = limits_of(Clock(), tokens_per_minute=60)
    limits.charge("a", requests=1, tokens=300, min_tokens=11).settle(90)

    with pytest.raises(RateLimited) as refused:
        limits.charge("a", requests=1, tokens=30)
    assert refused.value.retry_after_s == pytest.approx(60)
    with pytest.raises(RequestError, match="needs 61 tokens"):
        limits.charge("a", requests=1, tokens=300, min_tokens=61)


def test_chat_without_max_tokens_is_accepted_with_a_limit_below_the_context(send):
    chat = {"messages": [{"role": "user", "content": "Once"}], "temperature": 0}
    first, second = send(*[("POST", CHATS, {"json": chat})] * 2, tokens_per_minute=100)
    used = ok(first)["usage"]["total_tokens"]
    assert remaining(first.headers) == (None, "0")
    assert second.status_code == (429 if used > 100 else 200)


def test_request_that_a_full_queue_refuses_is_not_charged(serve):
    long = BODY | {"max_tokens": 300}

    async def main(client):
        many = [client.post(COMPLETIONS, json=long) for _ in range(40)]
        statuses = [response.status_code for response in await asyncio.gather(*many)]
        return statuses, (await client.post(COMPLETIONS, json=BODY)).headers

    statuses, headers = serve(main, requests_per_minute=100, max_num_queued_reqs=1)
    assert 503 in statuses
    assert int(remaining(headers)[0]) >= 100 - statuses.count(200) - 1


def test_limits_apply_to_the_tenant_of_the_key(send):
    keys = TenantKeys({"a": (KEY_A,), "b": (KEY_B,)})
    headers = [{"headers": {"authorization": f"Bearer {key}"}} for key in (KEY_A, KEY_A, KEY_B)]
    calls = [("POST", COMPLETIONS, {"json": BODY} | each) for each in headers]
    responses = send(*calls, tenant_keys=keys, requests_per_minute=1)
    assert [response.status_code for response in responses] == [200, 429, 200]
