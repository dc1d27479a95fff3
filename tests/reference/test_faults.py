"""Failures under memory pressure: failed copies and steps, full swap space, cancellation.

All pages are freed, and the other requests get the logits of a run alone.
"""

import logging
import random

import pytest

from quire.models.adapter import TransformersDecoder
from reference.test_pressure import TOLERANCE, model_of
from support.pressure import Watched, drive, engine_under, make_jobs, submit


class Failing:
    """Proxy of a component of the engine; every n-th call of the named methods raises."""

    def __init__(self, part, methods, every, error):
        self._part, self._methods = part, methods
        self._every, self._error = every, error
        self.num_calls = self.num_failed = 0

    def __getattr__(self, name):
        found = getattr(self._part, name)
        return self._maybe(found) if name in self._methods else found

    def _maybe(self, method):
        def call(*arguments, **options):
            result = method(*arguments, **options)  # a late failure: the call has had its effects
            self.num_calls += 1
            if self.num_calls % self._every == 0:
                self.num_failed += 1
                raise self._error
            return result

        return call


def pressed(architecture: str, host_room: float) -> Watched:
    engine = engine_under(model_of(architecture), 1.5, host_room=host_room, preempt="swap")
    return Watched(engine)


@pytest.mark.parametrize(
    ("architecture", "method"),
    [
        *(("llama", method) for method in ("save", "load", "wait")),
        *(pytest.param("gemma3", m, marks=pytest.mark.slow) for m in ("save", "load", "wait")),
    ],
)
def test_requests_with_failed_copies_are_recomputed(architecture, method, caplog):
    caplog.set_level(logging.CRITICAL, "quire.scheduler.preemption")
    watched = pressed(architecture, host_room=4.0)
    pool = watched.engine.pool.host
    pool.copies = failing = Failing(pool.copies, [method], 3, OSError("the link is gone"))

    drive(watched, make_jobs(30, seed=4), seed=4)

    assert failing.num_failed
    assert watched.swapped_out > 2
    assert watched.seen.worst_difference(architecture) <= TOLERANCE


def test_full_swap_space_preempts_by_recompute():
    watched = pressed("llama", host_room=0.25)

    drive(watched, make_jobs(40, seed=3), seed=3)

    assert {"swap", "recompute"} <= watched.ways
    assert watched.seen.worst_difference("llama") <= TOLERANCE


@pytest.mark.parametrize("architecture", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_failed_steps_are_rolled_back_and_recomputed(architecture, monkeypatch):
    watched = pressed(architecture, host_room=2.0)
    forward, step, num_calls = TransformersDecoder.forward, watched.step, 0

    def fail_every_fifth_time(decoder, *arguments, **options):
        nonlocal num_calls
        num_calls += 1
        logits = forward(decoder, *arguments, **options)
        if num_calls % 5 == 0:
            raise RuntimeError("a bug")  # a late failure: KV of all layers has been written
        return logits

    def step_again_after_failure():
        try:
            step()
        except RuntimeError:
            watched.check()

    monkeypatch.setattr(TransformersDecoder, "forward", fail_every_fifth_time)
    watched.step = step_again_after_failure
    drive(watched, make_jobs(30, seed=4), seed=4)

    assert num_calls // 5 > 5
    assert watched.seen.worst_difference(architecture) <= TOLERANCE


@pytest.mark.parametrize("host_room", [0.0, 4.0])
def test_requests_cancelled_while_preempted_or_before_a_fork_free_everything(host_room):
    engine = engine_under(
        model_of("llama"), 1.2, host_room=host_room, preempt="swap" if host_room else "recompute"
    )
    watched, rng = Watched(engine), random.Random(5)
    jobs = make_jobs(60, seed=5)
    preempted = forked = 0
    while jobs or engine.has_work:
        for _ in range(2 if jobs else 0):
            submit(engine, jobs.pop(), f"r{len(jobs)}")
        watched.step()
        for request in list(engine.requests()):
            waits_for_fork = bool(request.group and request.group.forks)
            is_preempted = bool(request.progress.num_preemptions and request.memory.row < 0)
            if (waits_for_fork or is_preempted) and rng.random() < 0.2:
                engine.cancel(request.request_id.split("#")[0], rng.choice([None, 0, 1]))
                watched.check()
                preempted, forked = preempted + is_preempted, forked + waits_for_fork

    watched.assert_nothing_is_held()
    assert preempted > 2
    assert forked > 2
    assert watched.seen.worst_difference("llama") <= TOLERANCE
