"""Parts of the eviction benchmark by name, in run order."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from benchmarks.common.graded_prompts import PromptMakerFor
from benchmarks.common.result import PartResult
from benchmarks.eviction.cells import Cell, CellFile, cell_keys
from benchmarks.eviction.config import EvictionBenchConfig
from benchmarks.eviction.cost import run_cost
from benchmarks.eviction.perplexity import run_perplexity
from benchmarks.eviction.quality import Judge, run_quality
from benchmarks.eviction.ready import run_ready
from benchmarks.eviction.retained import run_retained
from benchmarks.eviction.texts import RunningText
from quire.models.loader import LoadedModel

Part = Callable[[EvictionBenchConfig], PartResult]


@dataclass(frozen=True, kw_only=True)
class Material:
    """Inputs of the parts in addition to their configuration.

    Attributes:
        load: loads the evaluated model when the first part needs it.
        prompt_maker_for: returns the prompt maker for the model.
        running_for: returns the source of the long texts for the model.
        stored: store of finished cells.
        commit: commit of this code.
        show: called with every cell that runs.
    """

    load: Callable[[], LoadedModel]
    prompt_maker_for: PromptMakerFor
    running_for: Callable[[LoadedModel], RunningText]
    stored: CellFile
    commit: str | None
    show: Callable[[Cell], None]

    @cached_property
    def model(self) -> LoadedModel:
        """The evaluated model, loaded on first use."""
        return self.load()

    @cached_property
    def running(self) -> RunningText:
        """Source of the long texts."""
        return self.running_for(self.model)


def make_parts(material: Material) -> Mapping[str, Part]:
    """Create all parts."""

    def quality(config: EvictionBenchConfig) -> PartResult:
        keys = list(cell_keys(config.quality, config.model, material.commit))
        judge = Judge(material.model, config.quality, material.prompt_maker_for(material.model))
        return run_quality(judge, config.quality, keys, material.stored, material.show)

    return {
        "quality": quality,
        "perplexity": lambda c: run_perplexity(material.model, c.perplexity, material.running),
        "kept": lambda c: run_retained(material.model, c.kept, material.running),
        "cost": lambda c: run_cost(c.cost),
        "ready": lambda c: run_ready(c.ready),
    }
