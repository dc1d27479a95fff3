"""Batch sizes: how many rows a KV memory holds, and which of them the paper's set has."""

from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import NeverFits
from quire.models.loader import LoadedModel
from quire.profile.step_rates import static_schedule

PAPER_SAMPLES = 960
MOST_ROWS = 256


def batch_sizes(samples: int = PAPER_SAMPLES) -> tuple[int, ...]:
    """Sizes that divide the samples, so that every batch is whole: the paper's D for 960."""
    return tuple(size for size in range(1, samples + 1) if samples % size == 0)


def largest_of(sizes: tuple[int, ...], rows: int) -> int:
    """The largest size of no more than `rows`; 0 where there is none."""
    return max((size for size in sizes if size <= rows), default=0)


def rows_that_fit(
    model: LoadedModel, kv: KVConfig, prompt_tokens: int, new_tokens: int, most: int = MOST_ROWS
) -> int:
    """Rows that run to their end side by side, each of so many tokens.

    Asked of the engine itself: as many requests as could be are submitted and one step is planned,
    but not run. Who has entered then would run. `quire plan` counts the same without an engine
    (`quire.scheduler.admission.batches`), and is held to this.

    Args:
        model: any weights; they are not used.
        kv: the memory, and what evicts.
        prompt_tokens: of each row.
        new_tokens: generated behind them.
        most: no more are tried.
    """
    engine = Engine(model, kv, static_schedule(most, prompt_tokens))
    options = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    try:
        for _ in range(most):
            engine.submit(GenerationRequest([0] * prompt_tokens, options))
    except NeverFits:
        return 0
    engine.scheduler.schedule()
    return len(engine.scheduler.running)
