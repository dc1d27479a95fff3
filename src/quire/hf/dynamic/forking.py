"""Several completions of one prompt: prefilled once, its KV is copied to their rows.

prompt  ->  query 0 (prefilled) ->  row
            query 1, 2, ... (forks): first token from the same logits, KV of the prompt shared
                                     until each has a row
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from quire.hf.dynamic.batch_memory import BatchSlots
from quire.hf.dynamic.query import Query, QueryQueues
from quire.hf.dynamic.sampling_step import DenseSampling
from quire.hf.dynamic.slab_model import SlabModel
from quire.kv.dense.row import RowKV, SharedKV
from quire.kv.dense.space import ByteMeter


class Forking:
    """Starts the other completions of a prompt once it is prefilled."""

    def __init__(
        self,
        model: SlabModel,
        batch_slots: BatchSlots,
        queues: QueryQueues,
        meter: ByteMeter,
        sampling_step: DenseSampling,
    ) -> None:
        self._device: torch.device = model.shape.device
        self._batch_slots, self._queues = batch_slots, queues
        self._meter, self._sampling_step = meter, sampling_step

    def accept(self, logits: Mapping[Query, Float[Tensor, " vocab"]]) -> None:
        """Sample first tokens after prefill, those of the forks included."""
        self._sampling_step.first(logits)
        for query, of_query in logits.items():
            if query.forks:
                self.fork(query, of_query)

    def fork(self, query: Query, logits: Float[Tensor, " vocab"]) -> None:
        """Start the forks of a query that has just been prefilled."""
        try:
            running = self._start(query, logits)
        except BaseException:
            if query.finished:
                self.separate(query)
            raise  # otherwise the query is prefilled again, with its forks
        query.forks = []
        for fork in running:
            self._queues.add_ready(fork)

    def _start(self, query: Query, logits: Float[Tensor, " vocab"]) -> list[Query]:
        """Sample the forks' first tokens, and give KV to those that continue; return these."""
        for fork in query.forks:
            fork.started_s = query.started_s
            self._sampling_step.first({fork: logits})
        running = [fork for fork in query.forks if not fork.finished]
        own: list[Query] = []
        if not running:
            return running
        if query.row is not None:
            assert self._batch_slots.slab is not None, "a query with a row has a slab"
            shared = self._batch_slots.slab.extract(query.row, self._device, self._meter)
        else:
            assert isinstance(query.kv, RowKV), "a prefilled query has KV of its own"
            shared, own = query.kv, [query]
        holders = [len(own) + len(running)]
        for found in (*own, *running):
            found.kv = SharedKV(shared, holders)
        return running

    def separate(self, query: Query) -> None:
        """Queue the forks of a query that leaves the batch before its prefill."""
        forks, query.forks = query.forks, []
        if forks:
            forks[0].forks = forks[1:]
            self._queues.wait(forks[0])
