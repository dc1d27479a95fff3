"""Parts of `python -m benchmarks offload` by name."""

from collections.abc import Callable, Mapping

from benchmarks.common.result import PartResult
from benchmarks.offload.config import OffloadBenchConfig
from benchmarks.offload.engine_gain_part import run_engine_gain
from benchmarks.offload.engine_part import run_engine
from benchmarks.offload.restore_part import run_restore
from benchmarks.offload.virtual_parts import run_codec, run_latency, run_position, run_weights

PARTS: Mapping[str, Callable[[OffloadBenchConfig], PartResult]] = {
    "restore": run_restore,
    "latency": run_latency,
    "weights": run_weights,
    "codec": run_codec,
    "position": run_position,
    "engine": run_engine,
    "engine_gain": run_engine_gain,
}
