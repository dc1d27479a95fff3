"""Measured time of each component of a step, in a separate run that the clocks slow slightly.

Hooks on the model's modules and a wrapper around its attention record times; `plan.roofline` gives
the least cost of a step.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from benchmarks.common.decoders import ForwardingDecoder
from benchmarks.common.models import random_model
from benchmarks.common.workload import Workload
from benchmarks.throughput.measured import ENGINE, KINDS, PARTS, StepMeasure
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import AttentionName
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.layout.model import ModelSpec
from quire.models.adapter import TransformersDecoder
from quire.models.base import AttentionCall, PagedAttention
from quire.plan.roofline import PartCost, RowTokens, step_parts
from quire.scheduler.schedule_config import ScheduleConfig

_MODULES = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "o_proj": "output projection",
    "mlp": "mlp",
    "lm_head": "head",
}


class TimedDecoder(ForwardingDecoder):
    """A decoder that adds up the time of its components in `seconds`.

    Args:
        inner: adapter of a model with Llama's module names.
    """

    def __init__(self, inner: TransformersDecoder) -> None:
        super().__init__(inner)
        self.seconds = dict.fromkeys(PARTS, 0.0)
        for name, module in inner.model.named_modules():
            part = _MODULES.get(name.rpartition(".")[2])
            if part is not None:
                self._watch(module, part)

    def forward(
        self,
        token_ids: Int[Tensor, " num_tokens"],
        positions: Int[Tensor, " num_tokens"],
        sample_rows: Int[Tensor, " num_samples"],
        attention: PagedAttention,
        *,
        rope_variant: int = 0,
    ) -> Float[Tensor, "num_samples vocab"]:
        """See `Decoder.forward`; time outside the components is added to `rest`."""
        parts_s = self._parts_s()
        started_s = time.perf_counter()
        timed = _TimedAttention(attention, self.seconds)
        logits = super().forward(
            token_ids, positions, sample_rows, timed, rope_variant=rope_variant
        )
        whole_s = time.perf_counter() - started_s
        self.seconds["rest"] += whole_s - (self._parts_s() - parts_s)
        return logits

    def _parts_s(self) -> float:
        return sum(part_s for part, part_s in self.seconds.items() if part != "rest")

    def _watch(self, module: nn.Module, part: str) -> None:
        started_s = 0.0

        def start(_module: nn.Module, _arguments: object) -> None:
            nonlocal started_s
            started_s = time.perf_counter()

        def stop(_module: nn.Module, _arguments: object, _output: object) -> None:
            self.seconds[part] += time.perf_counter() - started_s

        module.register_forward_pre_hook(start)
        module.register_forward_hook(stop)


class _TimedAttention:
    """Attention of a step, with the writing of keys and values."""

    def __init__(self, inner: PagedAttention, seconds: dict[str, float]) -> None:
        self._inner, self._seconds = inner, seconds

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `PagedAttention.attend`."""
        started_s = time.perf_counter()
        out = self._inner.attend(call, query, key, value)
        self._seconds["attention"] += time.perf_counter() - started_s
        return out


def measure_parts(
    workload: Workload, *, repeats: int, attention: AttentionName = "auto"
) -> tuple[StepMeasure, ...]:
    """Run the workload `repeats` times after a warm-up; measure its prefill and decode steps.

    Args:
        workload: the prompts; only kinds of steps that occur are returned.
        repeats: repeats of the whole workload.
        attention: attention backend, as in `KVConfig`.
    """
    model = random_model(workload.shape(), dtype=torch.bfloat16)
    assert isinstance(model.decoder, TransformersDecoder), "random models use the adapter"
    timed = TimedDecoder(model.decoder)
    engine = Engine(
        replace(model, decoder=timed),
        workload.kv_config(model.spec, attention=attention),
        ScheduleConfig(low_watermark=1.0),
    )
    runs = [_run(engine, timed, workload) for _ in range(repeats + 1)][1:]
    return tuple(_summary(kind, runs, model.spec) for kind in KINDS if runs[0][kind])


@dataclass(frozen=True, slots=True)
class _Step:
    rows: list[RowTokens]
    sampled_rows: int
    seconds: dict[str, float]


def _run(engine: Engine, timed: TimedDecoder, workload: Workload) -> dict[str, list[_Step]]:
    """Run all prompts; return the steps of each kind in order."""
    options = SamplingParams(max_tokens=workload.new_tokens, temperature=0.0, ignore_eos=True)
    for prompt in workload.prompt_ids():
        engine.submit(GenerationRequest(prompt, options))
    found: dict[str, list[_Step]] = {kind: [] for kind in KINDS}
    while engine.has_work:
        step = _timed_step(engine, timed)
        if step is None:
            continue
        new = [row.new for row in step.rows]
        if new == [1] * workload.prompts:
            found["decode"].append(step)
        elif (
            sum(new) == engine.schedule_config.max_num_batched_tokens or len(found["prefill"]) == 0
        ):
            found["prefill"].append(step)
    return found


def _timed_step(engine: Engine, timed: TimedDecoder) -> _Step | None:
    """Run one step; None if a request ended in it, because its row is no longer visible."""
    before = {r.request_id: r.progress.num_computed for r in engine.scheduler.running}
    timed.seconds.update(dict.fromkeys(PARTS, 0.0))
    started_s = time.perf_counter()
    deltas = engine.step()
    whole_s = time.perf_counter() - started_s
    if any(delta.finish_reason is not None for delta in deltas):
        return None
    rows = [
        RowTokens(new=r.progress.num_computed - known, before=known)
        for r in engine.scheduler.running
        if r.progress.num_computed > (known := before.get(r.request_id, 0))
    ]
    times_s = timed.seconds | {ENGINE: whole_s - sum(timed.seconds.values())}
    return _Step(rows, sum(bool(delta.token_ids) for delta in deltas), times_s)


def _summary(kind: str, runs: list[dict[str, list[_Step]]], spec: ModelSpec) -> StepMeasure:
    """Means over the steps of a run, which are equal in each run; medians over runs."""
    steps = runs[0][kind]
    costs = [step_parts(spec, step.rows, sampled_rows=step.sampled_rows) for step in steps]
    return StepMeasure(
        kind=kind,
        tokens=statistics.fmean(sum(row.new for row in step.rows) for step in steps),
        steps=len(steps),
        costs=tuple(_mean(same) for same in zip(*costs, strict=True)),
        seconds={
            part: statistics.median(
                statistics.fmean(step.seconds[part] for step in run[kind]) for run in runs
            )
            for part in (*PARTS, ENGINE)
        },
    )


def _mean(same: Sequence[PartCost]) -> PartCost:
    return PartCost(
        name=same[0].name,
        weight_bytes=round(statistics.fmean(cost.weight_bytes for cost in same)),
        kv_bytes=round(statistics.fmean(cost.kv_bytes for cost in same)),
        flops=round(statistics.fmean(cost.flops for cost in same)),
    )
