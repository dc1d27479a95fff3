"""`python -m benchmarks memory`: costs and savings of KV memory management, part by part."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common.command import run_command
from benchmarks.common.flags import AsJson, Out, Threads, parts_option, quick_option
from benchmarks.common.result import PartResult
from benchmarks.memory.measured import (
    BeamConfig,
    GenerationConfig,
    PageSizesConfig,
    PrefixConfig,
    SwapConfig,
    run_beam,
    run_generation,
    run_page_sizes,
    run_prefix,
    run_swap,
)
from benchmarks.memory.simulated import (
    FairnessConfig,
    ReuseConfig,
    SimulatedConfig,
    WasteConfig,
    WatermarkConfig,
    run_fairness,
    run_reuse,
    run_waste,
    run_watermarks,
)
from quire.cli.common import use_threads


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBenchConfig:
    """Configuration of all parts; `simulated` has the traces and machine of the simulated parts."""

    simulated: SimulatedConfig = field(default_factory=SimulatedConfig)
    waste: WasteConfig = field(default_factory=WasteConfig)
    pages: PageSizesConfig = field(default_factory=PageSizesConfig)
    watermarks: WatermarkConfig = field(default_factory=WatermarkConfig)
    beam: BeamConfig = field(default_factory=BeamConfig)
    swap: SwapConfig = field(default_factory=SwapConfig)
    prefix: PrefixConfig = field(default_factory=PrefixConfig)
    cache: GenerationConfig = field(default_factory=GenerationConfig)
    reuse: ReuseConfig = field(default_factory=ReuseConfig)
    fairness: FairnessConfig = field(default_factory=FairnessConfig)


QUICK_MEMORY = MemoryBenchConfig(
    simulated=SimulatedConfig(requests=150),
    pages=PageSizesConfig(
        table_sequences=2, rows=4, prompt_tokens=64, steps=2, repeats=2, requests=50
    ),
    watermarks=WatermarkConfig(memory="2GiB"),
    swap=SwapConfig(model="small", lengths=(64, 256), repeats=2, max_num_batched_tokens=128),
    prefix=PrefixConfig(sharers=8, system_tokens=400, new_tokens=4, repeats=1),
    cache=GenerationConfig(model="small", steps=4, repeats=1),
    reuse=ReuseConfig(memories=("8GiB",), requests=60),
    fairness=FairnessConfig(time_scale=0.1),
)

PARTS: Mapping[str, Callable[[MemoryBenchConfig], PartResult]] = {
    "waste": lambda config: run_waste(config.waste, config.simulated),
    "pages": lambda config: run_page_sizes(config.pages, config.simulated),
    "watermarks": lambda config: run_watermarks(config.watermarks, config.simulated),
    "beam": lambda config: run_beam(config.beam),
    "swap": lambda config: run_swap(config.swap),
    "prefix": lambda config: run_prefix(config.prefix),
    "cache": lambda config: run_generation(config.cache),
    "reuse": lambda config: run_reuse(config.reuse, config.simulated),
    "fairness": lambda config: run_fairness(config.fairness, config.simulated),
}


def memory(
    *,
    parts: Annotated[str, parts_option(*PARTS)] = "",
    trace: Annotated[
        Path | None,
        typer.Option(help="Trace of conversations to simulate; default: the shipped Azure trace."),
    ] = None,
    prefix_trace: Annotated[
        Path | None,
        typer.Option(
            help="Trace of shared prefixes in Mooncake's format; default: the first 2,000 "
            "requests of Mooncake's conversation trace."
        ),
    ] = None,
    out: Out = None,
    quick: Annotated[bool, quick_option("Few requests and short prompts, for a trial.")] = False,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Measure KV memory: waste, sharing, watermarks, preemption, prefixes and fairness.

    Some parts run the engine on random weights; others simulate recorded requests with the engine's
    scheduler and memory.
    """
    use_threads(threads)
    config = QUICK_MEMORY if quick else MemoryBenchConfig()
    simulated = replace(
        config.simulated, trace=str(trace or ""), prefix_trace=str(prefix_trace or "")
    )
    config = replace(config, simulated=simulated)
    # the result has the base names of files
    files = {name: Path(getattr(simulated, name)).name for name in ("trace", "prefix_trace")}
    used = asdict(config) | {"simulated": asdict(simulated) | files}
    run_command("memory", PARTS, parts, config, used, out, quick=quick, as_json=as_json)
