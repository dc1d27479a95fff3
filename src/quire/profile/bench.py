"""Runs requests of one shape through an LLM, for `quire bench throughput` and `latency`."""

import time
from dataclasses import dataclass, replace

import numpy as np

from quire.api.llm import LLM
from quire.config.sampling_params import SamplingParams
from quire.errors import RequestError

PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchShape:
    """The requests of a benchmark."""

    requests: int  # submitted at once in each round
    input_tokens: int
    output_tokens: int  # an end-of-sequence token does not stop it
    rounds: int
    warmup_rounds: int
    seed: int = 0  # every round has different prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRound:
    """One measured round."""

    total_s: float  # from the first submission to the last token
    first_token_s: tuple[float, ...]  # of each request
    kv_peak_bytes: int  # since the engine started
    preemptions: int
    evicted_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRun:
    """All measured rounds."""

    shape: BenchShape
    kv_total_bytes: int
    rounds: tuple[BenchRound, ...]

    def throughput(self) -> dict[str, int | float]:
        """Medians over the rounds: requests and tokens per second."""
        shape, total_s = self.shape, float(np.median([found.total_s for found in self.rounds]))
        output = shape.requests * shape.output_tokens
        return {
            "total_s": total_s,
            "requests_per_s": shape.requests / total_s,
            "output_tokens_per_s": output / total_s,
            "total_tokens_per_s": (output + shape.requests * shape.input_tokens) / total_s,
            **self._memory(),
        }

    def latency(self) -> dict[str, int | float]:
        """Seconds of a batch, to the first token, and per output token."""
        totals = [found.total_s for found in self.rounds]
        first = [first_s for found in self.rounds for first_s in found.first_token_s]
        between = max(1, self.shape.output_tokens - 1)
        token = [(found.total_s - max(found.first_token_s)) / between for found in self.rounds]
        return {
            "latency_mean_s": float(np.mean(totals)),
            **{f"latency_p{p}_s": float(np.percentile(totals, p)) for p in PERCENTILES},
            "first_token_p50_s": float(np.median(first)),
            "token_p50_s": float(np.median(token)),
            **self._memory(),
        }

    def _memory(self) -> dict[str, int | float]:
        return {
            "kv_total_bytes": self.kv_total_bytes,
            "kv_peak_bytes": max(found.kv_peak_bytes for found in self.rounds),
            "preemptions": sum(found.preemptions for found in self.rounds),
            "evicted_tokens": sum(found.evicted_tokens for found in self.rounds),
        }


def run_bench(llm: LLM, shape: BenchShape, sampling: SamplingParams) -> BenchRun:
    """Run the warm-up rounds and the measured ones."""
    context = llm.context_tokens(shape.input_tokens)
    if shape.input_tokens + shape.output_tokens > context:
        raise RequestError(
            f"expected --input-len + --output-len of at most {context} tokens, got "
            f"{shape.input_tokens} + {shape.output_tokens}: shorten one of them"
        )
    exact = replace(sampling, max_tokens=shape.output_tokens, ignore_eos=True)
    random = np.random.default_rng(shape.seed)
    rounds = [_round(llm, shape, exact, random) for _ in range(shape.warmup_rounds + shape.rounds)]
    total_bytes = llm.stats().kv_total_bytes
    measured = tuple(rounds[shape.warmup_rounds :])
    return BenchRun(shape=shape, kv_total_bytes=total_bytes, rounds=measured)


def _round(
    llm: LLM, shape: BenchShape, sampling: SamplingParams, random: np.random.Generator
) -> BenchRound:
    size = (shape.requests, shape.input_tokens)
    prompts = random.integers(llm.model.spec.vocab_size, size=size).tolist()
    start_s = time.perf_counter()
    outputs = llm.generate(prompts, sampling)
    total_s = time.perf_counter() - start_s
    for output in outputs:
        if output.error is not None:
            raise RequestError(output.error)
    return BenchRound(
        total_s=total_s,
        first_token_s=tuple(output.usage.first_token_s for output in outputs),
        kv_peak_bytes=llm.stats().kv_peak_bytes,
        preemptions=sum(output.usage.preemptions for output in outputs),
        evicted_tokens=sum(output.usage.evicted_tokens for output in outputs),
    )
