"""The same cap for every lane: the default, and the baseline of the papers on budgets."""

from dataclasses import dataclass

from quire.policies.budgets.base import Budget


@dataclass(frozen=True, slots=True)
class Uniform(Budget):
    """The same cap for every lane."""
