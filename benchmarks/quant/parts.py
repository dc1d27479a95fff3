"""Parts of the codec benchmark by name, in run order."""

from collections.abc import Callable, Mapping

from benchmarks.common.result import PartResult
from benchmarks.eviction.parts import Material
from benchmarks.quant.attention import run_attention
from benchmarks.quant.bandwidth import run_bandwidth
from benchmarks.quant.capacity import run_capacity
from benchmarks.quant.config import QuantBenchConfig
from benchmarks.quant.evicting import run_evicting
from benchmarks.quant.orderings import run_orderings
from benchmarks.quant.quality import CodecJudge, run_quality
from benchmarks.quant.throughput import run_throughput

Part = Callable[[QuantBenchConfig], PartResult]


def make_parts(material: Material) -> Mapping[str, Part]:
    """Create all parts; the model is loaded on first use."""

    def quality(config: QuantBenchConfig) -> PartResult:
        model = material.model
        judge = CodecJudge(model, config.tasks, material.prompt_maker_for(model))
        return run_quality(
            model,
            config,
            material.running,
            judge.cell,
            commit=material.commit,
            stored=material.stored,
            show=material.show,
        )

    return {
        "capacity": lambda c: run_capacity(c.capacity),
        "attention": lambda c: run_attention(c.attention),
        "throughput": lambda c: run_throughput(c.throughput),
        "bandwidth": lambda c: run_bandwidth(c.bandwidth),
        "quality": quality,
        "orderings": lambda c: run_orderings(material.model, c.orderings, material.running),
        "eviction": lambda c: run_evicting(material.model, c.evicting, material.running),
    }
