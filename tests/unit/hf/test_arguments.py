"""New tokens of a padded batch; masks and positions that are refused."""

import pytest
import torch

from quire.errors import RequestError
from quire.hf.cache_rows import check_positions, count_new_tokens, wanted_columns


def test_left_padding_is_not_counted() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]])

    assert count_new_tokens(mask, 4, 0, [0, 0, 0]).tolist() == [2, 4, 0]


def test_all_columns_are_tokens_without_a_mask() -> None:
    assert count_new_tokens(None, 3, 7, [7, 5]).tolist() == [3, 3]


def test_later_forwards_pass_the_mask_of_all_columns() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])

    assert count_new_tokens(mask, 1, 4, [2, 4]).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("mask", "past_columns", "lengths"),
    [
        ([[1, 1, 0]], 0, [0]),  # on the right
        ([[0, 1, 0, 1]], 0, [0]),  # between tokens
        ([[1, 1, 0, 1]], 2, [2]),  # between an earlier forward's tokens and the new ones
        ([[1, 1, 0]], 2, [2]),  # no new token in a row with cached tokens
    ],
)
def test_padding_after_a_token_is_refused(mask, past_columns, lengths) -> None:
    tensor = torch.tensor(mask)
    columns = tensor.shape[1] - past_columns

    with pytest.raises(RequestError, match="padding_side = 'left'"):
        count_new_tokens(tensor, columns, past_columns, lengths)


def test_masking_a_cached_token_is_refused() -> None:
    with pytest.raises(RequestError, match=r"1\] previous tokens, but \[2\] are cached"):
        count_new_tokens(torch.tensor([[0, 1, 1]]), 1, 2, [2])


@pytest.mark.parametrize("mask", [torch.ones(2, 2), torch.ones(1, 1, 3, 3), "causal"])
def test_mask_of_wrong_shape_is_refused(mask) -> None:
    with pytest.raises(RequestError, match=r"expected an attention_mask \[1, 3\]"):
        count_new_tokens(mask, 3, 0, [0])


def test_positions_of_padding_are_ignored() -> None:
    counts = count_new_tokens(torch.tensor([[0, 0, 1], [1, 1, 1]]), 3, 0, [0, 0])

    check_positions(torch.tensor([[1, 1, 0], [0, 1, 2]]), counts, [0, 0])


def test_positions_of_one_row_apply_to_all_rows() -> None:
    counts = count_new_tokens(None, 2, 3, [3, 3])

    check_positions(torch.tensor([[3, 4]]), counts, [3, 3])


@pytest.mark.parametrize("positions", [[[0, 1, 2], [1, 2, 3]], [[0, 1, 2], [0, 2, 1]]])
def test_positions_that_do_not_continue_the_row_are_refused(positions) -> None:
    counts = count_new_tokens(None, 3, 0, [0, 0])

    with pytest.raises(RequestError, match="consecutive position_ids from 0 in row 1"):
        check_positions(torch.tensor(positions), counts, [0, 0])


@pytest.mark.parametrize(
    ("keep", "columns"),
    [(0, [0, 1, 2, 3]), (1, [3]), (9, [0, 1, 2, 3]), (torch.tensor([0, -1]), [0, 3])],
)
def test_logits_to_keep_has_the_meaning_of_transformers(keep, columns) -> None:
    assert wanted_columns(keep, 4).tolist() == columns


@pytest.mark.parametrize("keep", [torch.ones(2, 4, dtype=torch.bool), -1, None])
def test_logits_to_keep_per_row_is_refused(keep) -> None:
    with pytest.raises(RequestError, match="logits_to_keep"):
        wanted_columns(keep, 4)
