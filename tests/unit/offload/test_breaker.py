"""Circuit breaker: back-off and log lines."""

from quire.offload.prefix_store.store import CircuitBreaker


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def test_wait_doubles_up_to_its_limit_and_an_outage_is_logged_once(caplog):
    clock = Clock()
    breaker = CircuitBreaker("remote", clock)
    waits = []
    for _ in range(9):
        assert not breaker.is_open
        breaker.failed("no response")
        breaker.failed("no response")  # of a call that was under way: counts as the same failure
        assert breaker.is_open
        before = clock.now_s
        while breaker.is_open:
            clock.now_s += 0.5
        waits.append(clock.now_s - before)

    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert [record.getMessage()[:36] for record in caplog.records] == [
        "the remote tier of cached prefixes i"
    ]
    assert "no response; its prefixes are recomputed" in caplog.text
    breaker.succeeded()
    breaker.succeeded()
    assert caplog.text.count("is used again") == 1
    breaker.failed("again")
    assert breaker.num_outages == 2
    clock.now_s += 1
    assert not breaker.is_open
