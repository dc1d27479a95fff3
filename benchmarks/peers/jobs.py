"""Jobs of workers: prompts, token counts and sizes, equal for every engine."""

import random

from benchmarks.peers.config import ELEMENT_BYTES, MODELS, PeersConfig, Shape
from benchmarks.peers.engines import Engine
from benchmarks.peers.workers.protocol import Job

WARMUP_PROMPTS, WARMUP_TOKENS = 4, 4


def kv_bytes_per_token(model: str) -> int:
    """KV bytes of a token of this model, with elements of 2 bytes."""
    config = MODELS[model]()
    heads = config.num_key_value_heads or config.num_attention_heads
    head_dim: int = config.head_dim or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_dim * ELEMENT_BYTES


def random_prompts(lengths: list[int], vocab_size: int, seed: int) -> list[list[int]]:
    """Random token ids; the same arguments give the same prompts in every process."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def build_job(config: PeersConfig, model: str, shape: Shape, engine: Engine, round_: int) -> Job:
    """The job of one engine in one round; rounds differ in their prompts.

    Args:
        config: the configuration.
        model: name of the model.
        shape: the work.
        engine: the engine.
        round_: number of the round, which seeds the prompts.
    """
    vocab_size = MODELS[model]().vocab_size
    lengths = [prompt for prompt, _ in shape.lengths]
    warmup = random_prompts(lengths[:WARMUP_PROMPTS], vocab_size, seed=-1 - round_)
    token_bytes = kv_bytes_per_token(model)
    return Job(
        task="run",
        model=str(config.files / model),
        prepared=str(config.files / prepared_name(model, engine, config.dtype)),
        dtype=config.dtype,
        threads=config.threads,
        prompts=random_prompts(lengths, vocab_size, seed=round_),
        new_tokens=[new for _, new in shape.lengths],
        warmup_prompts=warmup,
        warmup_tokens=WARMUP_TOKENS,
        kv_bytes=shape.kv_bytes(token_bytes),
        kv_bytes_per_token=token_bytes,
        max_num_batched_tokens=config.max_num_batched_tokens,
        options=dict(engine.options),
    )


def prepared_name(model: str, engine: Engine, dtype: str) -> str:
    """Folder name of a model in the engine's own format."""
    return f"{model}-{engine.environment}-{dtype}" if engine.prepares else model
