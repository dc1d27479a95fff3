"""A stand-in for a copy stream: copies run as late as the ordering of the computation allows."""

from quire.offload.step_log import ClockMarks


class LazyCopy:
    """A copy of a `LazyWorker`; it runs when computation waits for it, or for a later one."""

    def __init__(self, worker, number):
        self._worker, self._number = worker, number

    def result(self):
        self._worker.run_until(self._number)

    def exception(self):
        self._worker.run_until(self._number)

    def done(self):
        return self._number < self._worker.num_run


class LazyWorker:
    """Runs copies in order, each at the last moment that the ordering allows."""

    def __init__(self):
        self.num_run, self.queued = 0, []

    def submit(self, copy, num_bytes):
        self.queued.append(copy)
        return LazyCopy(self, len(self.queued) - 1)

    def marks(self):
        return ClockMarks()

    def run_until(self, number):
        while self.num_run <= number:
            self.num_run += 1
            self.queued[self.num_run - 1]()

    @property
    def num_waiting(self):
        return len(self.queued) - self.num_run
