"""A thread between the KV memory and its tiers: loads precede stores.

urgent   [load a][load b][load a] ...      round robin
later    [store x][store y] ...            only while no load is queued
"""

import logging
import threading
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)

Work = Callable[[], None]


class TierTransferWorker:
    """Runs work items one at a time on a thread of its own.

    An exception of a work item is logged; the item counts as done.
    """

    def __init__(self) -> None:
        self._urgent: deque[Work] = deque()
        self._later: deque[Work] = deque()
        self._changed = threading.Condition()
        self._busy = self._closing = False
        self._thread = threading.Thread(target=self._run, name="quire-tier", daemon=True)
        self._thread.start()

    def urgent(self, work: Work) -> None:
        """Queue work after all urgent work."""
        self._add(self._urgent, work)

    def later(self, work: Work) -> None:
        """Queue work to run while no urgent work is queued."""
        self._add(self._later, work)

    def _add(self, works: deque[Work], work: Work) -> None:
        with self._changed:
            works.append(work)
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until all queued work is done."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._urgent or self._later or self._busy))

    def close(self) -> None:
        """Finish all queued work, then end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._urgent or self._later or self._closing)
                if not (self._urgent or self._later):
                    return
                work = (self._urgent or self._later).popleft()
                self._busy = True
            try:
                work()
            except Exception:
                logger.exception("a KV transfer to or from a tier failed")
