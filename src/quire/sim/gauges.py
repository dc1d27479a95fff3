"""What is read off a simulation at every step, weighted by the time the step takes."""

from dataclasses import dataclass, field

from quire.kv.memory import KVMemory

_SAMPLES_AT_MOST = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One look.

    Attributes:
        time_s: begin of the step.
        used_bytes: of the arena, pages that wait in the prefix cache included.
        allocated_bytes: pages of running sequences, as often as a sequence names them, and pages
            reserved for them.
        wasted_bytes: of these, slots without a token.
        running, waiting: requests.
    """

    time_s: float
    used_bytes: int
    allocated_bytes: int
    wasted_bytes: int
    running: int
    waiting: int


def read(memory: KVMemory, *, time_s: float, running: int, waiting: int) -> Reading:
    """Look at a memory. Slots a step is about to write count as filled."""
    allocated = wasted = 0
    for table in memory.tables.values():
        page = table.group.page_class
        pages, slots = int(table.num_pages.sum()), int(table.num_slots.sum())
        if memory.placement.reserves:
            pages += int(memory.placement.reserved_pages(table, memory.live_rows).sum())
        allocated += pages * page.page_bytes
        wasted += (pages * page.tokens - slots) * page.page_bytes // page.tokens
    return Reading(
        time_s=time_s,
        used_bytes=memory.total_bytes - memory.free_bytes,
        allocated_bytes=allocated,
        wasted_bytes=wasted,
        running=running,
        waiting=waiting,
    )


@dataclass(slots=True)
class Gauges:
    """Sums, peaks, and a thinned series of readings.

    Attributes:
        time_s: held so far.
        used_byte_s, allocated_byte_s, wasted_byte_s, running_s, waiting_s: readings x seconds.
        peak_used_bytes, peak_running, peak_waiting: the most.
        samples: every so many readings, at most 4,096 of them.
    """

    time_s: float = 0.0
    used_byte_s: float = 0.0
    allocated_byte_s: float = 0.0
    wasted_byte_s: float = 0.0
    running_s: float = 0.0
    waiting_s: float = 0.0
    peak_used_bytes: int = 0
    peak_running: int = 0
    peak_waiting: int = 0
    samples: list[Reading] = field(default_factory=list)
    _stride: int = 1
    _held: int = 0

    def hold(self, reading: Reading, seconds: float) -> None:
        """Count a reading that stands for so many seconds."""
        self.time_s += seconds
        self.used_byte_s += reading.used_bytes * seconds
        self.allocated_byte_s += reading.allocated_bytes * seconds
        self.wasted_byte_s += reading.wasted_bytes * seconds
        self.running_s += reading.running * seconds
        self.waiting_s += reading.waiting * seconds
        self.peak_used_bytes = max(self.peak_used_bytes, reading.used_bytes)
        self.peak_running = max(self.peak_running, reading.running)
        self.peak_waiting = max(self.peak_waiting, reading.waiting)
        self._sample(reading)

    def _sample(self, reading: Reading) -> None:
        if self._held % self._stride == 0:
            self.samples.append(reading)
            if len(self.samples) > _SAMPLES_AT_MOST:
                self.samples = self.samples[::2]
                self._stride *= 2
        self._held += 1

    @property
    def waste_fraction(self) -> float:
        """Allocated slots without a token, over allocated slots, over time."""
        return self.wasted_byte_s / self.allocated_byte_s if self.allocated_byte_s else 0.0

    def mean(self, name: str) -> float:
        """Mean over time of `used_byte`, `running` or `waiting`."""
        total: float = getattr(self, f"{name}_s")
        return total / self.time_s if self.time_s else 0.0
