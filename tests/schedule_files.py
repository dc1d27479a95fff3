"""Counts the files and functions of `quire` that one `Scheduler.schedule()` passes.

`python -m tests.schedule_files` simulates a small trace with a full KV memory. It prints the
typical call (the median by functions) and the largest one, for two kinds of calls: decode-only (all
rows decode, and no request waits), and with prefill. Functions of the simulator are not counted.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import quire
from quire.config.kv_config import KVConfig
from quire.scheduler.step import StepPlan
from quire.sim.machine import Rates
from quire.sim.models import model_shape
from quire.sim.run import SimConfig, make_simulator
from quire.sim.traces.base import Trace, TraceRequest, TraceSegment, own_answer, own_prompt

ROOT = f"{Path(quire.__file__).parent}/"
RATES = Rates(read_bytes_per_s=1e11, flops_per_s=1e13, copy_bytes_per_s=1e10, overhead_s=0.001)
NUM_REQUESTS = 40
DECODE_ONLY, WITH_PREFILL = "decode-only", "with prefill"


@dataclass(slots=True)
class Call:
    """A call of `schedule`: its number of rows, the names of its functions by file."""

    num_rows: int = 0
    functions: dict[str, set[str]] = field(default_factory=dict)

    @property
    def num_functions(self) -> int:
        return sum(map(len, self.functions.values()))

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Count a function that begins; for `sys.setprofile`."""
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(ROOT) and not path.startswith(f"{ROOT}sim/"):
            names = self.functions.setdefault(path.removeprefix(ROOT), set())
            names.add(frame.f_code.co_qualname)


def recorded_calls() -> dict[str, list[Call]]:
    """Simulate the trace; return the calls of each kind, those with the fewest functions first."""
    config = SimConfig(model=model_shape("quire-tiny"), rates=RATES, kv=KVConfig(memory="2MiB"))
    simulator = make_simulator(_trace(), config)
    scheduler = simulator.engine.scheduler
    schedule, calls = scheduler.schedule, dict[str, list[Call]]()

    def recorded() -> StepPlan:
        call, all_run = Call(), not scheduler.num_waiting
        sys.setprofile(call.note)
        try:
            plan = schedule()
        finally:
            sys.setprofile(None)
        call.num_rows = len(plan.requests)
        if call.num_rows > plan.num_decoding:
            calls.setdefault(WITH_PREFILL, []).append(call)
        elif all_run:
            calls.setdefault(DECODE_ONLY, []).append(call)
        return plan

    scheduler.schedule = recorded  # type: ignore[method-assign]
    simulator.run()
    return {kind: sorted(own, key=lambda call: call.num_functions) for kind, own in calls.items()}


def typical(calls: list[Call]) -> Call:
    return calls[len(calls) // 2]


def _trace() -> Trace:
    """Requests of 60 to 364 prompt tokens; half of the prompts begin with the same 64 tokens."""
    requests = []
    for i in range(1, NUM_REQUESTS + 1):
        shared = (TraceSegment(1, 64),) if i % 2 else ()
        prompt = (*shared, *own_prompt(i, 60 + i % 7 * 40))
        answer = own_answer(i, 30 + i % 5 * 20)
        requests.append(TraceRequest(line=i, arrival_s=i * 0.0005, prompt=prompt, answer=answer))
    return Trace(name="by hand", format="test", requests=tuple(requests))


def main() -> None:
    calls = recorded_calls()
    for kind in (DECODE_ONLY, WITH_PREFILL):
        for name, call in (("largest", calls[kind][-1]), ("typical", typical(calls[kind]))):
            counts = f"{len(call.functions):3} files, {call.num_functions:3} functions"
            print(f"{kind:12}  {name}  {counts}, {call.num_rows} rows")
        for path, names in sorted(call.functions.items()):
            print(f"    {len(names):3}  {path}")


if __name__ == "__main__":
    main()
