"""Run many policies on the same prompts; policies with equal statistics share one prefill.

If eviction starts at the end of prefill (`when=prefill_end`), the prefill is equal under all
policies that record the same statistics. The engine's prefix cache holds the prompt's KV and these
statistics, and the next policy starts at the prompt's last block.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.common.graded_prompts import GradedPrompt, PromptMaker
from benchmarks.eviction.cells import FULL, Cell, CellKey
from benchmarks.eviction.quality import judged
from benchmarks.kvcrush.config import QualityConfig
from quire.api.llm import LLM
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.models.loader import LoadedModel
from quire.scheduler.schedule_config import ScheduleConfig

CACHED_OVER_KV = 1.5
"""Bytes of a cached prompt, with recorded statistics, over the bytes of its keys and values."""


@dataclass(frozen=True, slots=True)
class _Task:
    """The prompts of a task, and an engine that caches their prefills."""

    name: str
    llm: LLM
    prompts: list[GradedPrompt]
    token_ids: list[list[int]]
    answer_tokens: int


class ManyRules:
    """Runs cells on a model, task by task; each task starts with an empty KV memory.

    Args:
        model: model with trained weights.
        config: lengths and rows.
        make_prompts: makes the prompts of a task.
        rules: all policies that will run, without caps.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: QualityConfig,
        make_prompts: PromptMaker,
        rules: Sequence[str],
    ) -> None:
        self._model, self._config, self._make_prompts = model, config, make_prompts
        self._allow = "; ".join(dict.fromkeys(rule for rule in rules if rule != FULL))
        self._task: _Task | None = None

    @property
    def num_processed_tokens(self) -> int:
        """Tokens processed by the engine of the current task; 0 before the first cell."""
        return 0 if self._task is None else self._task.llm.engine.num_processed_tokens

    def cell(self, key: CellKey) -> Cell:
        """Run all prompts of a cell.

        Raises:
            InvariantError: a request failed.
        """
        started_s = time.perf_counter()
        task = self._of(key)
        options = SamplingParams(max_tokens=task.answer_tokens, temperature=0.0)
        answers = task.llm.generate(task.token_ids, options, evict=key.evict)
        return judged(key, task.prompts, answers, time.perf_counter() - started_s)

    def _of(self, key: CellKey) -> _Task:
        if self._task is None or self._task.name != key.task:
            self._task = None  # free its memory first
            self._task = self._begun(key)
        return self._task

    def _begun(self, key: CellKey) -> _Task:
        prompts, llm = self._make_prompts(key.task, key.tokens, key.prompts), self._open(key)
        return _Task(
            name=key.task,
            llm=llm,
            prompts=prompts,
            token_ids=[llm.encode(prompt.prompt) for prompt in prompts],
            answer_tokens=max(len(llm.encode(prompt.answer)) for prompt in prompts),
        )

    def _open(self, key: CellKey) -> LLM:
        rows, number_bytes = self._config.rows, self._model.decoder.dtype.itemsize
        row_bytes = self._model.spec.kv_bytes_per_token(number_bytes) * key.tokens
        cached = min(int(CACHED_OVER_KV * row_bytes) * key.prompts, self._config.cache)
        kv = KVConfig(
            memory=2 * rows * row_bytes + cached + (8 << 20),
            page_tokens=key.page_tokens,
            evict=FULL,
            evict_allow=self._allow,
        )
        return LLM(self._model, kv=kv, schedule=ScheduleConfig(max_num_seqs=rows))
