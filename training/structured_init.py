"""Initialization with previous-token heads and approximate induction heads.

Attention to the previous token is the slowest part of learning recall: RoPE prefers no distance
unless queries and keys share a constant direction. Embedding dimension 0 is therefore a constant.
In layer 0, query head h attends to the token h+1 positions earlier through the RoPE phases of that
constant, and writes that token into a random subspace. In layers 1 to 3, two heads initially
compare the current token with these subspaces and copy the matching token. All weights are
trained; none is frozen.
"""

import math

import torch
from torch import Tensor

from training.config import ModelConfig
from training.model import Block, Decoder

_CONSTANT = 8.0
"""Value of embedding dimension 0, in standard deviations of the others."""
_SHARPNESS = 6.0
_NOTE, _MATCH, _COPY = 1.5, 2.0, 1.0
_BACKGROUND = 0.1
_INDUCTION_LAYERS = slice(1, 4)
_INDUCTION_HEADS = 2


def _orthonormal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Orthonormal rows, zero in the constant dimension 0."""
    frame: Tensor = torch.linalg.qr(torch.randn(columns, rows, generator=generator))[0].T
    frame[:, 0] = 0
    return frame


def _init_previous_token_heads(
    model: Decoder, generator: torch.Generator
) -> tuple[list[Tensor], list[Tensor]]:
    """Layer 0: subspaces that the value heads read and that each query head writes."""
    config, block = model.config, model.blocks[0]
    assert isinstance(block, Block), "a decoder is made of blocks"
    dim, half, width = config.head_dim, config.head_dim // 2, config.hidden_size
    level = _CONSTANT / math.sqrt(1 + _CONSTANT**2 / width)  # dimension 0 after the first norm
    amplitude = _SHARPNESS / level
    turn = config.rope_theta ** (-torch.arange(0, dim, 2).float() / dim)
    query, key, value = torch.split(block.qkv.weight, block.qkv_cuts)
    read, written = [], []
    for head in range(config.num_key_value_heads):
        rows = slice(head * dim, (head + 1) * dim)
        key[rows] *= _BACKGROUND
        key[rows][:half, 0] = amplitude
        value[rows] = _orthonormal(dim, width, generator)
        read.append(value[rows].clone())
    for head in range(config.num_attention_heads):
        rows = slice(head * dim, (head + 1) * dim)
        phase = (head + 1) * turn
        query[rows] *= _BACKGROUND
        query[rows][:half, 0] = amplitude * phase.cos()
        query[rows][half:, 0] = -amplitude * phase.sin()
        note = _orthonormal(dim, width, generator)
        block.out.weight[:, rows] = _NOTE * width**-0.5 * note.T
        written.append(note)
    return read, written


def _slow_dimensions(config: ModelConfig) -> Tensor:
    """Head dimensions with slow RoPE rotation: they can compare content at any distance."""
    half = config.head_dim // 2
    slow = torch.arange(half // 2, half)
    return torch.cat([slow, slow + half])


def _init_induction_heads(
    block: Block, read: list[Tensor], written: list[Tensor], generator: torch.Generator
) -> None:
    """Two heads attend one and two tokens after an earlier occurrence of the current token."""
    config = block.config
    dim, width = config.head_dim, config.hidden_size
    slow = _slow_dimensions(config)
    query, key, value = torch.split(block.qkv.weight, block.qkv_cuts)
    for head in range(_INDUCTION_HEADS):
        keys = slice(head * dim, (head + 1) * dim)
        first = head * config.group_size * dim
        queries = slice(first, first + dim)
        compared = read[0] if head == 0 else written[0]
        key[keys] *= _BACKGROUND
        query[queries] *= _BACKGROUND
        key[keys.start + slow] += _MATCH * written[head][slow]
        query[queries.start + slow] += _MATCH * compared[slow]
        value[keys] = _orthonormal(dim, width, generator)
        block.out.weight[:, queries] = _COPY * width**-0.5 * value[keys].T


@torch.no_grad()
def structured_init(model: Decoder, seed: int) -> None:
    """Overwrite the random initialization of a decoder in place, before training.

    Args:
        model: a new model; its width is at least head_dim.
        seed: seed of the random subspaces.
    """
    generator = torch.Generator().manual_seed(seed)
    model.embed.weight[:, 0] = _CONSTANT * model.config.hidden_size**-0.5
    read, written = _init_previous_token_heads(model, generator)
    for block in model.blocks[_INDUCTION_LAYERS]:
        assert isinstance(block, Block), "a decoder is made of blocks"
        _init_induction_heads(block, read, written, generator)
