"""Parts of the memory benchmark by name, in run order."""

from collections.abc import Callable, Mapping

from benchmarks.common.result import PartResult
from benchmarks.memory.allocator import run_allocator
from benchmarks.memory.beam import run_beam
from benchmarks.memory.config import MemoryBenchConfig
from benchmarks.memory.fairness import run_fairness
from benchmarks.memory.generation import run_generation
from benchmarks.memory.page_sizes import run_page_sizes
from benchmarks.memory.prefix import run_prefix
from benchmarks.memory.reuse import run_reuse
from benchmarks.memory.swapping import run_swap
from benchmarks.memory.waste import run_waste
from benchmarks.memory.watermarks import run_watermarks

Part = Callable[[MemoryBenchConfig], PartResult]

PARTS: Mapping[str, Part] = {
    "waste": lambda config: run_waste(config.waste, config.simulated),
    "pages": lambda config: run_page_sizes(config.pages, config.simulated),
    "watermarks": lambda config: run_watermarks(config.watermarks, config.simulated),
    "beam": lambda config: run_beam(config.beam),
    "swap": lambda config: run_swap(config.swap),
    "prefix": lambda config: run_prefix(config.prefix),
    "cache": lambda config: run_generation(config.cache),
    "allocator": lambda config: run_allocator(config.allocator),
    "reuse": lambda config: run_reuse(config.reuse, config.simulated),
    "fairness": lambda config: run_fairness(config.fairness, config.simulated),
}
