"""The clock of a simulation: it stands still until it is told how much time has passed."""


class VirtualClock:
    """Seconds since the first request came.

    Attributes:
        now_s: the time.
    """

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """The time, as event logs ask for it."""
        return self.now_s
