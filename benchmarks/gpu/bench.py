"""State shared by all parts of a run: the device, its measured limits, models and engines.

On a GPU, time is measured between two events of a stream, and only events are synchronized. On a
CPU, time is wall-clock time. All code runs on both, so that it can be tested without a GPU.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from transformers import LlamaConfig

from benchmarks.common.decoding import all_decode
from benchmarks.common.models import llama_of, random_model
from benchmarks.gpu.config import GpuConfig
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.engine.decode_graphs import CudaGraphs
from quire.errors import ConfigError, InvariantError
from quire.kernels.memory import free_device_bytes
from quire.models.loader import LoadedModel
from quire.offload.swap.host_store import device_name
from quire.profile.ceilings import seconds
from quire.scheduler.schedule_config import ScheduleConfig

_MIN_S = 1e-9  # the clock's resolution can measure 0 for a short call


@dataclass(frozen=True, slots=True)
class Target:
    """The device that runs the measured operations.

    Attributes:
        device: torch device.
    """

    device: torch.device

    @classmethod
    def named(cls, name: str) -> "Target":
        """Target by device name; `auto` selects a GPU if torch sees one.

        Raises:
            ConfigError: torch has no such device.
        """
        has_gpu = torch.cuda.is_available()
        if name == "auto":
            name = "cuda" if has_gpu else "cpu"
        if name not in ("cpu", "cuda") and not name.startswith("cuda:"):
            raise ConfigError(f"expected --device auto, cpu, cuda or cuda:N, got {name!r}")
        if name != "cpu" and not has_gpu:
            raise ConfigError(
                f"--device {name}: torch sees no CUDA device here; use --device cpu, with --quick "
                "for a quick trial"
            )
        # a tensor's device includes the device index, which threads need to select the device
        return cls(torch.empty(0, device=name).device)

    @property
    def on_gpu(self) -> bool:
        """Whether the target is a CUDA device, so that copies cross a link."""
        return self.device.type == "cuda"

    @property
    def name(self) -> str:
        """Display name of the device."""
        return device_name(self.device)

    def seconds(self, call: Callable[[], object], times: int = 1) -> float:
        """Time of one call, as the mean over the given number of back-to-back calls."""
        if not self.on_gpu:
            return max(seconds(lambda: _repeat(call, times)) / times, _MIN_S)
        with torch.cuda.device(self.device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            _repeat(call, times)
            end.record()
            end.synchronize()
        return max(float(begin.elapsed_time(end)) / 1e3 / times, _MIN_S)

    def repeated(self, call: Callable[[], object], times: int) -> Callable[[], object]:
        """Return a function that repeats a call; on a GPU as one CUDA graph, if that is possible.

        So the time that the CPU takes for launches does not count.
        """
        launches = partial(_repeat, call, times)
        if not self.on_gpu:
            return launches
        done = torch.zeros(1, device=self.device)

        def repeat() -> Tensor:
            launches()
            return done

        try:
            return CudaGraphs(self.device).capture(repeat).replay
        except RuntimeError:  # the call reads data
            return launches

    def wait(self) -> None:
        """Wait until the device has finished all submitted work."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def samples(self, call: Callable[[], object], repeats: int, times: int = 1) -> list[float]:
        """Times of repeated calls of `seconds`, after one call that is not counted."""
        self.seconds(call)
        return [self.seconds(call, times) for _ in range(repeats)]

    def median(self, call: Callable[[], object], repeats: int, times: int = 1) -> float:
        """Median of `samples`."""
        return statistics.median(self.samples(call, repeats, times))

    def require(self, num_bytes: int, what: str, change: str) -> None:
        """Check that device memory is free before it is allocated.

        Args:
            num_bytes: bytes to allocate.
            what: name of the allocation, for the error message.
            change: how to need less memory, for the error message.

        Raises:
            ConfigError: too little device memory is free.
        """
        free_bytes = free_device_bytes(self.device)
        if num_bytes > free_bytes:
            raise ConfigError(
                f"{what} needs {num_bytes:,} B on {self.name}, but only {free_bytes:,} B are free; "
                f"{change}"
            )


def _repeat(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


MAX_BATCHED_TOKENS = 8_192
_TIMED_COPIES = 10


@dataclass(slots=True)
class GpuBench:
    """A run of the benchmark.

    Attributes:
        config: configuration of all parts.
        target: the device.
    """

    config: GpuConfig
    target: Target
    _rates: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, config: GpuConfig) -> "GpuBench":
        """Create a run on the configured device."""
        return cls(config, Target.named(config.device))

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and plain KV."""
        found: torch.dtype = getattr(torch, self.config.dtype)
        return found

    @property
    def copy_bytes_per_s(self) -> float:
        """Measured memory bandwidth: bytes read and bytes written by a copy, per second."""
        return self._rate("copy", self._measured_copy)

    @property
    def product_flops_per_s(self) -> float:
        """Measured compute rate of a large product."""
        return self._rate("product", self._measured_product)

    def model_of(self, config: LlamaConfig, *, dtype: torch.dtype | None = None) -> LoadedModel:
        """A model with random weights on the device."""
        return random_model(
            config,
            dtype=dtype or self.dtype,
            device=self.target.device,
            impl=self.config.model_impl,
        )

    def large_model(self, context: int) -> LoadedModel:
        """A model of the configured large shape with at least this context."""
        return self.model_of(llama_of(self.config.spec, context))

    def engine(
        self,
        model: LoadedModel,
        kv_bytes: int,
        rows: int,
        *,
        cuda_graphs: bool | None = None,
        async_scheduling: bool | None = None,
        batcher: str = "continuous",
        **kv: object,
    ) -> Engine:
        """An engine over a model, without prefix caching."""
        schedule = ScheduleConfig(
            max_num_seqs=rows,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            chunk_tokens=MAX_BATCHED_TOKENS,
            cuda_graphs=cuda_graphs,
            async_scheduling=async_scheduling,
            batcher=batcher,
        )
        options = {"attention": self.config.attention} | kv
        config = KVConfig(
            memory=kv_bytes,
            prefix_cache=PrefixCacheConfig(enabled=False),
            **options,  # type: ignore[arg-type]
        )
        return Engine(model, config, schedule)

    def kv_bytes(self, model: LoadedModel, rows: int, tokens: int) -> int:
        """Bytes of KV of these rows, with some space for partly filled pages."""
        per_row = model.spec.kv_bytes(tokens + 64, self.dtype.itemsize)
        return rows * per_row * 21 // 20 + (1 << 20)

    def prompts(self, count: int, tokens: int, vocab_size: int) -> list[list[int]]:
        """Random prompts of one length."""
        generator = torch.Generator().manual_seed(0)
        found: list[list[int]] = torch.randint(
            3, vocab_size, (count, tokens), generator=generator
        ).tolist()
        return found

    def facts(self) -> dict[str, object]:
        """Facts about the device, for the result."""
        return {
            "device": self.target.name,
            "on_gpu": self.target.on_gpu,
            "free_device_bytes": free_device_bytes(self.target.device),
            **{f"{name}_per_s": rate for name, rate in self._rates.items()},
        }

    @property
    def where(self) -> str:
        """First words of captions; on a CPU they state that no GPU is measured."""
        if self.target.on_gpu:
            return f"On {self.target.name}."
        return "On a CPU: a trial run only."

    def free(self) -> None:
        """Return the memory of deleted models and engines to the device."""
        gc.collect()
        if self.target.on_gpu:
            torch.cuda.empty_cache()

    def _rate(self, name: str, measure: Callable[[], float]) -> float:
        if name not in self._rates:
            self._rates[name] = measure()
        return self._rates[name]

    def _measured_copy(self) -> float:
        num_bytes = self.config.copy_bytes
        self.target.require(2 * num_bytes, "the copy", "use a smaller GPU config with --quick")
        source, into = (
            torch.zeros(num_bytes, dtype=torch.uint8, device=self.target.device) for _ in range(2)
        )
        copy = partial(into.copy_, source)
        return 2 * num_bytes / self.target.median(copy, self.config.repeats, _TIMED_COPIES)

    def _measured_product(self) -> float:
        rows, inner, columns = self.config.product
        left, right, out = (
            torch.randn(shape, device=self.target.device).to(self.dtype)
            for shape in ((rows, inner), (inner, columns), (rows, columns))
        )
        product = partial(torch.mm, left, right, out=out)
        flops = 2 * rows * inner * columns
        return flops / self.target.median(product, self.config.repeats, _TIMED_COPIES)


def decode_times(
    engine: Engine, prompts: Sequence[Sequence[int]], *, warm_steps: int, steps: int
) -> list[float]:
    """Seconds of decode steps of all prompts; the requests are cancelled afterwards.

    Args:
        engine: idle, with memory for all prompts and `new_tokens_of` output tokens.
        prompts: token ids.
        warm_steps: steps after the prefill that are not measured.
        steps: measured steps.
    """
    most = new_tokens_of(len(prompts), len(prompts[0]), warm_steps + steps)
    options = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True)
    ids = [engine.submit(GenerationRequest(prompt, options)) for prompt in prompts]
    while not all_decode(engine, len(prompts)):
        engine.step()
    for _ in range(warm_steps):
        engine.step()
    times_s = []
    for _ in range(steps):
        started_s = time.perf_counter()
        deltas = engine.step()
        times_s.append(time.perf_counter() - started_s)
        if len(deltas) != len(prompts):
            raise InvariantError(f"expected {len(prompts)} tokens in a step, got {len(deltas)}")
    for name in ids:
        engine.cancel(name)
    while engine.has_work:
        engine.step()
    return times_s


def new_tokens_of(rows: int, prompt_tokens: int, steps: int) -> int:
    """Output tokens that no row reaches: rows decode while later prompts are prefilled."""
    prefill_steps = -(-rows * prompt_tokens // MAX_BATCHED_TOKENS) + rows
    return prefill_steps + steps + 8
