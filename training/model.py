"""Training model equivalent to Transformers' Llama: fused projections, loss inside the graph."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from training.config import ModelConfig

_EXPLICIT_ATTENTION_TOKENS = 128
"""Up to this length the backward pass of the fused CPU kernel is slower than explicit products."""


class Rope(NamedTuple):
    """Rotary tables of one sequence length, and an additive causal mask for short ones."""

    cos: Tensor
    sin: Tensor
    mask: Tensor | None


def make_rope(
    config: ModelConfig, tokens: int, *, dtype: torch.dtype, device: torch.device
) -> Rope:
    """Tables [token, head_dim / 2]; the mask [token, token] exists up to 128 tokens on a CPU."""
    exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    angles = torch.outer(torch.arange(tokens).float(), config.rope_theta**-exponents)
    mask = None
    if tokens <= _EXPLICIT_ATTENTION_TOKENS and device.type == "cpu":
        mask = torch.full((tokens, tokens), -1e30).triu(1)
    return Rope(angles.cos().to(device, dtype), angles.sin().to(device, dtype), mask)


def rotate(
    x: Float[Tensor, "row head token dim"], rope: Rope
) -> Float[Tensor, "row head token dim"]:
    """Rotate the first half of the dimensions with the second, as in Llama."""
    first, second = x.chunk(2, -1)
    cos, sin = rope.cos, rope.sin
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Block(nn.Module):
    """Attention and gated MLP, each after an RMS norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.norm1 = nn.Parameter(torch.ones(width))
        self.norm2 = nn.Parameter(torch.ones(width))
        self.qkv = nn.Linear(width, config.query_size + 2 * config.kv_size, bias=False)
        self.out = nn.Linear(config.query_size, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, width, bias=False)

    @property
    def qkv_cuts(self) -> list[int]:
        """Rows of queries, keys and values in the fused projection."""
        return [self.config.query_size, self.config.kv_size, self.config.kv_size]

    def project(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [row, query_head, token, dim]; keys and values repeated."""
        config = self.config
        rows, tokens, width = x.shape
        normed = F.rms_norm(x, (width,), self.norm1.to(x.dtype), config.rms_norm_eps)
        query, key, value = (
            part.view(rows, tokens, -1, config.head_dim).transpose(1, 2)
            for part in self.qkv(normed).split(self.qkv_cuts, -1)
        )
        query, key = rotate(query, rope), rotate(key, rope)
        groups = config.group_size
        return query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)

    def attend(self, x: Tensor, rope: Rope) -> Tensor:
        """Causal attention of every token, projected back to the hidden size."""
        query, key, value = self.project(x, rope)
        if rope.mask is None:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            logits = (query @ key.transpose(-1, -2)).float() * self.config.head_dim**-0.5
            mixed = (logits + rope.mask).softmax(-1).to(value.dtype) @ value
        projected: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return projected

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        """Hidden states [row, token, hidden] -> hidden states."""
        x = x + self.attend(x, rope)
        width = x.shape[-1]
        normed = F.rms_norm(x, (width,), self.norm2.to(x.dtype), self.config.rms_norm_eps)
        gate, up = self.gate_up(normed).chunk(2, -1)
        mixed: Tensor = x + self.down(F.silu(gate) * up)
        return mixed


class Decoder(nn.Module):
    """The whole model. Output projections start at zero: at first, every layer is the identity."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        for name, parameter in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def logits(self, ids: Int[Tensor, "row token"], rope: Rope) -> Float[Tensor, "row token vocab"]:
        """Logits of the next token at every position."""
        x = self.embed(ids).to(rope.cos.dtype)
        for block in self.blocks:
            x = block(x, rope)
        x = F.rms_norm(x, (x.shape[-1],), self.norm.to(x.dtype), self.config.rms_norm_eps)
        return F.linear(x, self.embed.weight.to(x.dtype))

    def forward(
        self, ids: Int[Tensor, "row token"], targets: Int[Tensor, "row token"], rope: Rope
    ) -> tuple[Float[Tensor, " position"], Bool[Tensor, " position"]]:
        """Loss in nats and correctness of every position; one graph when compiled."""
        logits = self.logits(ids, rope).flatten(0, 1).float()
        wanted = targets.flatten()
        losses = logits.logsumexp(-1) - logits.gather(-1, wanted[:, None])[:, 0]
        with torch.no_grad():
            right = logits.argmax(-1) == wanted
        return losses, right
