"""Arms of the stack benchmark: each adds one optimization to the arm before and serves one load.

The first arm is a static slab: every sequence has a row of the longest length for as long as it
runs, and nothing is shared. It is computed with the paged engine, which admits as many sequences as
rows fit into the KV memory; the memory in use is that of the rows.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.stack.load import StackLoad
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import InvariantError
from quire.models.loader import LoadedModel
from quire.scheduler.schedule_config import ScheduleConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StackArm:
    """Options of an arm's KV memory.

    Attributes:
        name: name of the added optimization.
        slab: whether every sequence has a row of the longest length, instead of pages.
        codec: codec of keys and values.
        enable_prefix_caching: whether prompts share cached prefixes.
    """

    name: str
    slab: bool = False
    codec: str = "none"
    enable_prefix_caching: bool = False

    def kv_config(self, memory_bytes: int) -> KVConfig:
        """KV config of the arm, with swap space for preempted sequences."""
        return KVConfig(
            memory=memory_bytes,
            swap_space=memory_bytes,
            codec=self.codec,
            prefix_cache=PrefixCacheConfig(enabled=self.enable_prefix_caching),
        )


CONTIGUOUS, PAGED, INT8, INT8_PREFIX, INT4_PREFIX = "contiguous", "paged", "int8", "cache", "int4"
ARMS = (
    StackArm(name=CONTIGUOUS, slab=True),
    StackArm(name=PAGED),
    StackArm(name=INT8, codec="int8"),
    StackArm(name=INT8_PREFIX, codec="int8", enable_prefix_caching=True),
    StackArm(name=INT4_PREFIX, codec="int4", enable_prefix_caching=True),
)
"""In the article's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackRun:
    """Measurements of one run of the whole load with one arm.

    Attributes:
        arm: name of the arm.
        total_s: time until the last token.
        tokens: number of generated tokens.
        max_batch: most sequences with KV at once.
        mean_batch: sequences with KV, mean over steps.
        token_s: times between two tokens of one request, for all requests.
        first_s: time to the first token of each request.
        kv_peak_bytes: peak KV bytes of requests.
        used_share: fraction of KV memory in use, mean over steps, without cached prefixes.
        preemptions: number of preemptions.
        answers: output tokens of each request.
    """

    arm: str
    total_s: float
    tokens: int
    max_batch: int
    mean_batch: float
    token_s: tuple[float, ...]
    first_s: tuple[float, ...]
    kv_peak_bytes: int
    used_share: float
    preemptions: int
    answers: tuple[tuple[int, ...], ...]

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second, with prefill included in the time."""
        return self.tokens / self.total_s

    def to_json(self) -> dict[str, int | float | str]:
        """Values for the tables, without single tokens."""
        found: dict[str, int | float | str] = {
            name: getattr(self, name)
            for name in ("arm", "total_s", "tokens", "max_batch", "mean_batch", "kv_peak_bytes")
        }
        for name, times_s in (("token", self.token_s), ("first", self.first_s)):
            for percent in (50, 99):
                found[f"{name}_p{percent}_s"] = float(np.percentile(times_s, percent))
        return found | {"used_share": self.used_share, "preemptions": self.preemptions}


@dataclass(slots=True)
class _Clock:
    """Records the times of each request's tokens."""

    answers: dict[str, list[int]]
    last_s: dict[str, float] = field(default_factory=dict)
    token_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)

    def record(self, request_id: str, token_ids: tuple[int, ...], now_s: float) -> None:
        """Record tokens of one request; the wait is divided equally among tokens of one step."""
        if not token_ids:
            return
        self.answers[request_id] += token_ids
        if request_id in self.last_s:
            self.token_s.append((now_s - self.last_s[request_id]) / len(token_ids))
        else:
            self.first_s.append(now_s)
        self.last_s[request_id] = now_s


def run_arm(model: LoadedModel, load: StackLoad, arm: StackArm) -> StackRun:
    """Serve the load with a new engine and an empty KV memory.

    Args:
        model: model with random weights.
        load: the requests.
        arm: options of the KV memory.
    """
    memory_bytes = load.kv_bytes(model.spec)
    row_bytes = memory_bytes // load.contiguous_rows
    schedule = ScheduleConfig(low_watermark=1.0)
    if arm.slab:
        schedule = replace(schedule, max_num_seqs=load.contiguous_rows)
    engine = Engine(model, arm.kv_config(memory_bytes), schedule)
    started_s = time.perf_counter()
    clock = _Clock({_submit(engine, prompt, new): [] for prompt, new in load.drawn()})
    batches, used = [], []
    while engine.has_work:
        for delta in engine.step():
            clock.record(delta.request_id, tuple(delta.token_ids), time.perf_counter() - started_s)
        batches.append(len(engine.scheduler.running))
        in_rows = batches[-1] * row_bytes
        used.append(in_rows if arm.slab else engine.pool.kv.memory.used_bytes)
    total_s = time.perf_counter() - started_s
    engine.check()
    stats = engine.stats()
    return StackRun(
        arm=arm.name,
        total_s=total_s,
        tokens=_checked(load, clock.answers),
        max_batch=max(batches),
        mean_batch=sum(batches) / len(batches),
        token_s=tuple(clock.token_s),
        first_s=tuple(clock.first_s),
        kv_peak_bytes=max(used) if arm.slab else stats.kv_peak_bytes,
        used_share=sum(used) / len(used) / memory_bytes,
        preemptions=stats.num_preemptions,
        answers=tuple(map(tuple, clock.answers.values())),
    )


def _submit(engine: Engine, prompt: list[int], new_tokens: int) -> str:
    options = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    return engine.submit(GenerationRequest(prompt, options))


def _checked(load: StackLoad, answers: Mapping[str, list[int]]) -> int:
    expected = [new_tokens for _, new_tokens in load.drawn()]
    got = [len(answer) for answer in answers.values()]
    if got != expected:
        raise InvariantError(
            f"expected all outputs of the stack benchmark to be complete, got {sum(got)} of "
            f"{sum(expected)} tokens"
        )
    return sum(got)
