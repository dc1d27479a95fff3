"""How many steps seeded loads take; `conftest` has the sum over all state machines."""

import os


def seeded_steps() -> int:
    """Scheduler steps of the seeded loads."""
    deep = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
    return 500_000 if deep else 12_000
