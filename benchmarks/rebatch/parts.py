"""Parts of the rebatch benchmark by name, in run order."""

from collections.abc import Callable, Mapping

from benchmarks.common.result import PartResult
from benchmarks.rebatch.config import TRACE, W1, W2, RebatchConfig
from benchmarks.rebatch.trace import run_trace
from benchmarks.rebatch.workloads import run_w1, run_w2

PARTS: Mapping[str, Callable[[RebatchConfig], PartResult]] = {
    W1: run_w1,
    W2: run_w2,
    TRACE: run_trace,
}
