"""Runs the samples of a cell in one engine: token ids, truncation, outputs, log-probabilities."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from quire.api.llm import LLM
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import ConfigError, RequestError
from quire.evals.fidelity import FidelityScorer
from quire.evals.suite.base import EvalTask, Sample
from quire.evals.suite.cells import PromptResult
from quire.evals.suite.perplexity import NLL
from quire.sampling.outputs import RequestOutput, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """How texts become prompts.

    Attributes:
        most_tokens: most tokens of a prompt that is read from a file; None: the model's context.
        chat: whether prompts that are read from a file are messages of a user.
    """

    most_tokens: int | None = None
    chat: bool = False


class SampleRunner:
    """Runs samples in one engine.

    Args:
        llm: the engine.
        kv: its KV configuration.
        options: how texts become prompts.
    """

    def __init__(self, llm: LLM, kv: KVConfig, options: PromptOptions) -> None:
        self._llm, self._kv, self._options = llm, kv, options

    def run(
        self, task: EvalTask, samples: Sequence[Sample]
    ) -> tuple[tuple[PromptResult, ...], float]:
        """Run all samples; return results in their order, and the seconds of the engine.

        Raises:
            ConfigError: a generated prompt exceeds the model's context.
            RequestError: a request failed.
        """
        if samples[0].continuation:
            return self._score_continuations(samples)
        prompts = [self._prompt(task, sample) for sample in samples]
        params = [
            SamplingParams(max_tokens=sample.max_tokens, temperature=0.0, stop=sample.stop)
            for sample in samples
        ]
        started = time.perf_counter()
        outputs = self._llm.generate([ids for ids, _ in prompts], params)
        seconds = time.perf_counter() - started
        results = tuple(
            _result(
                sample,
                task.score(sample, _text(output)),
                output.usage,
                output=output.text,
                is_truncated=is_truncated,
            )
            for sample, output, (_, is_truncated) in zip(samples, outputs, prompts, strict=True)
        )
        return results, seconds

    def _prompt(self, task: EvalTask, sample: Sample) -> tuple[list[int], bool]:
        """Token ids of a prompt, and whether its middle was left out."""
        ids = self._llm.encode(sample.prompt)
        most = self._llm.model.spec.max_positions - sample.max_tokens
        if not task.source:
            if len(ids) > most:
                raise ConfigError(
                    f"a prompt of task {task.name!r} has {len(ids)} tokens; with its "
                    f"{sample.max_tokens} output tokens the model's context holds {most}: lower "
                    "--tokens"
                )
            return ids, False
        if self._options.most_tokens is not None:
            most = min(most, self._options.most_tokens)
        if self._options.chat:
            return self._chat_prompt(ids, most)
        return truncated(ids, most), len(ids) > most

    def _chat_prompt(self, ids: list[int], most: int) -> tuple[list[int], bool]:
        most -= len(self._llm.encode_chat([{"role": "user", "content": ""}]))
        tokenizer = self._llm.model.tokenizer
        assert tokenizer is not None, "the prompt was encoded"
        text = str(tokenizer.decode(truncated(ids, most), skip_special_tokens=True))
        return self._llm.encode_chat([{"role": "user", "content": text}]), len(ids) > most

    def _score_continuations(
        self, samples: Sequence[Sample]
    ) -> tuple[tuple[PromptResult, ...], float]:
        split = [self._split(sample) for sample in samples]
        scorer = FidelityScorer(
            self._llm.model,
            self._kv,
            longest_tokens=max(len(context) + len(rest) for context, rest in split),
            new_tokens=max(len(rest) for _, rest in split),
        )
        started = time.perf_counter()
        found = [scorer.mean_nll(context, rest) for context, rest in split]
        seconds = time.perf_counter() - started
        results = tuple(
            _result(sample, {NLL: nll}, usage)
            for sample, (nll, usage) in zip(samples, found, strict=True)
        )
        return results, seconds

    def _split(self, sample: Sample) -> tuple[list[int], list[int]]:
        """Token ids of the context and of the continuation, encoded as one text."""
        count = len(self._llm.encode(sample.prompt))
        ids = self._llm.encode(sample.prompt + sample.continuation)
        return ids[:count], ids[count:]


def truncated(ids: list[int], most: int) -> list[int]:
    """At most `most` ids without the middle, so that instruction and question stay (LongBench)."""
    if len(ids) <= most:
        return ids
    last = most // 2
    return [*ids[: most - last], *ids[len(ids) - last :]]


def _text(output: RequestOutput) -> str:
    if output.error is not None:
        raise RequestError(f"a request of the evaluation failed: {output.error}")
    return output.text


def _result(
    sample: Sample,
    scores: dict[str, float],
    usage: Usage,
    *,
    output: str = "",
    is_truncated: bool = False,
) -> PromptResult:
    return PromptResult(
        scores=scores,
        depth=sample.depth,
        chance=sample.chance,
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        truncated=is_truncated,
        kv_peak_bytes=usage.kv_peak_bytes,
        output=output,
    )
