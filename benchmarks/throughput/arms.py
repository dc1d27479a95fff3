"""Arms of the throughput benchmark: Quire, and two ways of Transformers to run a batch."""

import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from benchmarks.common.workload import Workload
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import AttentionName
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import InvariantError
from quire.layout.model import ModelSpec
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
        self._workload, self._prompts = workload, workload.prompt_ids()
        schedule = ScheduleConfig(low_watermark=1.0, batch_invariant=batch_invariant)
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


# ---- Transformers --------------------------------------------------------------------------------


# Its attention multiplies every query of a step with every key of the step, across all requests, so
# on a CPU few requests at once are fastest: of 2, 4, 8 and all, 4 in steps of 512 tokens.
CB_PAGE_TOKENS, CB_STEP_TOKENS, CB_REQUESTS = 64, 512, 4


class StaticArm:
    """`generate` on all prompts at once, with SDPA.

    Args:
        model: model with Quire's weights.
        workload: prompts of one length.
        spec: shape of the model, for the bytes of its cache.
    """

    name = "hf_static"

    def __init__(self, model: PreTrainedModel, workload: Workload, spec: ModelSpec) -> None:
        self._model: Any = model  # its generation is not typed
        self._workload, self._spec = workload, spec
        self._ids = torch.tensor(workload.prompt_ids())
        # the model's own generation config would set an end token
        self._model.generation_config.eos_token_id = None

    def run(self) -> ArmResult:
        """Generate once."""
        clock = _TokenClock()
        started_s = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(
                self._ids,
                attention_mask=torch.ones_like(self._ids),
                generation_config=_greedy(self._workload.new_tokens, end_token=None),
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        total_s = time.perf_counter() - started_s
        assert isinstance(out, Tensor), "generate returns only token ids by default"
        answers = out[:, self._workload.prompt_tokens :].tolist()
        cached = self._spec.kv_bytes(self._workload.final_tokens - 1, 2) * len(answers)
        return ArmResult(
            arm=self.name,
            total_s=total_s,
            prefill_s=clock.times_s[0] - started_s,
            decode_step_s=_median_gap(clock.times_s),
            kv_bytes=cached,
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
        pages = -(-workload.final_tokens // CB_PAGE_TOKENS)
        self._blocks = workload.prompts * pages

    def run(self) -> ArmResult:
        """Generate once; the time includes the set-up of each call.

        Raises:
            InvariantError: a request was lost or ended early.
        """
        prompts, new_tokens = self._workload.prompt_ids(), self._workload.new_tokens
        config = ContinuousBatchingConfig(
            num_blocks=self._blocks,
            page_size=CB_PAGE_TOKENS,
            max_batch_tokens=CB_STEP_TOKENS,
            max_requests_per_batch=CB_REQUESTS,
            allow_block_sharing=False,  # no two prompts share a prefix
        )
        started_s = time.perf_counter()
        found = self._model.generate_batch(
            prompts,
            generation_config=_greedy(new_tokens, end_token=-1),  # None would print a warning
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
        slots = self._blocks * CB_PAGE_TOKENS
        # the request that was prefilled last: after its first token, all steps decode only
        last: list[float] = max((output.timestamps for output in found.values()), key=min)
        return ArmResult(
            arm=self.name,
            total_s=total_s,
            prefill_s=last[0] - started_s,
            decode_step_s=_median_gap(last),
            kv_bytes=slots * self._spec.kv_bytes_per_token(2),
            tokens=tuple(answers),
        )


class _TokenClock(StoppingCriteria):
    """Records the time of each token; stops no generation."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def __call__(self, input_ids: Tensor, scores: object, **_options: object) -> Tensor:
        """See StoppingCriteria."""
        self.times_s.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def _greedy(new_tokens: int, *, end_token: int | None) -> GenerationConfig:
    return GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, eos_token_id=end_token
    )


def _median_gap(times_s: list[float]) -> float:
    gaps = [after - before for before, after in pairwise(times_s)]
    return statistics.median(gaps) if gaps else 0.0
