"""Simulation of a trace with one simulated engine, in virtual time.

    requests that arrived   -> deliver -> begin_step -> end_step
                 ^                                          |
                 '------------------- clock ----------------'

The simulation is deterministic: the same trace and options produce the same result, bit for bit.
"""

import math
from collections.abc import Callable, Sequence

from quire.errors import InvariantError
from quire.sim.engine import SimResult, SimulatedEngine
from quire.sim.traces.base import Trace

Progress = Callable[[float, int], None]  # (virtual seconds, arrived requests)
_PROGRESS_STEPS = 1000


class Simulator:
    """Simulation of one trace with one KV memory.

    Args:
        trace: the requests and their arrival times.
        engine: the engine, at 0 s.
    """

    def __init__(self, trace: Trace, engine: SimulatedEngine) -> None:
        self.engine, self.result = engine, engine.result
        self._arrivals = trace.requests
        self._num_arrived = 0

    def run(self, progress: Progress | None = None) -> SimResult:
        """Run until every request is finished or rejected.

        Raises:
            InvariantError: a request can neither run nor be rejected, or a page was lost.
        """
        while True:
            self._deliver_arrived()
            if self.engine.begin_step():
                self.engine.end_step()
            elif self._num_arrived < len(self._arrivals):
                self.engine.wait(self._arrivals[self._num_arrived].arrival_s)
            elif self.engine.has_work:
                raise InvariantError("requests are waiting, but no step can be planned")
            else:
                break
            if progress is not None and self.result.num_steps % _PROGRESS_STEPS == 0:
                progress(self.engine.clock.now_s, self._num_arrived)
        check_finished([self.engine])
        return self.result

    def _deliver_arrived(self) -> None:
        while self._num_arrived < len(self._arrivals):
            arrived = self._arrivals[self._num_arrived]
            if arrived.arrival_s > self.engine.clock.now_s:
                return
            self._num_arrived += 1
            self.engine.deliver(self.engine.open_job(arrived, self._num_arrived))


def check_finished(engines: Sequence[SimulatedEngine]) -> None:
    """Check that all requests ended and all their pages were freed.

    Raises:
        InvariantError: a request was neither finished nor rejected, or a page was lost.
    """
    for engine in engines:
        engine.memory.check()
        records = engine.result.records
        lost = [r for r in records if r.refused is None and math.isnan(r.finish_s)]
        if lost or len(engine.memory.live_rows):
            raise InvariantError(f"{len(lost)} requests were neither finished nor refused")
