"""Reading and writing slots of pages through typed views of the arena.

A plane of a page class is a view [pages, heads, tokens, head_dim] over the whole arena; page
numbers index its first axis.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def write_slots(
    plane: Float[Tensor, "page head token head_dim"],
    numbers: Float[Tensor, "row lane head head_dim"],
    pages: Int[Tensor, "row lane"],
    offsets: Int[Tensor, "row lane"],
) -> None:
    """Write one vector per head into the slot (pages, offsets) of each row and lane."""
    plane[pages, :, offsets] = numbers


def gather_pages(
    plane: Float[Tensor, "page head token head_dim"], pages: Int[Tensor, "row column"]
) -> Float[Tensor, "row head slot head_dim"]:
    """Copy whole pages side by side: slot = column * tokens + offset."""
    heads = torch.arange(plane.shape[1], device=plane.device)
    copied = plane[pages[:, None, :], heads[None, :, None]]
    return copied.reshape(*copied.shape[:2], -1, plane.shape[3])
