"""Parts of the Batch-Max benchmark by name, in run order."""

from collections.abc import Callable, Mapping

from benchmarks.batch_max.config import BatchMaxConfig
from benchmarks.batch_max.equal import run_equal
from benchmarks.batch_max.quality import run_quality
from benchmarks.batch_max.speed import run_speed
from benchmarks.common.graded_prompts import PromptMakerFor
from benchmarks.common.result import PartResult
from quire.models.loader import LoadedModel

Part = Callable[[BatchMaxConfig], PartResult]


def make_parts(
    load: Callable[[], LoadedModel], prompt_maker_for: PromptMakerFor
) -> Mapping[str, Part]:
    """Create the parts: speed with random weights, quality with trained weights.

    Args:
        load: loads the model with trained weights when its part runs.
        prompt_maker_for: returns the prompt maker for the model.
    """

    def quality(config: BatchMaxConfig) -> PartResult:
        model = load()
        return run_quality(model, config.quality, prompt_maker_for(model))

    return {
        "speed": lambda config: run_speed(config.speed),
        "equal_quality": lambda config: run_equal(config.speed),
        "quality": quality,
    }
