"""What is read off timelines of whole steps: speeds that fit them, and traces for people."""

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.offload_schedule.executor import Executor, Work
from quire.offload.profiler import COST_CLASSES, Speeds, call_and_units, speeds_of
from quire.offload.timeline import Schedule, Span, Timeline
from quire.plan.fitting import fit_seconds


def measure_speeds(executor: Executor, probes: Sequence[tuple[Schedule, Work]]) -> Speeds:
    """Speeds from probes that are run once unmeasured and once measured.

    Args:
        executor: that will run the steps.
        probes: schedules of different sizes, and their work.
    """
    spans: list[Span] = []
    for schedule, work in probes:
        executor.run(schedule, work)
        spans += executor.run(schedule, work).spans
    return fit_speeds(spans)


def fit_speeds(spans: Iterable[Span]) -> Speeds:
    """Speeds that fit operations best; what did not run is free."""
    samples: dict[str, tuple[list[tuple[float, float]], list[float]]] = {}
    for span in spans:
        amounts, seconds = samples.setdefault(COST_CLASSES[span.operation.kind], ([], []))
        if span.seconds > 0 and call_and_units(span.operation)[1]:
            amounts.append(call_and_units(span.operation))
            seconds.append(float(span.seconds))
    fitted = {name: fit_seconds(*found) for name, found in samples.items() if found[1]}
    return speeds_of({name: (call_s, unit_s) for name, (call_s, unit_s) in fitted.items()})


# ---- traces --------------------------------------------------------------------------------------


def chrome_trace(timelines: Mapping[str, Timeline]) -> dict[str, object]:
    """Events for chrome://tracing or Perfetto: a process for each timeline, a thread for each lane.

    Args:
        timelines: by name.
    """
    events: list[dict[str, object]] = []
    for process, (name, timeline) in enumerate(timelines.items()):
        events.append(_named("process_name", process, 0, name))
        for thread, lane in enumerate(timeline.schedule.lanes):
            events.append(_named("thread_name", process, thread, lane))
            events += [_event(span, process, thread) for span in timeline.of(lane)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, process: int, thread: int, name: str) -> dict[str, object]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _event(span: Span, process: int, thread: int) -> dict[str, object]:
    operation = span.operation
    return {
        "name": operation.label,
        "cat": str(operation.kind),
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": span.start_s * 1e6,
        "dur": span.seconds * 1e6,
        "args": {"bytes": operation.num_bytes, "tokens": operation.tokens, "slot": operation.slot},
    }
