"""The parts of `quire bench offload` by name."""

from collections.abc import Callable, Mapping

from quire.bench.offload.arms_part import run_arms
from quire.bench.offload.config import OffloadBenchConfig
from quire.bench.offload.engine_part import run_engine
from quire.bench.offload.engine_restore_part import run_engine_restore
from quire.bench.offload.host_part import run_host
from quire.bench.offload.refit_part import run_refit
from quire.bench.offload.restore_part import run_restore
from quire.bench.offload.sweep_part import run_sweep
from quire.bench.offload.virtual_parts import run_codec, run_latency, run_position, run_weights
from quire.bench.result import PartResult

PARTS: Mapping[str, Callable[[OffloadBenchConfig], PartResult]] = {
    "arms": run_arms,
    "sweep": run_sweep,
    "host": run_host,
    "refit": run_refit,
    "restore": run_restore,
    "engine_restore": run_engine_restore,
    "latency": run_latency,
    "weights": run_weights,
    "codec": run_codec,
    "position": run_position,
    "engine": run_engine,
}
