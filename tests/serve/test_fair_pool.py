"""A bounded thread pool with round-robin scheduling between tenants."""

import asyncio
import threading

import pytest

from quire.serve.text import FairPool


def run(main, threads):
    async def with_pool():
        pool = FairPool(threads, "test")
        try:
            return await main(pool)
        finally:
            pool.close()

    return asyncio.run(asyncio.wait_for(with_pool(), 20))


def test_work_runs_in_a_thread_and_its_result_is_returned():
    async def main(pool):
        return await pool.run("a", lambda: threading.current_thread().name)

    assert run(main, 2).startswith("test")


def test_exception_is_raised_and_the_thread_is_reused():
    async def main(pool):
        with pytest.raises(ZeroDivisionError):
            await pool.run("a", lambda: 1 / 0)
        return await pool.run("a", lambda: 3)

    assert run(main, 1) == 3


def test_tenants_are_served_round_robin_in_one_thread():
    order = []

    async def main(pool):
        jobs = [("a", n) for n in range(4)] + [("b", n) for n in range(2)] + [("c", 0)]
        await asyncio.gather(*(pool.run(t, lambda t=t, n=n: order.append((t, n))) for t, n in jobs))

    run(main, 1)

    expected = [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("b", 1), ("a", 2), ("a", 3)]
    assert order == expected


def test_tenants_with_single_jobs_do_not_starve_a_queue():
    order = []

    async def one_at_a_time(pool, tenant):
        for _ in range(20):
            await pool.run(tenant, lambda: order.append(tenant))

    async def main(pool):
        queue = [pool.run("queue", lambda: order.append("queue")) for _ in range(10)]
        await asyncio.gather(*queue, one_at_a_time(pool, "a"), one_at_a_time(pool, "b"))

    run(main, 1)

    assert order[:30].count("queue") >= 9


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_one_tenant_leaves_a_thread_free(threads):
    running, most, lock = 0, 0, threading.Lock()
    pause = threading.Event()

    def work():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        pause.wait(0.01)
        with lock:
            running -= 1

    async def main(pool):
        await asyncio.gather(*(pool.run("a", work) for _ in range(20)))

    run(main, threads)

    assert most == max(1, threads - 1)


def test_cancelled_waiting_work_does_not_run():
    calls, release = [], threading.Event()

    async def main(pool):
        first = asyncio.create_task(pool.run("a", release.wait))
        await asyncio.sleep(0)
        second = asyncio.create_task(pool.run("a", lambda: calls.append(1)))
        await asyncio.sleep(0)
        second.cancel()
        release.set()
        await first
        return await pool.run("a", lambda: "next")

    assert run(main, 1) == "next"
    assert not calls


def test_idle_tenants_are_removed():
    async def main(pool):
        await asyncio.gather(*(pool.run(str(n), int) for n in range(50)))
        return pool._tenants

    assert run(main, 3) == {}
