"""Masks of a slab: by logical positions, booleans, no query without a slot."""

import pytest
import torch
from torch.nn import functional as F

from quire.errors import UnsupportedModel
from quire.hf.dynamic.slab_cache import MaskRule, check_implementation, visible
from support import zoo

_ = -1


def seen(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows)


def test_a_query_sees_its_rows_tokens_up_to_itself_and_no_pads():
    positions = seen([_, _, 0, 1, 2], [0, 1, 2, 3, 4])

    assert visible(positions, 1, None).int().tolist() == [[[[0, 0, 1, 1, 1]]], [[[1, 1, 1, 1, 1]]]]


def test_several_new_columns_are_causal():
    positions = seen([0, _, _, 1], [_, 0, 1, 2])

    assert visible(positions, 3, None).int().tolist() == [
        [[[0, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 1]]],
        [[[0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]],
    ]


def test_a_window_counts_tokens_and_not_columns():
    """Row 0 has a hole of three columns: its last query still sees two tokens before itself."""
    positions = seen([0, 1, 2, _, _, _, 3], [0, 1, 2, 3, 4, 5, 6])

    assert visible(positions, 1, 3).int().tolist() == [
        [[[0, 1, 1, 0, 0, 0, 1]]],
        [[[0, 0, 0, 0, 1, 1, 1]]],
    ]


def test_empty_rows_and_pads_keep_one_column():
    positions = seen([_, _, _], [0, 1, 2])

    found = visible(positions, 2, None)

    assert found.any(dim=-1).all()
    assert found[0].int().tolist() == [[[0, 1, 0], [0, 0, 1]]]


def test_why_masked_slots_hold_zeros_and_not_infinity():
    """BATON fills them with -inf: a weight of 0 times that is NaN, whatever the mask says."""
    query, key, value = torch.ones(1, 1, 1, 4), torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4)
    mask = torch.tensor([[[[False, True, True]]]])
    hidden = torch.where(mask, 0.0, torch.finfo(torch.float32).min)

    for filler, clean in ((0.0, True), (float("-inf"), False), (float("nan"), False)):
        key[:, :, 0], value[:, :, 0] = filler, filler
        weights = torch.softmax(query @ key.transpose(-1, -2) + hidden, dim=-1)

        assert bool((weights @ value).isfinite().all()) is clean
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        assert bool(out.isfinite().all()) is clean


def test_models_whose_layers_differ_get_a_mask_for_each_kind():
    positions = seen([0, 1, 2, 3])
    masks = MaskRule.of(zoo.build("gemma3").config).make(
        positions, 1, implementation="sdpa", dtype=torch.float32
    )

    assert set(masks) == {"full_attention", "sliding_attention"}
    assert masks["full_attention"].dtype == torch.bool
    one = MaskRule.of(zoo.build("mistral").config).make(
        positions, 1, implementation="eager", dtype=torch.float32
    )
    assert one.tolist() == [[[[0.0] * 4]]]


def test_other_layers_and_other_attention_are_refused_by_name():
    with pytest.raises(UnsupportedModel, match=r"expected attn_implementation sdpa or eager"):
        check_implementation("flex_attention")
    config = zoo.build("qwen2").config
    config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(UnsupportedModel, match=r"with layers of linear_attention"):
        MaskRule.of(config)
