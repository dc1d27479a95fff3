"""Optimizers: Muon for the matrices, AdamW for embedding and norms."""

from torch import Tensor
from torch.optim import AdamW, Optimizer

from training.config import Recipe
from training.model import Block, Decoder
from training.muon import Muon


def fused_parts(block: Block) -> list[tuple[Tensor, list[int]]]:
    """Matrices of a block, and the rows of the projections fused in each."""
    config = block.config
    return [
        (block.qkv.weight, block.qkv_cuts),
        (block.out.weight, [config.hidden_size]),
        (block.gate_up.weight, [config.intermediate_size] * 2),
        (block.down.weight, [config.hidden_size]),
    ]


def make_optimizers(model: Decoder, recipe: Recipe) -> list[Optimizer]:
    """Muon, then AdamW; their learning rates are set at every step."""
    blocks = [block for block in model.blocks if isinstance(block, Block)]
    matrices, cuts = zip(*(part for block in blocks for part in fused_parts(block)), strict=True)
    others = [model.embed.weight] + [p for p in model.parameters() if p.dim() == 1]
    return [
        Muon(matrices, cuts, lr=recipe.lr, weight_decay=recipe.weight_decay),
        AdamW(others, lr=recipe.lr_embed, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def set_learning_rates(optimizers: list[Optimizer], recipe: Recipe, factor: float) -> None:
    """Scale both learning rates."""
    for optimizer, base in zip(optimizers, (recipe.lr, recipe.lr_embed), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = base * factor
