"""Configurations of the memory benchmark, at full size and small."""

from dataclasses import dataclass, field

from benchmarks.memory.allocator import AllocatorConfig
from benchmarks.memory.beam import BeamConfig
from benchmarks.memory.fairness import FairnessConfig
from benchmarks.memory.generation import GenerationConfig
from benchmarks.memory.page_sizes import PageSizesConfig
from benchmarks.memory.prefix import PrefixConfig
from benchmarks.memory.reuse import ReuseConfig
from benchmarks.memory.simulated import SimulatedConfig
from benchmarks.memory.swapping import SwapConfig, SwappingConfig
from benchmarks.memory.waste import WasteConfig
from benchmarks.memory.watermarks import WatermarkConfig
from benchmarks.overhead import OverheadConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBenchConfig:
    """Configuration of all parts.

    Attributes:
        simulated: traces and machine of all simulated parts.
        waste, pages, watermarks, beam, swap, prefix, cache, allocator, reuse, fairness: parts.
    """

    simulated: SimulatedConfig = field(default_factory=SimulatedConfig)
    waste: WasteConfig = field(default_factory=WasteConfig)
    pages: PageSizesConfig = field(default_factory=PageSizesConfig)
    watermarks: WatermarkConfig = field(default_factory=WatermarkConfig)
    beam: BeamConfig = field(default_factory=BeamConfig)
    swap: SwappingConfig = field(default_factory=SwappingConfig)
    prefix: PrefixConfig = field(default_factory=PrefixConfig)
    cache: GenerationConfig = field(default_factory=GenerationConfig)
    allocator: AllocatorConfig = field(default_factory=AllocatorConfig)
    reuse: ReuseConfig = field(default_factory=ReuseConfig)
    fairness: FairnessConfig = field(default_factory=FairnessConfig)


QUICK_MEMORY = MemoryBenchConfig(
    simulated=SimulatedConfig(requests=150),
    pages=PageSizesConfig(
        table_sequences=2, rows=4, prompt_tokens=64, steps=2, repeats=2, requests=50
    ),
    watermarks=WatermarkConfig(memory="2GiB"),
    swap=SwappingConfig(
        model="small", swap=SwapConfig(lengths=(64, 256), repeats=2, max_num_batched_tokens=128)
    ),
    prefix=PrefixConfig(sharers=8, system_tokens=400, new_tokens=4, repeats=1),
    cache=GenerationConfig(model="small", steps=4, repeats=1),
    allocator=AllocatorConfig(
        overhead=OverheadConfig(rows=32, prompt_tokens=32, repeats=2, steps=2), steps=16
    ),
    reuse=ReuseConfig(memories=("8GiB",), requests=60),
    fairness=FairnessConfig(time_scale=0.1),
)
