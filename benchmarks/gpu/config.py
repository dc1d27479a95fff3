"""Configurations of `python -m benchmarks gpu`, at full size and small."""

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.common.models import LLAMA_3_8B, OPT_6_7B
from quire.layout.model import ModelSpec

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def _toy(kv_heads: int, num_layers: int = 3) -> ModelSpec:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "intermediate_size": 96,
        "vocab_size": 128,
        "max_position_embeddings": 1024,
    }
    return ModelSpec.from_config(config)


SPECS: Mapping[str, ModelSpec] = {
    "Llama-3-8B": LLAMA_3_8B,
    "OPT-6.7B": OPT_6_7B,
    "toy": _toy(4),
    "toy-grouped": _toy(1),
    "toy-deep": _toy(4, 8),
}
"""Model specs by name; the toys are for quick trials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuConfig:
    """Configuration of all parts.

    Attributes:
        device: the measured device.
        repeats: repeats of each measurement, after one warm-up that is not counted.
        attention: attention backend; auto selects it as an engine does.
        copy_bytes: bytes of the copy that measures the memory bandwidth.
        product: [rows, inner, columns] of the product that measures the compute rate.
        equal_prompts, equal_tokens: prompts and output tokens of the part `equality`.
        codecs: KV codecs of the part `kernels`; the first is plain.
        model: name of the shape in `SPECS` of the parts `kernels`, `step` and `prefill`.
        model_impl: implementation of the model's layers.
        dtype: type of weights and plain KV.
        rows, context: batch of the parts `kernels` and `step`, and tokens of each sequence.
        step_context: tokens of each sequence at the start of the decode steps.
        steps, warm_steps: measured decode steps, and steps before them.
        prefill_tokens: tokens of the prompt of the part `prefill`.
        small_model: name in `SHAPES` of the model of the other parts.
        pool_rows: KV memory of Batch-Max, in rows of full KV.
        prompts, prompt_tokens, new_tokens: requests of the parts `batch_max`, `offload` and
            `rebatch`.
        cap, every: options of Batch-Max.
        kvpr_model: shape in `SPECS` of the part `kvpr`; as many KV heads as query heads, because
            recompute does not pay with fewer.
        kvpr_rows, kvpr_tokens, kvpr_chunk: its rows, their prompts, and the chunks of prompts.
        others: other engines to run.
        link_bytes: sizes of copies in the part `link`.
        piece_bytes, pieces: sizes of its small copies, and the number of copies of each size.
    """

    device: str = "auto"
    repeats: int = 5
    attention: str = "auto"
    copy_bytes: int = 2 * GIB
    product: tuple[int, int, int] = (8_192, 4_096, 14_336)
    equal_prompts: int = 16
    equal_tokens: int = 64
    codecs: tuple[str, ...] = ("bfloat16", "int8")
    model: str = "Llama-3-8B"
    model_impl: str = "auto"
    dtype: str = "bfloat16"
    rows: int = 64
    context: int = 4_096
    step_context: int = 1_024
    steps: int = 32
    warm_steps: int = 8
    prefill_tokens: int = 8_192
    small_model: str = "1100m"
    pool_rows: int = 4
    prompts: int = 32
    prompt_tokens: int = 2_048
    new_tokens: int = 128
    cap: int = 512
    every: int = 64
    kvpr_model: str = "OPT-6.7B"
    kvpr_rows: int = 8
    kvpr_tokens: int = 512
    kvpr_chunk: int = 32
    others: tuple[str, ...] = ("static", "continuous", "vllm")
    link_bytes: tuple[int, ...] = (
        *(4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB),
        *(256 * MIB, GIB),
    )
    piece_bytes: tuple[int, ...] = (4 * KIB, 16 * KIB, 28 * KIB, 64 * KIB, 256 * KIB)
    pieces: int = 1024

    @property
    def spec(self) -> ModelSpec:
        """Shape of the large model."""
        return SPECS[self.model]


QUICK_GPU = GpuConfig(
    repeats=2,
    copy_bytes=4 * MIB,
    product=(64, 64, 128),
    equal_prompts=3,
    equal_tokens=8,
    model="toy-grouped",
    dtype="float32",
    rows=3,
    context=64,
    step_context=24,
    steps=4,
    warm_steps=2,
    prefill_tokens=64,
    small_model="tiny",
    pool_rows=2,
    prompts=4,
    prompt_tokens=48,
    new_tokens=12,
    cap=24,
    every=8,
    kvpr_model="toy-deep",
    kvpr_rows=4,
    kvpr_tokens=160,
    kvpr_chunk=4,
    link_bytes=(4 * KIB, MIB),
    piece_bytes=(4 * KIB,),
    pieces=16,
)
