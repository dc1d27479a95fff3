"""Plans the steps of an engine with offloaded KV: the split of a prefix and the order of copies.

The schedule is that of `quire.offload.schedule.planner`, which benchmarks run on threads, streams
and a virtual clock. The virtual clock predicts the time of a step, including what the formulas of
`quire.offload.split` leave out: the first layer and fixed times of copies and products. So a split
is used only if its step is faster than one that transfers all KV.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from quire.layout.layout import SLOTS
from quire.offload.profiler import Sizes, Speeds
from quire.offload.schedule.planner import fastest, plan_step
from quire.offload.schedule.work import BatchTokens, Rules, StepWork, even_layers
from quire.offload.timeline import TaskKind
from quire.plan.rates import CopyRate

_MAX_LAYERS = 12  # predicted; further layers repeat the last ones
_MAX_KEPT = 64  # schedules and choices that are kept
_STEPS = 32  # after which a choice is renewed by newer rates
_NOMINAL = Speeds(
    inward=CopyRate(bytes_per_s=1e9), outward=CopyRate(bytes_per_s=1e9), project_token_s=1e-6
)


K = TypeVar("K")
V = TypeVar("V")


class StepPlanner:
    """Plans steps.

    Args:
        sizes: bytes that cross the link.
        num_layers: layers of the model.

    Attributes:
        num_planned: schedules planned so far.
    """

    def __init__(self, sizes: Sizes, num_layers: int) -> None:
        self.num_planned = 0
        self._sizes, self._num_layers = sizes, num_layers
        self._orders: dict[tuple[BatchTokens, ...], Mapping[tuple[int, int], int]] = {}
        self._choices: dict[tuple[int, ...], tuple[int, int]] = {}

    def order(self, batches: Sequence[BatchTokens]) -> Mapping[tuple[int, int], int]:
        """Place of (layer, batch) in the order in which the link transfers KV and activations.

        Args:
            batches: batches that share each layer.
        """
        key = tuple(replace(batch, resident=0) for batch in batches)
        if key not in self._orders:
            _make_space(self._orders)
            schedule = plan_step(self._work(key, _NOMINAL), _rules(len(key)))
            self.num_planned += 1
            copied = (
                (operation.layer, operation.batch)
                for operation in schedule.operations
                if operation.kind in (TaskKind.X_IN, TaskKind.KV_IN)
            )
            self._orders[key] = {item: place for place, item in enumerate(dict.fromkeys(copied))}
        return self._orders[key]

    def choose(
        self, speeds: Speeds, batch: BatchTokens, candidates: Sequence[int], batches: int
    ) -> int:
        """Choose how many tokens of a batch are recomputed: the candidate with the fastest step.

        Args:
            speeds: current rates.
            batch: tokens of the batch; those of `x` and `kv` are divided.
            candidates: numbers of recomputed tokens.
            batches: batches that share each layer, with equal tokens.
        """
        key = (batch.rows, batch.x + batch.kv, batches, *candidates)
        chosen, left = self._choices.get(key, (0, 0))
        if not left:
            _make_space(self._choices)
            works = [
                (self._work([_divided(batch, x)] * batches, speeds), _rules(batches))
                for x in candidates
            ]
            self.num_planned += len(works)
            chosen, left = candidates[fastest(works)[0]], _STEPS
        self._choices[key] = chosen, left - 1
        return chosen

    def _work(self, batches: Sequence[BatchTokens], speeds: Speeds) -> StepWork:
        layers = min(self._num_layers, _MAX_LAYERS)
        return StepWork(layers=even_layers(batches, layers), sizes=self._sizes, speeds=speeds)


def _make_space(kept: dict[K, V]) -> None:
    if len(kept) >= _MAX_KEPT:
        kept.pop(next(iter(kept)))


def _divided(batch: BatchTokens, x: int) -> BatchTokens:
    return replace(batch, x=x, kv=batch.x + batch.kv - x)


def _rules(batches: int) -> Rules:
    """Each batch has staging for two layers of its own."""
    return Rules(slots=SLOTS * batches)
