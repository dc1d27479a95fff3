"""Decode steps of a batch whose KV nobody has computed: random numbers in every page.

A step is one forward of the model with all its attention. No scheduler, no sampler.
"""

import numpy as np
import torch

from quire.config.kv_config import KVConfig
from quire.engine.pool import KVPool, build_pool
from quire.engine.runner import StepBridge
from quire.kv.step import StepAttention
from quire.models.loader import LoadedModel
from quire.profile.attention import fill_pages
from quire.scheduler.schedule_config import ScheduleConfig

_SPARE_BYTES = 64 << 20  # slabs that are not full


class DecodeSteps:
    """Sequences in a memory of their own; a call is a step in which each gets a token.

    Args:
        model: random weights.
        codec: of KV.
        batch: sequences.
        tokens: of each before the first step.
        steps: at most.
    """

    def __init__(self, model: LoadedModel, codec: str, batch: int, tokens: int, steps: int) -> None:
        self._model, self.batch = model, batch
        longest = tokens + steps + 16  # a page at most that is not full
        plain_bytes = model.spec.kv_bytes(longest, model.decoder.dtype.itemsize) * batch
        kv = KVConfig(memory=plain_bytes + _SPARE_BYTES, codec=codec, enable_prefix_caching=False)
        self._pool: KVPool = build_pool(model, kv, ScheduleConfig(max_num_seqs=batch))
        memory = self._pool.kv.memory
        self._rows = np.array([memory.start() for _ in range(batch)], dtype=np.int64)
        memory.grow(self._rows, np.full(batch, tokens, dtype=np.int32))
        generator = torch.Generator().manual_seed(0)
        for page_class in memory.layout.page_classes:
            views = self._pool.kv.store.views(page_class)
            fill_pages(views, page_class.head_dim, generator)
        self._ones = np.ones(batch, dtype=np.int32)

    @property
    def kv_bytes(self) -> int:
        """Pages that a step reads."""
        return self._pool.kv.memory.used_bytes

    def __call__(self) -> None:
        """One step."""
        memory = self._pool.kv.memory
        memory.grow(self._rows, self._ones)
        positions = torch.from_numpy(memory.lengths[self._rows] - 1)
        bridge = StepBridge(StepAttention(self._pool.kv, self._rows, self._ones))
        samples = torch.arange(self.batch)
        with torch.inference_mode():
            self._model.decoder.forward(samples, positions, samples, bridge)
