"""Arguments of a forward: the new tokens of a batch that is padded on the left.

    input_ids        . . a b c      attention_mask   0 0 1 1 1       a row's new tokens are the last
                     d e f g h                       1 1 1 1 1       `counts[row]` columns: 3 and 5

Pads must be on the left. They have no slots and no positions, and no token attends to them.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import RequestError

_READ = frozenset({"input_ids", "attention_mask", "position_ids", "logits_to_keep", "use_cache"})
_HARMLESS = frozenset({"return_dict", "cache_position"})


def count_new_tokens(
    attention_mask: object, columns: int, past_columns: int, lengths: Sequence[int]
) -> NDArray[np.int32]:
    """Count the new tokens of each row, pads excluded.

    Args:
        attention_mask: [rows, past_columns + columns], nonzero for tokens; None: no pads among the
            new columns.
        columns: new columns, pads included.
        past_columns: columns of earlier forwards.
        lengths: tokens of each row in earlier forwards.

    Raises:
        RequestError: a mask of another shape, with pads on the right, or that hides cached tokens.
    """
    rows = len(lengths)
    if attention_mask is None:
        return np.full(rows, columns, dtype=np.int32)
    shape = (rows, past_columns + columns)
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != shape:
        got = (
            list(attention_mask.shape)
            if isinstance(attention_mask, Tensor)
            else type(attention_mask).__name__
        )
        raise RequestError(
            f"expected an attention_mask {list(shape)} for the cached and the new tokens, "
            f"1 for a token and 0 for a pad, got {got}"
        )
    seen = attention_mask != 0
    new = seen[:, past_columns:]
    gaps = (new[:, :-1] & ~new[:, 1:]).any(dim=1)  # a pad after a token
    numbers = torch.stack([seen[:, :past_columns].sum(1), new.sum(1), gaps.long()])
    past, counts, gap = numbers.cpu().numpy()
    held = np.array(lengths)
    if gap.any() or ((held > 0) & (counts < columns)).any():
        raise RequestError(
            "expected a batch padded on the left, got pads after or between the tokens of a row; "
            "set tokenizer.padding_side = 'left'"
        )
    if (past != held).any():
        raise RequestError(
            f"the attention_mask has {past.tolist()} previous tokens, but {held.tolist()} are "
            "cached, and cached tokens cannot be masked; call cache.reset() before other prompts"
        )
    counted: NDArray[np.int32] = counts.astype(np.int32)
    return counted


def check_positions(
    position_ids: Int[Tensor, "batch columns"],
    counts: NDArray[np.int32],
    lengths: Sequence[int],
) -> None:
    """Refuse positions other than 0, 1, 2, ... in each row; the cache counts positions itself.

    Args:
        position_ids: [rows or 1, columns]; values at pads are ignored.
        counts: new tokens of each row, the last columns.
        lengths: tokens of each row before them.

    Raises:
        RequestError: names the first row with other positions.
    """
    columns = position_ids.shape[1]
    first = torch.tensor(
        [length + int(count) - columns for length, count in zip(lengths, counts, strict=True)],
        device=position_ids.device,
    )
    column = torch.arange(columns, device=position_ids.device)
    new = column >= columns - torch.from_numpy(counts).to(position_ids.device)[:, None]
    wrong = ((position_ids != first[:, None] + column) & new).any(dim=1)
    if bool(wrong.any()):
        row = int(wrong.int().argmax())
        raise RequestError(
            f"expected consecutive position_ids from {lengths[row]} in row {row}; omit "
            "position_ids, pass an attention_mask if rows are padded, or call cache.reset() before "
            "other prompts"
        )


def without_cached(
    token_ids: Int[Tensor, "batch columns"], position_ids: object, past_columns: int
) -> tuple[Tensor, object]:
    """Drop tokens that are cached already from the first forward of assisted decoding.

    Transformers 5.23 passes the whole sequence again if its cache already holds a part of it, as in
    the second turn of a conversation.

    Args:
        token_ids: [1, columns].
        position_ids: their positions, from 0 on if cached tokens are passed again.
        past_columns: columns of earlier forwards.
    """
    again = isinstance(position_ids, Tensor) and past_columns and int(position_ids[0, 0]) == 0
    if not again or token_ids.shape[0] != 1 or token_ids.shape[1] <= past_columns:
        return token_ids, position_ids
    assert isinstance(position_ids, Tensor), "checked above"
    return token_ids[:, past_columns:], position_ids[:, past_columns:]


def wanted_columns(logits_to_keep: object, columns: int) -> NDArray[np.int64]:
    """Columns whose logits are requested, by Transformers' definition of `logits_to_keep`.

    Args:
        logits_to_keep: number of last columns (0: all), or a list of columns.
        columns: number of columns of the batch.

    Raises:
        RequestError: columns that differ from row to row.
    """
    if isinstance(logits_to_keep, Tensor):
        if logits_to_keep.ndim != 1:
            raise RequestError(
                "expected logits_to_keep to be a number or one list of columns for all rows, got "
                f"a tensor {list(logits_to_keep.shape)}"
            )
        chosen: NDArray[np.int64] = np.arange(columns)[logits_to_keep.cpu().numpy()]
        return chosen
    if not isinstance(logits_to_keep, int) or logits_to_keep < 0:
        raise RequestError(f"expected logits_to_keep >= 0, got {logits_to_keep!r}")
    return np.arange(columns)[-logits_to_keep:]


def refuse_unread(arguments: Mapping[str, object]) -> None:
    """Refuse arguments that would change the output and are not supported.

    Raises:
        RequestError: names the first such argument.
    """
    if arguments.get("use_cache") is False:
        raise RequestError("use_cache=False and a cache exclude each other; remove one of them")
    if arguments.get("inputs_embeds") is not None:
        raise RequestError("expected input_ids: a QuireCache does not support inputs_embeds")
    for name, value in arguments.items():
        if name in _READ or name in _HARMLESS or value is None or value is False:
            continue
        raise RequestError(
            f"{name}={value!r:.40} is not supported with a QuireCache: prompts are prefilled in "
            "chunks without pads, and attention weights are not stored"
        )
