"""Copies between device and host that move no bytes and take their time all the same."""

from quire.kv.pages import PageNumbers
from quire.layout.pages import PageClass


class TimedCopies:
    """`HostCopies` on a clock of their own: it advances by bytes over a rate.

    Args:
        bytes_per_s: of a link, either way.

    Attributes:
        seconds: of all copies so far.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.seconds = 0.0
        self._bytes_per_s = bytes_per_s
        self._paid_s = 0.0

    def __call__(self) -> float:
        """The clock, as who times copies reads it."""
        return self.seconds

    def save(self, page_class: PageClass, pages: PageNumbers, start: int) -> None:
        """Count the time of copies to the host."""
        self.seconds += len(pages) * page_class.page_bytes / self._bytes_per_s

    def load(self, page_class: PageClass, pages: PageNumbers, start: int) -> None:
        """Count the time of copies back."""
        self.save(page_class, pages, start)

    def wait(self) -> None:
        """Nothing to wait for."""

    def unpaid_s(self) -> float:
        """Seconds since this was last asked: the next step waits for them."""
        unpaid_s, self._paid_s = self.seconds - self._paid_s, self.seconds
        return unpaid_s
