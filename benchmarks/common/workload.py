"""Workload of the throughput benchmarks: random prompts for a model with random weights."""

import random
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from benchmarks.common.models import ALL_SHAPES
from quire.config.kv_config import AttentionName, KVConfig, PrefixCacheConfig
from quire.errors import ConfigError
from quire.kv.pages import Arena
from quire.layout.config import dtype_bytes
from quire.layout.layout import layout_for
from quire.layout.model import ModelSpec
from quire.plan.capacity import sequence_pages


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts that all arrive at the start; greedy, end-of-sequence tokens ignored.

    Attributes:
        model: a name in ALL_SHAPES.
        prompts: number of prompts.
        prompt_tokens, new_tokens: tokens of each prompt and of each output.
        dtype: type of weights, activations and KV.
    """

    model: str = "125m"
    prompts: int = 32
    prompt_tokens: int = 512
    new_tokens: int = 64
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        context = self.shape().max_position_embeddings
        if self.final_tokens > context:
            raise ConfigError(
                f"prompt_tokens + new_tokens = {self.final_tokens} exceeds the context of the "
                f"model {self.model}, {context}: lower one of them"
            )

    @property
    def final_tokens(self) -> int:
        """Final length of each sequence."""
        return self.prompt_tokens + self.new_tokens

    def shape(self) -> PreTrainedConfig:
        """Config of the model."""
        return ALL_SHAPES[self.model]()

    @property
    def torch_dtype(self) -> torch.dtype:
        """Type of weights, activations and KV."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def prompt_ids(self) -> list[list[int]]:
        """Prompt token ids; equal in every process."""
        rng = random.Random(0)
        vocab_size = self.shape().vocab_size
        return [
            [rng.randrange(vocab_size) for _ in range(self.prompt_tokens)]
            for _ in range(self.prompts)
        ]

    def kv_bytes(self, spec: ModelSpec, *, page_tokens: int = 16) -> int:
        """Bytes of a KV memory for all sequences at their final length, in whole pages."""
        if spec.state_values:  # pages of several sizes, in whole slabs
            layout = layout_for(spec, codec=self.dtype, page_tokens=page_tokens)
            pages = sequence_pages(layout, self.final_tokens)
            sizes = [(page.page_bytes, count * self.prompts) for page, count in pages.items()]
            return Arena(1 << 40, [size for size, _ in sizes]).fitting_bytes(sizes)
        slots = -(-self.final_tokens // page_tokens) * page_tokens
        return spec.kv_bytes_per_token(dtype_bytes(self.dtype)) * slots * self.prompts

    def kv_config(self, spec: ModelSpec, *, attention: AttentionName = "auto") -> KVConfig:
        """KV memory without a prefix cache: every round prefills its prompts."""
        return KVConfig(
            memory=self.kv_bytes(spec),
            attention=attention,
            prefix_cache=PrefixCacheConfig(enabled=False),
        )


QUICK_WORKLOAD = Workload(model="tiny", prompts=4, prompt_tokens=40, new_tokens=8)
