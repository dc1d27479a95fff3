"""The run of `quire demo`: runs all prompts in one small KV memory and measures them.

Imports torch through the engine: the command imports this module when it runs.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.api.llm import LLM
from quire.cli.demo_live import LivePages
from quire.cli.demo_work import DemoPrompt
from quire.cli.drive import Driver, Job
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.stats import EngineStats
from quire.errors import QuireError
from quire.sampling.outputs import RequestOutput


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """KV memory at the step with the most running requests.

    Attributes:
        running: number of running requests.
        used_bytes: bytes of pages in use.
        reserved_bytes: bytes if prompt and max_tokens of these requests were reserved in advance.
        contiguous_bytes: bytes if the whole context were reserved for each of these requests.
    """

    running: int = 0
    used_bytes: int = 0
    reserved_bytes: int = 0
    contiguous_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One use of the same KV memory.

    Attributes:
        name: prefix of its claims.
        title: name in tables and pictures.
        codec, evict: options of the KV memory.
    """

    name: str
    title: str
    codec: str = "none"
    evict: str = "full"


FULL = Variant(name="full", title="full KV")
_BATCH_MAX = "average:cap=64"
COMPRESSED = (
    Variant(name="int8", title="int8 pages", codec="int8"),
    Variant(name="batch_max", title="Batch-Max eviction", evict=_BATCH_MAX),
    Variant(name="batch_max_int8", title="Batch-Max and int8", codec="int8", evict=_BATCH_MAX),
)
"""Batch-Max: evict during prefill and decode, so that no request exceeds the cap."""

SAMPLE_S = 0.05


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Result of the demo.

    Attributes:
        prompts: the prompts.
        outputs: the outputs, in the order of the prompts.
        memory_peak: KV memory at the step with the most running requests.
        stats: statistics of the engine at the end.
        seconds: run time, without model loading.
        samples: seconds since the start, and running requests.
    """

    prompts: Sequence[DemoPrompt]
    outputs: Sequence[RequestOutput]
    memory_peak: MemoryPeak
    stats: EngineStats
    seconds: float
    samples: Sequence[tuple[float, int]]

    @property
    def facts(self) -> list[bool]:
        """Whether the output of each retrieval prompt is correct."""
        pairs = zip(self.prompts, self.outputs, strict=True)
        return [a.text.startswith(p.answer) for p, a in pairs if p.answer is not None]

    def claims(self) -> dict[str, int | float]:
        """The results as a flat mapping, for JSON."""
        new_tokens = sum(a.usage.completion_tokens for a in self.outputs)
        first_s = [a.usage.first_token_s for a in self.outputs]
        token_s = [_token_s(a) for a in self.outputs if a.usage.completion_tokens > 1]
        return {
            "requests": len(self.outputs),
            "prompt_tokens": sum(a.usage.prompt_tokens for a in self.outputs),
            "completion_tokens": new_tokens,
            "run_s": self.seconds,
            "completion_tokens_per_s": new_tokens / self.seconds,
            "first_token_p50_s": _percentile(first_s, 50),
            "first_token_p99_s": _percentile(first_s, 99),
            "token_p50_s": _percentile(token_s, 50),
            "token_p99_s": _percentile(token_s, 99),
            "kv_total_bytes": self.stats.kv_total_bytes,
            "kv_peak_bytes": self.stats.kv_peak_bytes,
            "most_running": self.memory_peak.running,
            "crowd_used_bytes": self.memory_peak.used_bytes,
            "crowd_reserved_bytes": self.memory_peak.reserved_bytes,
            "crowd_contiguous_bytes": self.memory_peak.contiguous_bytes,
            "preemptions": self.stats.num_preemptions,
            "facts_asked": len(self.facts),
            "facts_right": sum(self.facts),
        }

    def comparison(self, name: str, full: "DemoResult") -> dict[str, int | float]:
        """Claims of a variant, with the number of outputs equal to those with full KV."""
        own = self.claims()
        kept = ("run_s", "completion_tokens_per_s", "kv_peak_bytes", "most_running", "facts_right")
        pairs = zip(self.outputs, full.outputs, strict=True)
        equal = sum(ours.token_ids == theirs.token_ids for ours, theirs in pairs)
        return {f"{name}_{key}": own[key] for key in kept} | {f"{name}_equal_outputs": equal}


def _token_s(output: RequestOutput) -> float:
    usage = output.usage
    return (usage.total_s - usage.first_token_s) / (usage.completion_tokens - 1)


def _percentile(values: list[float], percent: int) -> float:
    return float(np.percentile(values, percent)) if values else 0.0


class DemoRun:
    """Runs prompts and samples the engine's memory use.

    Args:
        llm: an idle LLM.
        prompts: prompts, all submitted at once.
        title: heading of the live view.
    """

    def __init__(self, llm: LLM, prompts: Sequence[DemoPrompt], title: str = FULL.title) -> None:
        self._llm, self._prompts, self._title = llm, prompts, title
        self._samples: list[tuple[float, int]] = []
        self._start_s = 0.0
        self._outputs: dict[int, RequestOutput] = {}
        self._memory_peak = MemoryPeak()

    def run(self) -> DemoResult:
        """Run all prompts.

        Raises:
            RequestError: a prompt exceeds the KV memory or the context.
        """
        self._start_s = start_s = time.monotonic()
        with LivePages(self._title, len(self._prompts), self._page_bytes()) as live:

            def on_step() -> None:
                self._watch()
                live.show(len(self._outputs), self._llm.stats)

            driver = Driver(self._llm, window=len(self._prompts), on_step=on_step)
            for job, output in driver.run(iter(self._jobs())):
                if isinstance(output, QuireError):
                    raise output
                self._outputs[job.key] = output
        return DemoResult(
            prompts=self._prompts,
            outputs=[self._outputs[key] for key in range(len(self._prompts))],
            memory_peak=self._memory_peak,
            stats=self._llm.stats(),
            seconds=time.monotonic() - start_s,
            samples=self._samples,
        )

    def _page_bytes(self) -> int:
        """Bytes of a page of full KV, in all layers."""
        model = self._llm.model
        return model.spec.kv_bytes(KVConfig().page_tokens, model.decoder.dtype.itemsize)

    def _jobs(self) -> list[Job]:
        return [
            Job(
                key=key,
                request=GenerationRequest(
                    prompt.text, SamplingParams(max_tokens=prompt.max_tokens, temperature=0.0)
                ),
            )
            for key, prompt in enumerate(self._prompts)
        ]

    def _watch(self) -> None:
        running = self._llm.engine.scheduler.running
        now_s = time.monotonic() - self._start_s
        if not self._samples or now_s - self._samples[-1][0] >= SAMPLE_S:
            self._samples.append((now_s, len(running)))
        if len(running) <= self._memory_peak.running:
            return
        spec = self._llm.model.spec
        value_bytes = self._llm.model.decoder.dtype.itemsize
        reserved = [len(r.prompt_token_ids) + r.params.max_tokens for r in running]
        self._memory_peak = MemoryPeak(
            running=len(running),
            used_bytes=self._llm.stats().kv_held_bytes,
            reserved_bytes=sum(spec.kv_bytes(tokens, value_bytes) for tokens in reserved),
            contiguous_bytes=len(running) * spec.kv_bytes(spec.max_positions, value_bytes),
        )
