"""Of several ways to do a step the fastest by the virtual clock: never slower than the plainest."""

from collections.abc import Sequence

from quire.offload.executors.virtual import VirtualClock
from quire.offload.schedule.operations import Schedule
from quire.offload.schedule.planner import plan_step
from quire.offload.schedule.rules import Rules
from quire.offload.schedule.work import StepWork


def fastest(ways: Sequence[tuple[StepWork, Rules]]) -> tuple[int, Schedule]:
    """Which way is expected to end first, and its schedule; of equal ones the first named.

    The formulas speak of the steady state. Few layers, first chunks and calls count here too, so
    with carrying all KV among the ways no step is expected to be slower than that.

    Args:
        ways: work and layout of each.
    """
    schedules = [plan_step(work, rules) for work, rules in ways]
    times = [VirtualClock().run(schedule).seconds for schedule in schedules]
    best = min(range(len(ways)), key=lambda way: (times[way], way))
    return best, schedules[best]
