"""A thread between memory and a tier: what is asked for goes before what is put away.

urgent   [load a][load b][load a] ...      one after the other, in turn
later    [store x][store y] ...            when nothing is urgent
"""

import logging
import threading
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)

Work = Callable[[], None]


class TierTransferWorker:
    """Does one thing after another, beside whoever asks.

    Work that raises is logged and counts as done; nobody waits for what it would have said.
    """

    def __init__(self) -> None:
        self._urgent: deque[Work] = deque()
        self._later: deque[Work] = deque()
        self._changed = threading.Condition()
        self._busy = self._closing = False
        self._thread = threading.Thread(target=self._run, name="quire-tier", daemon=True)
        self._thread.start()

    def urgent(self, work: Work) -> None:
        """Do it behind all that is urgent already."""
        self._add(self._urgent, work)

    def later(self, work: Work) -> None:
        """Do it when nothing is urgent."""
        self._add(self._later, work)

    def _add(self, works: deque[Work], work: Work) -> None:
        with self._changed:
            works.append(work)
            self._changed.notify_all()

    def drain(self) -> None:
        """Return when everything is done."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._urgent or self._later or self._busy))

    def close(self) -> None:
        """Do what is left, then end the thread."""
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
                logger.exception("carrying KV to or from a tier failed")
