"""Timed runs of prompts with outputs of one length, and engines whose requests all decode."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import InvariantError
from quire.layout.model import ModelSpec
from quire.layout.statistics import Statistic
from quire.models.base import Decoder, PagedAttention
from quire.models.loader import LoadedModel
from quire.policies.view import OutputProjection, Rotation
from quire.scheduler.schedule_config import ScheduleConfig


def decoding_engine(
    model: LoadedModel, kv: KVConfig, prompts: Sequence[list[int]], new_tokens: int
) -> Engine:
    """An engine that has prefilled all prompts.

    Args:
        model: model of the engine.
        kv: KV memory that holds all requests.
        prompts: token ids of each request.
        new_tokens: most tokens of an output; a row already decodes while others are prefilled.
    """
    engine = Engine(model, kv, ScheduleConfig(max_num_seqs=len(prompts)))
    options = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    for prompt in prompts:
        engine.submit(GenerationRequest(prompt, options))
    running = engine.scheduler.running
    while len(running) < len(prompts) or any(r.num_uncomputed > 1 for r in running):
        engine.step()
    return engine


def all_decode(engine: Engine, rows: int) -> bool:
    """Whether all requests run and have one token left to compute."""
    running = engine.scheduler.running
    return len(running) == rows and all(request.num_uncomputed == 1 for request in running)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Results of prompts that were submitted together.

    Attributes:
        total_s: time from the first submission to the last token.
        prefill_s: time until every prompt has its first token.
        step_s: times of the steps in which every prompt decodes.
        rows_peak: most requests with KV at once.
        preemptions: number of preempted requests.
        answers: output token ids, in the order of the prompts.
    """

    total_s: float
    prefill_s: float
    step_s: tuple[float, ...]
    rows_peak: int
    preemptions: int
    answers: tuple[tuple[int, ...], ...]

    @property
    def decode_s(self) -> float:
        """Time after all prompts have their first token."""
        return self.total_s - self.prefill_s

    @property
    def new_tokens(self) -> int:
        """Number of generated tokens."""
        return sum(map(len, self.answers))

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over the whole time, with prefill."""
        return self.new_tokens / self.total_s


def generate_all(engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int) -> Finished:
    """Submit all prompts and step until all outputs are complete; end tokens are ignored.

    Args:
        engine: idle engine.
        prompts: token ids of each prompt.
        new_tokens: tokens of each output.

    Raises:
        InvariantError: a request failed, or an output is too short.
    """
    options = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    before = engine.scheduler.num_preemptions
    started_s = time.perf_counter()
    ids = [engine.submit(GenerationRequest(prompt, options)) for prompt in prompts]
    answers: dict[str, list[int]] = {key: [] for key in ids}
    waiting, rows_peak, prefill_s, step_s = set(ids), 0, 0.0, []
    while engine.has_work:
        decoding, step_started_s = all_decode(engine, len(ids)), time.perf_counter()
        for delta in engine.step():
            answers[delta.request_id] += delta.token_ids
            waiting.discard(delta.request_id)
            if delta.error is not None:
                raise InvariantError(f"expected no failed request, got: {delta.error}")
        if decoding:
            step_s.append(time.perf_counter() - step_started_s)
        rows_peak = max(rows_peak, len(engine.scheduler.running))
        if not waiting and not prefill_s:
            prefill_s = time.perf_counter() - started_s
    total_s = time.perf_counter() - started_s
    lengths = {len(answer) for answer in answers.values()}
    if lengths != {new_tokens}:
        raise InvariantError(f"expected outputs of {new_tokens} tokens, got {sorted(lengths)}")
    return Finished(
        total_s=total_s,
        prefill_s=prefill_s,
        step_s=tuple(step_s),
        rows_peak=rows_peak,
        preemptions=engine.scheduler.num_preemptions - before,
        answers=tuple(tuple(answers[key]) for key in ids),
    )


class ForwardingDecoder:
    """Passes every call on to another decoder; what measures one overrides `forward`."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    @property
    def spec(self) -> ModelSpec:
        return self._decoder.spec

    @property
    def dtype(self) -> torch.dtype:
        return self._decoder.dtype

    @property
    def device(self) -> torch.device:
        return self._decoder.device

    @property
    def num_rope_variants(self) -> int:
        return self._decoder.num_rope_variants

    def rope_variant(self, final_tokens: int) -> int:
        return self._decoder.rope_variant(final_tokens)

    def prepare(self, statistic: Statistic) -> str | None:
        return self._decoder.prepare(statistic)

    def prepare_pre_rope(self) -> str | None:
        return self._decoder.prepare_pre_rope()

    def rotations(self, rope_variant: int = 0) -> Rotation | None:
        return self._decoder.rotations(rope_variant)

    def output_projections(self) -> OutputProjection | str:
        return self._decoder.output_projections()

    def forward(
        self,
        token_ids: Int[Tensor, " num_tokens"],
        positions: Int[Tensor, " num_tokens"],
        sample_rows: Int[Tensor, " num_samples"],
        attention: PagedAttention,
        *,
        rope_variant: int = 0,
    ) -> Float[Tensor, "num_samples vocab"]:
        return self._measured(
            self._decoder.forward(
                token_ids, positions, sample_rows, attention, rope_variant=rope_variant
            )
        )

    def _measured(self, logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
        return logits


class RecordingDecoder(ForwardingDecoder):
    """Records the logits of every forward."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder)
        self.recorded: list[Tensor] = []

    def take(self) -> Float[Tensor, "rows vocab"]:
        recorded, self.recorded = self.recorded, []
        return torch.cat(recorded)

    def _measured(self, logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
        self.recorded.append(logits.float().cpu())
        return logits
