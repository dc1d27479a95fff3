"""What a run showed: the evidence that features have acted."""

from dataclasses import dataclass
from functools import cached_property

from fuzz.case import Case
from fuzz.run import Outcome
from fuzz.watch import Watched
from quire.engine.stats import EngineStats
from quire.sampling.outputs import Choice
from quire.scheduler.eviction_trace import RetainedSets


@dataclass
class Ran:
    """A case that ended with the right answers."""

    case: Case  # the case
    scarce: Watched  # its engine
    ample: Watched  # the engine in ample memory
    outcome: Outcome  # of the comparison

    @cached_property
    def stats(self) -> EngineStats:
        """Statistics of the engine at the end."""
        return self.scarce.engine.stats()

    @cached_property
    def traces(self) -> list[tuple[int, list[RetainedSets]]]:
        """Prompt length and evictions of every sequence that evicted tokens."""
        found = []
        for number, request in enumerate(self.case.requests):
            for index in range(len(self.scarce.answers[f"r{number}"].choices)):
                name = f"r{number}" + f"#{index}" * (index > 0)
                entries = _trace(self.scarce, name)
                if entries:
                    found.append((len(request.prompt), entries))
        return found

    @property
    def choices(self) -> list[Choice]:
        """All outputs."""
        return [c for answer in self.scarce.answers.values() for c in answer.choices]

    @property
    def outputs(self) -> list[tuple[Choice, ...]]:
        """The outputs of each request that asks for several."""
        requests = enumerate(self.case.requests)
        several = [number for number, request in requests if "n" in request.params]
        return [self.scarce.answers[f"r{number}"].choices for number in several]

    @property
    def evicted(self) -> bool:
        """Whether tokens were evicted."""
        return self.scarce.kinds["evicted"] > 0

    def happened(self, *names: str) -> bool:
        """Whether an event of this kind, or kind and reason, happened."""
        return any(self.scarce.kinds[n] or self.scarce.details[n] for n in names)

    def lengths(self) -> list[list[int]]:
        """Retained tokens of each lane, after each eviction."""
        return [[len(lane) for lane in e.retained] for _, found in self.traces for e in found]

    def groups(self) -> list[str]:
        """Names of the lane groups whose pages were used."""
        return list(self.scarce.engine.pool.kv.memory.tables)


def _trace(watched: Watched, name: str) -> list[RetainedSets]:
    try:
        return watched.engine.eviction_trace(name)
    except ValueError:
        return []
