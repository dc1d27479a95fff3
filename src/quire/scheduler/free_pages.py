"""Whether a waiting request finds room: a row, pages for what is promised, a place for its copy."""

from collections.abc import Sequence

import numpy as np

from quire.scheduler.admission.peaks import Counts
from quire.scheduler.group import bytes_of, copies_to_come, num_rows, reserved_rows
from quire.scheduler.request import Request
from quire.scheduler.scheduler_parts import SchedulerParts

MOVED_ON_TOKENS = 16  # that whoever enters under a mark for scaling down has room for


class FreePages:
    """Rows and pages that are left.

    Args:
        parts: the rules that are asked.
        running: those that are in; the scheduler's own list.

    Attributes:
        most_rows: of the KV memory.
    """

    def __init__(self, parts: SchedulerParts, running: list[Request]) -> None:
        self._config, self._sequence_memory = parts.config, parts.sequence_memory
        self._admission, self._preempter = parts.admission, parts.preempter
        self._memory, self._running = parts.sequence_memory.memory, running
        self.most_rows = parts.config.num_rows

    @property
    def reserved_free_bytes(self) -> float:
        """Bytes that nobody who enters may take, where others run."""
        return (1 - self._config.full_at) * self._memory.total_bytes

    def rows_left(self, request: Request, staying: Sequence[Request]) -> bool:
        """Whether there is a row for a request, and those of its group, beside some that run."""
        num_leaving = len(self._running) - len(staying)
        free = self._memory.num_free_rows + num_leaving
        free = min(self.most_rows - len(staying), free)
        return num_rows(request) + reserved_rows(staying) <= free

    def fits(self, request: Request, cached_tokens: int) -> bool:
        """Whether there are rows and room for a request, and pages for its copy on the host.

        What is promised must fit, with a part left below the low watermark. A request that would
        be alone needs no such part.
        """
        if not self.rows_left(request, self._running):
            return False
        if self._running:
            promised = self._promised(request, cached_tokens, self._running)
            by_class = self._admission.peaks.by_class(promised)
            sharing = self._sequence_memory.sharing
            if not (self._leaves_enough(promised, 0) and sharing.make_room(by_class)):
                return False
        return self._preempter.has_place(request)

    def _promised(self, request: Request, cached_tokens: int, staying: Sequence[Request]) -> Counts:
        peaks = self._admission.peaks
        promised = self._admission.promised(request, staying, cached_tokens)
        if self._config.scale_down_at is not None:
            promised = np.maximum(promised, self._soon(request, staying, cached_tokens))
        for copy in copies_to_come([request, *staying]):
            promised = promised + self._admission.promised(copy, [], peaks.shared_tokens(copy))
        return promised

    def _soon(self, request: Request, staying: Sequence[Request], cached_tokens: int) -> Counts:
        """What all take to move on a little: else who comes back would be taken out again."""
        tokens = min(request.num_tokens + MOVED_ON_TOKENS, request.final_tokens)
        new_request = self._admission.new_request(request, tokens, cached_tokens)
        then = [min(r.num_tokens + MOVED_ON_TOKENS, r.final_tokens) for r in staying]
        soon: Counts = new_request + self._admission.peaks.owed(staying, then).sum(axis=0)
        return soon

    def _leaves_enough(self, promised: Counts, freed_bytes: int) -> bool:
        left_bytes = self._sequence_memory.sharing.available_bytes + freed_bytes
        left_bytes -= self._admission.peaks.num_bytes(promised)
        return left_bytes >= self.reserved_free_bytes

    def would_fit(self, request: Request, cached_tokens: int, staying: Sequence[Request]) -> bool:
        """Whether there would be room for a request if only these stayed."""
        if not self.rows_left(request, staying):
            return False
        freed_bytes = bytes_of(self._running, self._memory) - bytes_of(staying, self._memory)
        promised = self._promised(request, cached_tokens, staying)
        return not staying or self._leaves_enough(promised, freed_bytes)
