"""Parts of `python -m benchmarks gpu` by name, in the order in which they run."""

from collections.abc import Callable, Mapping

from benchmarks.common.result import PartResult
from benchmarks.gpu.bench import GpuBench
from benchmarks.gpu.equality_part import run_equality
from benchmarks.gpu.kernels_part import run_kernels
from benchmarks.gpu.kvpr_part import run_kvpr
from benchmarks.gpu.link_part import run_link
from benchmarks.gpu.memory_parts import run_batch_max, run_offload, run_rebatch
from benchmarks.gpu.prefill_part import run_prefill
from benchmarks.gpu.step_part import run_step

PARTS: Mapping[str, Callable[[GpuBench], PartResult]] = {
    "equality": run_equality,
    "kernels": run_kernels,
    "step": run_step,
    "prefill": run_prefill,
    "batch_max": run_batch_max,
    "link": run_link,
    "offload": run_offload,
    "kvpr": run_kvpr,
    "rebatch": run_rebatch,
}
