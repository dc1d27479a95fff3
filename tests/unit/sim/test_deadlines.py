"""Deadlines and urgent requests in simulated time, for every batcher."""

import random
from dataclasses import replace

import pytest

from quire.scheduler.schedule_config import ScheduleConfig
from quire.sim.metrics import summarise
from quire.sim.models import model_shape
from quire.sim.run import SimConfig, make_simulator, simulate
from support.kv_options import kv_config
from support.sim_traces import RATES, request, trace

ROWS = 4
TINY = model_shape("quire-tiny")
BETWEEN_STEPS = ("continuous", "orca", "baton_pd", "baton_pd_best_fit", "baton_pd:hold=host")


def config(batcher="continuous", *, memory="2MiB", urgent=None):
    sizes = {"max_num_seqs": ROWS, "max_num_batched_tokens": 128}
    schedule = ScheduleConfig(batcher=batcher, urgent=urgent, **sizes)
    kv = kv_config(memory=memory, swap_space="4MiB", enable_prefix_caching=False)
    return SimConfig(model=TINY, rates=RATES, kv=kv, schedule=schedule)


def jobs(count, seed):
    """(prompt tokens, output tokens, deadline in units of service time), short and long mixed."""
    rng = random.Random(seed)
    short = [(rng.randint(5, 30), rng.randint(4, 12), 3.0) for _ in range(count)]
    long = [(rng.randint(40, 120), rng.randint(60, 120), 12.0) for _ in range(count // 3)]
    mixed = short + long
    rng.shuffle(mixed)
    return mixed


def arrivals(load, seed, count=60):
    """Poisson arrivals at a fraction of the machine's capacity, each with a deadline."""
    mixed = jobs(count, seed)
    at_once = trace(*(request(i, 0, p, a) for i, (p, a, _) in enumerate(mixed, 1)))
    capacity_s = simulate(at_once, config()).gauges.time_s / len(mixed)
    rng, now_s, found = random.Random(seed + 1), 0.0, []
    for number, (prompt, output, slack) in enumerate(mixed, 1):
        deadline_s = slack * ROWS * capacity_s * (output + prompt / 16) / 30
        requests = request(number, now_s, prompt, output)
        found.append(replace(requests, deadline_s=deadline_s))
        now_s += rng.expovariate(load / capacity_s)
    return trace(*found)


def met(load, batcher, *, known):
    """Fraction of deadlines met, with deadlines known or first come, first served."""
    num_met = total = 0
    for seed in range(2):
        requests = arrivals(load, seed)
        hidden = trace(*(replace(r, deadline_s=None) for r in requests.requests))
        visible = requests if known else hidden
        result = simulate(visible, config(batcher))
        for record, wanted in zip(result.records, requests.requests, strict=True):
            num_met += record.finish_s <= wanted.arrival_s + wanted.deadline_s
            total += 1
    return num_met / total


@pytest.mark.parametrize(
    ("batcher", "load"),
    [
        ("continuous", 1.1),
        *(
            pytest.param(batcher, load, marks=pytest.mark.slow)
            for batcher in ("continuous", "orca", "baton_pd")
            for load in (0.5, 0.8, 1.1)
            if (batcher, load) != ("continuous", 1.1)
        ),
    ],
)
def test_more_deadlines_are_met_than_first_come_first_served(batcher, load):
    """Fraction of 160 deadlines met, by load; right columns: first come, first served.

    batcher      0.5             0.8             1.1
    continuous   1.000  0.950    1.000  0.806    0.938  0.450
    orca         1.000  0.950    0.981  0.806    0.963  0.450
    baton_pd     1.000  0.963    0.963  0.812    0.825  0.456
    """
    assert met(load, batcher, known=True) > met(load, batcher, known=False)


def test_summary_reports_the_fraction_of_deadlines_met():
    late = replace(request(1, 0, 50, 20), deadline_s=1e-6)
    early = replace(request(2, 0, 50, 20), deadline_s=1e6)

    numbers = summarise(simulate(trace(late, early, request(3, 0, 5, 5)), config()))

    assert numbers["deadlines_met_fraction"] == 0.5


class RecordingTimer:
    """A timer that records its longest step."""

    def __init__(self, timer):
        self.timer, self.model, self.longest_s = timer, timer.model, 0.0

    def seconds(self, *step):
        seconds = self.timer.seconds(*step)
        self.longest_s = max(self.longest_s, seconds)
        return seconds


def longest_wait(batcher, memory, urgent):
    """The longest queue time of urgent requests among long ones, and the longest step."""
    rng = random.Random(5)
    requests = []
    for number in range(1, 24):
        prompt, output = rng.randint(5, 90), rng.randint(40, 90)
        requests.append(request(number, 0.0005 * number, prompt, output))
    for number in range(40, 46):
        arrival_s = 0.005 * (number - 39) + 0.002 * rng.random()  # at most four at once
        requests.append(replace(request(number, arrival_s, rng.randint(5, 60), 8), priority=-1))
    requests.sort(key=lambda r: r.arrival_s)
    simulator = make_simulator(trace(*requests), config(batcher, memory=memory, urgent=urgent))
    simulator.engine.timer = RecordingTimer(simulator.engine.timer)
    records = simulator.run().records
    waits = [r.queue_s for r, a in zip(records, requests, strict=True) if a.priority == -1]
    return max(waits), simulator.engine.timer.longest_s


@pytest.mark.parametrize("memory", ["2MiB", "700KiB"])
@pytest.mark.parametrize("batcher", BETWEEN_STEPS)
def test_urgent_request_waits_for_at_max_one_step(batcher, memory):
    wait_s, step_s = longest_wait(batcher, memory, urgent=-1)
    plain_s, _ = longest_wait(batcher, memory, urgent=None)
    assert wait_s <= step_s
    assert plain_s > step_s


@pytest.mark.parametrize("batcher", ["static", "pd"])
def test_static_batches_admit_no_urgent_request_between_steps(batcher):
    wait_s, step_s = longest_wait(batcher, "2MiB", urgent=-1)
    assert wait_s > 3 * step_s
