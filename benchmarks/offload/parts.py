"""Parts of `python -m benchmarks offload` by name."""

from collections.abc import Callable, Mapping

from benchmarks.common.result import PartResult
from benchmarks.offload.arms_part import run_arms
from benchmarks.offload.config import OffloadBenchConfig
from benchmarks.offload.engine_gain_part import run_engine_gain
from benchmarks.offload.engine_part import run_engine
from benchmarks.offload.host_part import run_host
from benchmarks.offload.refit_part import run_refit
from benchmarks.offload.restore_part import run_restore
from benchmarks.offload.sweep_part import run_sweep
from benchmarks.offload.virtual_parts import run_codec, run_latency, run_position, run_weights

PARTS: Mapping[str, Callable[[OffloadBenchConfig], PartResult]] = {
    "arms": run_arms,
    "sweep": run_sweep,
    "host": run_host,
    "refit": run_refit,
    "restore": run_restore,
    "latency": run_latency,
    "weights": run_weights,
    "codec": run_codec,
    "position": run_position,
    "engine": run_engine,
    "engine_gain": run_engine_gain,
}
