"""Arms of the throughput benchmark: Quire, and three ways of Transformers to run the prompts."""

import statistics
import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import (
    ContinuousBatchingConfig,
    PreTrainedModel,
    StoppingCriteriaList,
)

from benchmarks.common.decoding import generate_all
from benchmarks.common.transformers_runs import (
    PAGE_TOKENS,
    STEP_REQUESTS,
    STEP_TOKENS,
    StepClock,
    greedy,
    median_gap,
)
from benchmarks.common.workload import Workload
from quire.config.kv_config import AttentionName
from quire.engine.core import Engine
from quire.errors import InvariantError
from quire.layout.config import dtype_bytes
from quire.layout.layout import STATES_CODEC
from quire.layout.model import ModelSpec
from quire.models.loader import LoadedModel
from quire.scheduler.schedule_config import ScheduleConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmResult:
    """Measurements of one arm in one round.

    Attributes:
        arm: name of the arm.
        total_s: time from the first prompt to the last token.
        prefill_s: time until every prompt has its first token.
        decode_step_s: median time of a step in which all sequences decode; 0 if there was none. For
            Transformers' continuous batching: steps in which all scheduled sequences decode.
        kv_bytes: peak KV bytes; for Transformers' continuous batching, reserved bytes.
        tokens: output tokens of each prompt.
    """

    arm: str
    total_s: float
    prefill_s: float
    decode_step_s: float
    kv_bytes: int
    tokens: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        lengths = {len(answer) for answer in self.tokens}
        if len(lengths) != 1:
            raise InvariantError(
                f"expected outputs of one length from arm {self.arm}, got {sorted(lengths)} tokens"
            )


class Arm(Protocol):
    """A system that runs the workload."""

    @property
    def name(self) -> str:
        """Name in tables."""
        ...

    def run(self) -> ArmResult:
        """Run all prompts once."""
        ...


class QuireArm:
    """Quire's engine, with a KV memory that exactly holds the workload.

    Args:
        model: model with random weights.
        workload: the prompts.
        attention: attention backend, as in `KVConfig`.
        batch_invariant: as in `ScheduleConfig`.
    """

    name = "quire"

    def __init__(
        self,
        model: LoadedModel,
        workload: Workload,
        *,
        attention: AttentionName = "auto",
        batch_invariant: bool = False,
    ) -> None:
        self._prompts, self._new_tokens = workload.prompt_ids(), workload.new_tokens
        schedule = ScheduleConfig(low_watermark=1.0, batch_invariant=batch_invariant)
        self.engine = Engine(model, workload.kv_config(model.spec, attention=attention), schedule)

    def run(self) -> ArmResult:
        """Submit all prompts and step until all outputs are complete."""
        found = generate_all(self.engine, self._prompts, self._new_tokens)
        return ArmResult(
            arm=self.name,
            total_s=found.total_s,
            prefill_s=found.prefill_s,
            decode_step_s=statistics.median(found.step_s or (0.0,)),
            kv_bytes=self.engine.stats().kv_peak_bytes,
            tokens=found.answers,
        )


# ---- Transformers --------------------------------------------------------------------------------


class StaticArm:
    """`generate` with SDPA: on all prompts at once (`hf_static`), or one call each (`hf_one`).

    Args:
        model: model with Quire's weights.
        workload: prompts of one length.
        spec: shape of the model, for the bytes of its cache.
        together: whether one call gets all prompts.
    """

    def __init__(
        self, model: PreTrainedModel, workload: Workload, spec: ModelSpec, *, together: bool = True
    ) -> None:
        self.name = "hf_static" if together else "hf_one"
        self._model: Any = model  # its generation is not typed
        self._workload, self._spec = workload, spec
        ids = torch.tensor(workload.prompt_ids())
        self._calls = [ids] if together else [row[None] for row in ids]
        # the model's own generation config would set an end token
        self._model.generation_config.eos_token_id = None

    def run(self) -> ArmResult:
        """Generate once; the time of a decode step is that of a token of every prompt."""
        total_s = prefill_s = step_s = 0.0
        answers: list[list[int]] = []
        for ids in self._calls:
            clock = StepClock()
            started_s = time.perf_counter()
            with torch.inference_mode():
                out = self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    generation_config=greedy(self._workload.new_tokens),
                    stopping_criteria=StoppingCriteriaList([clock]),
                )
            total_s += time.perf_counter() - started_s
            prefill_s += clock.times_s[0] - started_s
            step_s += median_gap(clock.times_s)
            assert isinstance(out, Tensor), "generate returns only token ids by default"
            answers += out[:, self._workload.prompt_tokens :].tolist()
        spec, tokens = self._spec, self._workload.final_tokens - 1
        cached = spec.kv_bytes(tokens, dtype_bytes(self._workload.dtype))
        cached += spec.state_values * dtype_bytes(STATES_CODEC)
        return ArmResult(
            arm=self.name,
            total_s=total_s,
            prefill_s=prefill_s,
            decode_step_s=step_s,
            kv_bytes=cached * len(self._calls[0]),
            tokens=tuple(tuple(answer) for answer in answers),
        )


class ContinuousArm:
    """`generate_batch`: Transformers' continuous batching with its own paged cache.

    Args:
        model: see `StaticArm`; both arms can share a model.
        workload: the prompts.
        spec: shape of the model, for the reserved bytes.
    """

    name = "hf_cb"

    def __init__(self, model: PreTrainedModel, workload: Workload, spec: ModelSpec) -> None:
        self._model: Any = model  # its generation is not typed
        self._workload, self._spec = workload, spec
        pages = -(-workload.final_tokens // PAGE_TOKENS)
        self._blocks = workload.prompts * pages

    def run(self) -> ArmResult:
        """Generate once; the time includes the set-up of each call.

        Raises:
            InvariantError: a request was lost or ended early.
        """
        prompts, new_tokens = self._workload.prompt_ids(), self._workload.new_tokens
        config = ContinuousBatchingConfig(
            num_blocks=self._blocks,
            page_size=PAGE_TOKENS,
            max_batch_tokens=STEP_TOKENS,
            max_requests_per_batch=STEP_REQUESTS,
            allow_block_sharing=False,  # no two prompts share a prefix
        )
        started_s = time.perf_counter()
        found = self._model.generate_batch(
            prompts,
            generation_config=greedy(new_tokens, end_token=-1),  # None would print a warning
            continuous_batching_config=config,
            record_timestamps=True,
            progress_bar=False,
            warmup=False,  # would capture CUDA graphs
        )
        total_s = time.perf_counter() - started_s
        answers = [tuple(output.generated_tokens) for output in found.values()]
        if [len(answer) for answer in answers] != [new_tokens] * len(prompts):
            raise InvariantError(
                f"expected {len(prompts)} outputs of {new_tokens} tokens from Transformers' "
                f"continuous batching, got {len(answers)} of {sorted(map(len, answers))} tokens"
            )
        slots = self._blocks * PAGE_TOKENS
        # the request that was prefilled last: after its first token, all steps decode only
        last: list[float] = max((output.timestamps for output in found.values()), key=min)
        return ArmResult(
            arm=self.name,
            total_s=total_s,
            prefill_s=last[0] - started_s,
            decode_step_s=median_gap(last),
            kv_bytes=slots * self._spec.kv_bytes_per_token(dtype_bytes(self._workload.dtype)),
            tokens=tuple(answers),
        )
