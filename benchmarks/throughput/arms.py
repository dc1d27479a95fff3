"""Arms of the throughput benchmark: each runs a workload's prompts and is timed."""

import statistics
import time
from dataclasses import dataclass
from typing import Protocol

from benchmarks.common.workload import Workload
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import AttentionName
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import InvariantError
from quire.models.loader import LoadedModel
from quire.scheduler.request import Request
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
        max_num_batched_tokens: token budget of a step; None: the engine's default.
        batch_invariant: as in `ScheduleConfig`.
    """

    name = "quire"

    def __init__(
        self,
        model: LoadedModel,
        workload: Workload,
        *,
        attention: AttentionName = "auto",
        max_num_batched_tokens: int | None = None,
        batch_invariant: bool = False,
    ) -> None:
        self._workload, self._prompts = workload, workload.prompt_ids()
        schedule = ScheduleConfig(low_watermark=1.0, batch_invariant=batch_invariant)
        if max_num_batched_tokens is not None:
            schedule = ScheduleConfig(
                max_num_batched_tokens=max_num_batched_tokens,
                chunk_tokens=max_num_batched_tokens,
                low_watermark=1.0,
            )
        self.engine = Engine(model, workload.kv_config(model.spec, attention=attention), schedule)

    def run(self) -> ArmResult:
        """Submit all prompts and step until all outputs are complete."""
        options = SamplingParams(
            max_tokens=self._workload.new_tokens, temperature=0.0, ignore_eos=True
        )
        started_s = time.perf_counter()
        ids = [self.engine.submit(GenerationRequest(prompt, options)) for prompt in self._prompts]
        answers: dict[str, list[int]] = {key: [] for key in ids}
        decode_s, prefill_s = [], 0.0
        while self.engine.has_work:
            decoding = all_decode(self.engine.scheduler.running, len(ids))
            step_started_s = time.perf_counter()
            for delta in self.engine.step():
                answers[delta.request_id] += delta.token_ids
            ended_s = time.perf_counter()
            if decoding:
                decode_s.append(ended_s - step_started_s)
            if not prefill_s and all(answers.values()):
                prefill_s = ended_s - started_s
        total_s = time.perf_counter() - started_s
        return ArmResult(
            arm=self.name,
            total_s=total_s,
            prefill_s=prefill_s,
            decode_step_s=statistics.median(decode_s) if decode_s else 0.0,
            kv_bytes=self.engine.stats().kv_peak_bytes,
            tokens=tuple(tuple(answers[key]) for key in ids),
        )


def all_decode(running: list[Request], expected: int) -> bool:
    """Whether the next step processes one token of each of `expected` sequences."""
    return len(running) == expected and all(r.num_uncomputed == 1 for r in running)
