"""How many steps state machines take: 2 x 10^4 in `make test`, 10^6 in the `deep` profile."""

import os


def seeded_steps() -> int:
    """Scheduler steps of the seeded loads."""
    deep = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
    return 500_000 if deep else 12_000
