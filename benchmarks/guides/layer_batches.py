"""Table of docs/weights.md: activations and transfers of one step with offloaded weights.

A random-weight Llama has six layers, four of them offloaded. A step of 4,096 tokens runs as one
batch, or as eight batches layer by layer. Every variant runs in a process of its own with one
thread, because the peak is that of the process. The C library returns freed blocks at once there,
so that the peak has no blocks that are free. The last line of output is one JSON object.
"""

import json
import multiprocessing
import os
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from quire.cli.report import envelope
from quire.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RETURN_FREED_BLOCKS = {"MALLOC_MMAP_THRESHOLD_": "65536"}
_VOCABULARY = 1_000
_FEW_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBatchesConfig:
    """Model and step of all variants.

    Attributes:
        hidden_size, intermediate_size, heads: widths of the model.
        layers: number of layers.
        offloaded: number of layers whose weights are offloaded.
        step_tokens: tokens of a step.
        batches: number of batches that share each transferred layer.
        repeats: processes for each variant; peaks are medians.
    """

    hidden_size: int = 512
    intermediate_size: int = 1_792
    heads: int = 8
    layers: int = 6
    offloaded: int = 4
    step_tokens: int = 4_096
    batches: int = 8
    repeats: int = 5


@dataclass(frozen=True, slots=True)
class StepBytes:
    """One step.

    Attributes:
        peak_bytes: peak of its activations.
        transferred_bytes: bytes of weights that it transferred.
    """

    peak_bytes: int
    transferred_bytes: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the variants and print the claims."""
    config = LayerBatchesConfig(repeats=_parse(arguments).repeats)
    whole = [measured(config, 1) for _ in range(config.repeats)]
    shared = [measured(config, config.batches) for _ in range(config.repeats)]
    arms = {"one_batch": [*map(asdict, whole)], "layer_by_layer": [*map(asdict, shared)]}
    used = asdict(config) | {"threads": 1, "dtype": "float32"}
    print(json.dumps(envelope("layer batches", claims(config, whole, shared), arms, used)))


def claims(
    config: LayerBatchesConfig, whole: Sequence[StepBytes], shared: Sequence[StepBytes]
) -> dict[str, int | float]:
    """Medians of the peaks, and transferred bytes, which are equal in every repeat.

    Batches that run one after the other transfer the offloaded layers once each.
    """
    once = transferred(whole)
    return {
        "one_batch_peak_bytes": statistics.median(one.peak_bytes for one in whole),
        "one_batch_transferred_bytes": once,
        "layer_by_layer_peak_bytes": statistics.median(one.peak_bytes for one in shared),
        "layer_by_layer_transferred_bytes": transferred(shared),
        "one_after_the_other_transferred_bytes": config.batches * once,
    }


def transferred(steps: Sequence[StepBytes]) -> int:
    """Bytes that each of these steps transferred.

    Raises:
        ConfigError: the steps transferred different numbers of bytes.
    """
    found = {step.transferred_bytes for step in steps}
    if len(found) != 1:
        raise ConfigError(f"expected equal transfers in every repeat, got {sorted(found)} bytes")
    return found.pop()


def measured(config: LayerBatchesConfig, batches: int) -> StepBytes:
    """Run one step in a new process."""
    os.environ |= RETURN_FREED_BLOCKS  # glibc reads it when the new process starts
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(step_bytes, config, batches).result()


def step_bytes(config: LayerBatchesConfig, batches: int) -> StepBytes:
    """Run a step of equal batches.

    A step of few tokens before it is a warm-up: it allocates the buffers that stay, and prefetches
    the first layers of the next step, which then transfers each offloaded layer once.
    """
    import torch

    from benchmarks.common.models import llama, random_weights
    from quire.engine.kv_memory import measure_activation_peak
    from quire.models.loader import make_decoder
    from quire.offload.weights.placement import WeightStream, WithinBudget
    from quire.scheduler.schedule_config import ScheduleConfig

    torch.set_num_threads(1)
    shape = llama(
        _VOCABULARY,
        config.hidden_size,
        config.intermediate_size,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.heads,
        context=config.step_tokens,
    )
    model = random_weights(shape, dtype=torch.float32)
    place, weights = WithinBudget(_budget_bytes(config, model)).place(model, torch.device("cpu"))
    assert isinstance(weights, WeightStream), "the budget offloads layers"
    assert len(place.offloaded_layers) == config.offloaded, "the budget is that of this number"
    decoder = make_decoder(model, weights, impl="auto", codec="auto")
    few, step = (
        ScheduleConfig(max_num_batched_tokens=tokens, chunk_tokens=tokens, max_num_seqs=1)
        for tokens in (_FEW_TOKENS, config.step_tokens // batches)
    )
    measure_activation_peak(decoder, few, batches)
    before = weights.num_bytes
    peak_bytes = measure_activation_peak(decoder, step, batches)
    return StepBytes(peak_bytes, weights.num_bytes - before)


def _budget_bytes(config: LayerBatchesConfig, model: "PreTrainedModel") -> int:
    """Device memory in which this number of layers is offloaded, and no more."""
    from quire.models.weights import weight_bytes
    from quire.offload.weights.links import layer_weights
    from quire.plan.weights import SLOTS

    layers = layer_weights(model, config.layers)
    other_bytes = weight_bytes(model) - sum(h.num_bytes for one in layers for h in one.held)
    return other_bytes + (config.layers - config.offloaded + SLOTS) * layers[0].num_bytes


def _parse(arguments: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
