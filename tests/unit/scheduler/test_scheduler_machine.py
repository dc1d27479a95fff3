"""The scheduler under random load, from Hypothesis and from seeds: none lost, no page leaked."""

import os
import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.scheduler_load import SchedulerLoad, Setting


def seeded_steps() -> int:
    """Scheduler steps of the seeded loads."""
    deep = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
    return 500_000 if deep else 12_000


SETTING = {
    "page_tokens": [1, 3, 8],
    "window": [None, 1, 5],
    "cap": [None, None, 6, 20],
    "mixed": [False, True],
    "with_statistics": [False, True],
    "pages": [3, 5, 8, 12, 20, 35, 60],
    "max_num_batched_tokens": [1, 5, 16, 200],
    "chunk_tokens": [2, 200],
    "max_num_seqs": [1, 3, 10],
    "shares": [False, True],
    "host_pages": [0, 3, 15, 100],
    "preempt": ["auto", "swap", "hybrid"],
    "guaranteed": [None, 0, 30, 70],
    "burst": [50, 100],
    "admission": ["optimistic", "reserved", "estimated"],
    "high_watermark": [0.8, 1.0],
    "batcher": [
        *("continuous", "static", "pd", "pd:ahead=20,window=2", "orca"),
        *("baton_pd", "baton_pd:queue=2,tokens=3", "baton_pd:prefill=sync", "baton_pd:hold=host"),
        *("baton_pd_best_fit:patience=2", "baton_pd_best_fit:hold=host,prefill=sync,queue=3"),
    ],
    "urgent": [None, -1],
    "scale_down_at": [None, None, 0.6],
}
PROMPTS = [(1, 6), (1, 60)]  # short ones are admitted together and outgrow the memory
CHECKED_EVERY = 4  # steps of a seeded load between checks


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(**{name: st.sampled_from(values) for name, values in SETTING.items()})
    def build(self, **setting):
        self.load = SchedulerLoad(Setting(**setting))

    @rule(
        prompt=st.integers(1, 6) | st.integers(1, 60),
        max_tokens=st.integers(0, 40),
        priority=st.integers(-1, 1),
        text=st.integers(1, 3),
        policy_raises=st.booleans(),
        count=st.integers(1, 3),
    )
    def submit(self, prompt, max_tokens, priority, text, policy_raises, count):
        for _ in range(count):
            self.load.submit(
                self.load.request(prompt, max_tokens, priority, text=text),
                policy_raises=policy_raises,
            )

    @rule(
        prompt=st.integers(1, 40),
        max_tokens=st.integers(1, 30),
        priority=st.integers(-1, 1),
        text=st.integers(1, 3),
        width=st.integers(2, 4),
        atomic=st.booleans(),
    )
    def submit_group(self, prompt, max_tokens, priority, text, width, atomic):
        members = [self.load.request(prompt, max_tokens, priority, text=text) for _ in range(width)]
        self.load.submit_group(members, atomic=atomic)

    @precondition(lambda self: self.load.requests)
    @rule(pick=st.integers(0, 1000))
    def cancel(self, pick):
        self.load.cancel(pick)

    @rule(stop_early=st.booleans(), steps=st.integers(1, 8))
    def run(self, stop_early, steps):
        for _ in range(steps):
            self.load.step(stop_early=stop_early)

    @rule(planning=st.booleans())
    def fail_step(self, planning):
        self.load.fail_step(planning=planning)

    @rule(calls=st.integers(0, 3))
    def fail_copy(self, calls):
        self.load.copies.fail_after = calls

    @rule()
    def preempt(self):
        self.load.scheduler.preempt_one()

    @invariant()
    def check_load(self):
        if hasattr(self, "load"):
            self.load.check()

    def teardown(self):
        if hasattr(self, "load"):
            self.load.drain()


TestScheduler = SchedulerMachine.TestCase


# ---- seeded loads ------------------------------------------------------------------------------


HYBRID = SETTING | {"shares": [True], "with_states": [True], "pages": [5, 8, 12, 20, 35, 60]}
HYBRID |= {"checkpoints": [None, 2, 6], "checkpoint_blocks": [0, 1, 3]}


def act(load: SchedulerLoad, rng: random.Random) -> None:
    prompt, max_tokens = rng.randint(*rng.choice(PROMPTS)), rng.randint(0, 40)
    priority, text = rng.randint(-1, 1), rng.randint(1, 3)
    dice = rng.random()
    if dice < 0.12:
        for _ in range(rng.randint(1, 3)):
            request = load.request(prompt, max_tokens, priority, text=text)
            load.submit(request, policy_raises=rng.random() < 0.5)
    elif dice < 0.16:
        width = rng.randint(2, 4)
        members = [load.request(prompt, max_tokens + 1, priority, text=text) for _ in range(width)]
        load.submit_group(members, atomic=rng.random() < 0.5)
    elif dice < 0.19 and load.requests:
        load.cancel(rng.randrange(1000))
    elif dice < 0.21:
        load.fail_step(planning=rng.random() < 0.5)
    elif dice < 0.22:
        load.copies.fail_after = rng.randint(0, 3)
    elif dice < 0.23:
        load.scheduler.preempt_one()
    else:
        load.step(stop_early=rng.random() < 0.3)


SLOW = (pytest.param(seed, SETTING, marks=pytest.mark.slow) for seed in (2, 4))


# the loads of seed 3 never swap; states, forks, checkpoints, swap and eviction of a hybrid
@pytest.mark.parametrize(
    ("seed", "settings"),
    [(0, SETTING), (1, SETTING), (5, HYBRID), *SLOW],
    ids=[0, 1, "hybrid", 2, 4],
)
def test_scheduler_invariants_hold_for_seeded_loads(seed, settings):
    steps = seeded_steps() // 4
    rng, done, preemptions, swaps = random.Random(seed), 0, 0, 0
    while done < steps:
        drawn = {name: rng.choice(values) for name, values in settings.items()}
        load = SchedulerLoad(Setting(**drawn))
        for number in range(rng.randint(20, 200)):
            act(load, rng)
            if number % CHECKED_EVERY == 0:
                load.check()
        load.drain()
        done += load.num_steps
        preemptions += load.scheduler.num_preemptions
        swaps += load.scheduler.preempter.swapper.num_swaps
    assert preemptions > 0
    assert swaps > 0
