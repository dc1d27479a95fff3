"""Decisions of an engine that rank 0 makes for all ranks of its model: tokens and learned costs."""

import zlib
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from quire.kernels.native.sampling import RowSampling
from quire.kv.memory import KVMemory
from quire.parallel.lockstep import Lockstep
from quire.plan.preemption_costs import LearnedCosts
from quire.plan.rates import Costs
from quire.sampling.sampler import SampledToken, Sampler, SamplingRow
from quire.scheduler.step import StepPlan


class RankSampler(Sampler):
    """Samples on rank 0; the other ranks get its tokens."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        *,
        undecodable_ids: Iterable[int] = (),
        one_by_one: bool = False,
        native: RowSampling | None = None,
        lockstep: Lockstep,
    ) -> None:
        super().__init__(
            vocab_size,
            eos_token_ids,
            undecodable_ids=undecodable_ids,
            one_by_one=one_by_one,
            native=native,
        )
        self._lockstep = lockstep

    def sample(
        self, logits: Float[Tensor, "rows vocab"], rows: Sequence[SamplingRow]
    ) -> list[SampledToken]:
        sample = super().sample
        return self._lockstep.same(lambda: sample(logits, rows))

    def search_logits(self, logits: Float[Tensor, "beams vocab"]) -> Float[Tensor, "beams vocab"]:
        found = self._lockstep.same(lambda: logits.float().cpu().numpy())
        return torch.from_numpy(np.array(found)).to(logits.device)


class RankCosts(LearnedCosts):
    """Costs of preemption that all ranks learn from the times of rank 0."""

    def __init__(self, prior: Costs, lockstep: Lockstep) -> None:
        super().__init__(prior)
        self._lockstep = lockstep

    def copied_out(self, num_bytes: int, seconds: int | float) -> None:
        super().copied_out(num_bytes, self._lockstep.same(lambda: seconds))

    def copied_back(self, num_bytes: int, seconds: int | float) -> None:
        super().copied_back(num_bytes, self._lockstep.same(lambda: seconds))

    def read(self, tokens: int, before: int, seconds: int | float) -> None:
        super().read(tokens, before, self._lockstep.same(lambda: seconds))


def digest(plan: StepPlan, memory: KVMemory) -> int:
    """A number that is equal on ranks with equal plans and equally full memories."""
    rows = np.array([request.memory.row for request in plan.requests], dtype=np.int64)
    counts = (*plan.tokens, memory.used_bytes, memory.free_bytes, memory.copied_bytes)
    found = zlib.crc32(rows.tobytes(), zlib.crc32(np.array(counts, dtype=np.int64).tobytes()))
    for table in memory.tables.values():
        found = zlib.crc32(np.ascontiguousarray(table.num_slots[rows]).tobytes(), found)
    return found
