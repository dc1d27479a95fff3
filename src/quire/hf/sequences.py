"""The rows of a batch in pages: process new tokens chunk by chunk, evict between chunks."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from quire.config.sampling_params import SamplingParams
from quire.engine.runner import StepBridge
from quire.errors import OutOfPages
from quire.hf.evicting import Evicting
from quire.kv.memory import KVMemory
from quire.kv.paged_kv import PagedKV
from quire.kv.sharing import fork
from quire.kv.step import LastStep, StepAttention
from quire.layout.eviction import PRESSURE, UNLIMITED
from quire.layout.layout import statistics_used
from quire.models.base import Decoder
from quire.policies.eviction import Eviction, EvictionRule
from quire.scheduler.request import Request, RequestEviction, RequestMemory, RequestSpec

Counts = NDArray[np.int32]


def start_rows(
    memory: KVMemory,
    rule: EvictionRule,
    evictions: Sequence[Eviction],
    prompts: Sequence[int],
    rope_variant: int,
) -> list[Request]:
    """Allocate a row of the memory for each prompt."""
    statistics = statistics_used(memory.layout, rule.statistics)
    return [
        Request(
            RequestSpec(
                request_id=f"row {i}",
                prompt_token_ids=[0] * tokens,  # only the count is used
                params=SamplingParams(),
                rope_variant=rope_variant,
                evict=rule.text,
            ),
            memory=RequestMemory(row=memory.start(statistics), statistics=statistics),
            eviction=RequestEviction(
                spec=eviction.spec,
                selection=eviction,
                pending=rule.budget.needs_prompt and not eviction.keeps_all(tokens, UNLIMITED),
            ),
        )
        for i, (tokens, eviction) in enumerate(zip(prompts, evictions, strict=True))
    ]


class Sequences:
    """All rows of a batch."""

    def __init__(
        self,
        decoder: Decoder,
        kv: PagedKV,
        evicting: Evicting,
        rule: EvictionRule,
        rows: Sequence[Request],
    ) -> None:
        self._decoder, self._kv, self._evicting = decoder, kv, evicting
        self._last = LastStep()
        self._needs_prompt = rule.budget.needs_prompt
        self.rows = list(rows)

    @property
    def lengths(self) -> list[int]:
        return [row.progress.num_computed for row in self.rows]

    def select(self, indices: Sequence[int]) -> None:
        """Select rows in this order; a repeated row is forked and shares its pages."""
        chosen: list[Request] = []
        forks: list[int] = []
        try:
            for place, index in enumerate(indices):
                row = self.rows[index]
                if index in indices[:place]:
                    forks.append(fork(self._kv.memory, row.memory.row))
                    row = _fork_of(row, forks[-1])
                chosen.append(row)
        except OutOfPages:
            self._kv.memory.release(forks)
            raise
        self._kv.memory.release([r.memory.row for i, r in enumerate(self.rows) if i not in indices])
        self.rows = chosen

    # ---- turns and rollback --------------------------------------------------------------------

    def begin_turn(self, evictions: Sequence[Eviction], counts: Counts) -> None:
        """The next tokens of each row are a prompt, such as the next message of a conversation."""
        turns = []
        for row, eviction, tokens in zip(self.rows, evictions, counts.tolist(), strict=True):
            prompt = [0] * (row.progress.num_computed + tokens)  # only the count is used
            state = replace(
                row.eviction,
                spec=eviction.spec,
                selection=eviction,
                pending=self._needs_prompt and not eviction.keeps_all(len(prompt), UNLIMITED),
            )
            spec = replace(row.spec, prompt_token_ids=prompt)
            turns.append(Request(spec, row.progress, row.memory, state))
        self.rows = turns

    def fork_rows(self) -> list[Request]:
        """Fork all rows; the forks share their pages."""
        forks: list[Request] = []
        try:
            for row in self.rows:
                number = fork(self._kv.memory, row.memory.row)
                forks.append(_fork_of(row, number))
        except OutOfPages:
            self.free(forks)
            raise
        return forks

    def roll_back(self, forks: Sequence[Request]) -> None:
        """Free the rows and continue with their forks."""
        self.free(self.rows)
        self.rows = list(forks)

    def free(self, rows: Sequence[Request]) -> None:
        self._kv.memory.release([row.memory.row for row in rows])

    def truncate(self, tokens: int) -> None:
        """Remove the last tokens of every row."""
        for row in self.rows:
            length = row.progress.num_computed - tokens
            self._kv.memory.truncate(row.memory.row, length)
            row.progress.num_computed = length

    def close(self) -> None:
        self.free(self.rows)
        self.rows = []

    # ---- processing ----------------------------------------------------------------------------

    def process(
        self,
        token_ids: Int[Tensor, "batch columns"],
        counts: Counts,
        columns: NDArray[np.int64],
    ) -> Float[Tensor, "batch wanted vocab"]:
        """Logits of `columns` after the last `counts` tokens of each row; zeros for pads."""
        shape = (len(counts), len(columns), self._decoder.spec.vocab_size)
        logits = torch.zeros(shape, dtype=self._decoder.dtype, device=self._decoder.device)
        done = np.zeros_like(counts)
        while (done < counts).any():
            left = counts - done
            sizes = np.zeros_like(left)
            for i in np.flatnonzero(left):
                self._evicting.evict_for_chunk(self.rows[i])
                sizes[i] = self._evicting.chunk_tokens(self.rows[i], int(left[i]))
            chunk = self._grow(sizes)
            first = token_ids.shape[1] - counts + done
            part, places = self._run(token_ids, first, chunk, columns)
            logits = logits.to(part.dtype)  # some models return float32 for any weight dtype
            logits[places] = part
            done += chunk
            for row, tokens in zip(self.rows, chunk.tolist(), strict=True):
                row.progress.num_computed += tokens
                if tokens and row.progress.num_computed == len(row.prompt_token_ids):
                    self._evicting.evict_after_prompt(row)
        return logits

    def _grow(self, sizes: Counts) -> Counts:
        """Allocate pages for these tokens, or for fewer tokens in rows with when=pressure."""
        memory = self._kv.memory
        growing = np.flatnonzero(sizes)
        rows = np.array([self.rows[i].memory.row for i in growing], dtype=np.int64)
        under_pressure = np.array([row.eviction.spec.when == PRESSURE for row in self.rows])
        self._evicting.evict_under_pressure(
            self.rows, lambda: memory.can_grow(rows, sizes[growing])
        )
        while not memory.can_grow(rows, sizes[growing]) and (sizes[under_pressure] > 1).any():
            sizes = np.where(under_pressure & (sizes > 1), sizes // 2, sizes)
        try:
            memory.grow(rows, sizes[growing])
        except OutOfPages as error:
            pages = memory.pages_to_grow(rows, sizes[growing])
            raise OutOfPages(
                f"no free pages for the next {int(sizes.sum())} tokens: "
                f"{memory.shortage(pages)}; raise memory=, lower budget=, or evict "
                "during prefill (when='prefill_and_decode')"
            ) from error
        return sizes

    def _run(
        self,
        token_ids: Tensor,
        first: Counts,
        chunk: Counts,
        columns: NDArray[np.int64],
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run one flat batch; return logits of requested columns and their output indices."""
        order = np.argsort(chunk != 1, kind="stable")  # rows of one token first
        order = order[chunk[order] > 0]
        rows, tokens = [self.rows[i] for i in order], chunk[order]
        starts = np.cumsum(tokens) - tokens
        owner = np.repeat(np.arange(len(order)), tokens)
        offset = np.arange(len(owner)) - starts[owner]
        index, column = self._tensor(order[owner]), self._tensor(first[order][owner] + offset)
        position = np.array([row.progress.num_computed for row in rows])[owner] + offset
        if not self._kv.rotated:  # RoPE is the identity at position 0: pages store pre-RoPE keys
            position[:] = 0
        into = columns - first[order][:, None]  # [rows of this batch, wanted]
        owned, which = np.nonzero((into >= 0) & (into < tokens[:, None]))
        numbers = np.array([row.memory.row for row in rows], dtype=np.int64)
        part = self._decoder.forward(
            token_ids[index, column],
            self._tensor(position),
            self._tensor(starts[owned] + into[owned, which]),
            StepBridge(StepAttention(self._kv, numbers, tokens, last=self._last)),
            rope_variant=rows[0].spec.rope_variant,
        )
        return part, (self._tensor(order[owned]), self._tensor(which))

    def _tensor(self, numbers: NDArray[np.generic]) -> Tensor:
        whole = np.ascontiguousarray(numbers, dtype=np.int64)
        return torch.from_numpy(whole).to(self._decoder.device)


def _fork_of(parent: Request, row: int) -> Request:
    """Copy a request's state to another row of the memory."""
    return Request(
        parent.spec,
        replace(parent.progress, output_token_ids=list(parent.output_token_ids)),
        replace(parent.memory, row=row),
        replace(parent.eviction, trace=list(parent.eviction.trace)),
    )
