"""Attention masks of a slab: boolean, by logical positions, at least one slot per query."""

import pytest
import torch

from quire.errors import UnsupportedModel
from quire.hf.dynamic.slab_model import MaskRule, check_implementation, visible
from support import zoo

_ = -1


def positions_of(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows)


def test_query_attends_to_its_row_up_to_itself_without_padding():
    positions = positions_of([_, _, 0, 1, 2], [0, 1, 2, 3, 4])

    assert visible(positions, 1, None).int().tolist() == [[[[0, 0, 1, 1, 1]]], [[[1, 1, 1, 1, 1]]]]


def test_several_new_columns_are_causal():
    positions = positions_of([0, _, _, 1], [_, 0, 1, 2])

    assert visible(positions, 3, None).int().tolist() == [
        [[[0, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 1]]],
        [[[0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]],
    ]


def test_sliding_window_counts_tokens_not_columns():
    """Row 0 has a gap of three columns: its last query still attends to two earlier tokens."""
    positions = positions_of([0, 1, 2, _, _, _, 3], [0, 1, 2, 3, 4, 5, 6])

    assert visible(positions, 1, 3).int().tolist() == [
        [[[0, 1, 1, 0, 0, 0, 1]]],
        [[[0, 0, 0, 0, 1, 1, 1]]],
    ]


def test_empty_rows_and_padding_attend_to_one_column():
    positions = positions_of([_, _, _], [0, 1, 2])

    found = visible(positions, 2, None)

    assert found.any(dim=-1).all()
    assert found[0].int().tolist() == [[[0, 1, 0], [0, 0, 1]]]


def test_model_with_mixed_layers_gets_one_mask_per_layer_type():
    positions = positions_of([0, 1, 2, 3])
    masks = MaskRule.of(zoo.build("gemma3").config).make(
        positions, 1, implementation="sdpa", dtype=torch.float32
    )

    assert set(masks) == {"full_attention", "sliding_attention"}
    assert masks["full_attention"].dtype == torch.bool
    mistral_mask = MaskRule.of(zoo.build("mistral").config).make(
        positions, 1, implementation="eager", dtype=torch.float32
    )
    assert mistral_mask.tolist() == [[[[0.0] * 4]]]


def test_unsupported_layers_and_attention_are_refused_by_name():
    with pytest.raises(UnsupportedModel, match=r"expected attn_implementation sdpa or eager"):
        check_implementation("flex_attention")
    config = zoo.build("qwen2").config
    config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(UnsupportedModel, match=r"with layers of linear_attention"):
        MaskRule.of(config)
