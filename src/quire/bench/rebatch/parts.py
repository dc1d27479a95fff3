"""The parts of the rebatch bench by name, in the order in which they run and are read."""

from collections.abc import Callable, Mapping

from quire.bench.rebatch.config import TRACE, W1, W2, RebatchConfig
from quire.bench.rebatch.trace import run_trace
from quire.bench.rebatch.workloads import run_w1, run_w2
from quire.bench.result import PartResult

PARTS: Mapping[str, Callable[[RebatchConfig], PartResult]] = {
    W1: run_w1,
    W2: run_w2,
    TRACE: run_trace,
}
