"""Parts of the KVCrush benchmark by name, in run order."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from benchmarks.common.graded_prompts import PromptMakerFor
from benchmarks.common.result import PartResult
from benchmarks.eviction.cells import Cell, CellFile
from benchmarks.eviction.texts import RunningText
from benchmarks.kvcrush.arm_tables import keys
from benchmarks.kvcrush.config import (
    FidelityConfig,
    KVCrushBenchConfig,
    PromptsConfig,
    QualityConfig,
)
from benchmarks.kvcrush.fidelity import run_fidelity
from benchmarks.kvcrush.judging import ManyRules
from benchmarks.kvcrush.overhead import run_overhead
from benchmarks.kvcrush.prompts import Recorded, run_prompts
from benchmarks.kvcrush.quality import run_quality
from benchmarks.kvcrush.signature_bytes import run_bytes
from benchmarks.kvcrush.text_scores import JudgeText
from quire.models.loader import LoadedModel

Part = Callable[[KVCrushBenchConfig], PartResult]


@dataclass(frozen=True, kw_only=True)
class Material:
    """Inputs of the parts in addition to their configuration.

    Attributes:
        load: loads the evaluated model when the first part needs it.
        prompt_maker_for: returns the prompt maker for the model.
        running_for: returns the source of the long texts for the model.
        recorded_for: returns prompts from files of examples.
        rouge_l: scores a continuation against a reference.
        stored: store of finished cells.
        commit: commit of this code.
        show: called with every cell that runs.
    """

    load: Callable[[], LoadedModel]
    prompt_maker_for: PromptMakerFor
    running_for: Callable[[LoadedModel], RunningText]
    recorded_for: Callable[[LoadedModel, PromptsConfig], Sequence[Recorded]]
    rouge_l: JudgeText
    stored: CellFile
    commit: str | None
    show: Callable[[Cell], None]

    @cached_property
    def model(self) -> LoadedModel:
        """The evaluated model, loaded on first use."""
        return self.load()


def make_parts(material: Material) -> Mapping[str, Part]:
    """Create all parts."""

    def quality(config: KVCrushBenchConfig, part: QualityConfig) -> PartResult:
        model = material.model
        rules = [key.rule for key in keys(part, config.model, None)]
        judge = ManyRules(model, part, material.prompt_maker_for(model), rules)
        return run_quality(
            judge.cell,
            part,
            model=config.model,
            commit=material.commit,
            stored=material.stored,
            show=material.show,
        )

    def fidelity(part: FidelityConfig) -> PartResult:
        running = material.running_for(material.model)
        return run_fidelity(material.model, part, running, material.rouge_l)

    def prompts(part: PromptsConfig) -> PartResult:
        recorded = material.recorded_for(material.model, part)
        return run_prompts(material.model, part, recorded, material.rouge_l)

    return {
        "quality": lambda c: quality(c, c.quality),
        "heads": lambda c: quality(c, c.heads),
        "sweeps": lambda c: quality(c, c.sweeps),
        "fidelity": lambda c: fidelity(c.fidelity),
        "long": lambda c: fidelity(c.long),
        "prompts": lambda c: prompts(c.prompts),
        "overhead": lambda c: run_overhead(c.overhead),
        "bytes": lambda c: run_bytes(),
    }
