"""Attention masks of a slab: boolean, by logical positions, at least one slot per query."""

import pytest
import torch

from quire.errors import UnsupportedModel
from quire.hf.dynamic.slab_model import MaskRule, check_implementation, visible
from support import zoo

_, FLOAT = -1, torch.float32


VISIBLE = {
    "up to itself without padding": (
        [[_, _, 0, 1, 2], [0, 1, 2, 3, 4]], 1, None, [[[0, 0, 1, 1, 1]], [[1, 1, 1, 1, 1]]],
    ),
    "several new columns are causal": (
        [[0, _, _, 1], [_, 0, 1, 2]], 3, None,
        [[[0, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 1]], [[0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]],
    ),
    "a window counts tokens, not the three columns of a gap": (
        [[0, 1, 2, _, _, _, 3], [0, 1, 2, 3, 4, 5, 6]], 1, 3,
        [[[0, 1, 1, 0, 0, 0, 1]], [[0, 0, 0, 0, 1, 1, 1]]],
    ),
    "empty rows and padding attend to one column": (
        [[_, _, _], [0, 1, 2]], 2, None, [[[0, 1, 0], [0, 0, 1]], [[1, 1, 0], [1, 1, 1]]],
    ),
}  # fmt: skip


def test_a_query_attends_to_its_row():
    for case, (positions, columns, window, expected) in VISIBLE.items():
        found = visible(torch.tensor(positions), columns, window)
        assert found[:, 0].int().tolist() == expected, case


def test_model_with_mixed_layers_gets_one_mask_per_layer_type():
    positions = torch.tensor([[0, 1, 2, 3]])
    masks, mistral_mask = (
        MaskRule.of(zoo.build(name).config).make(positions, 1, implementation=impl, dtype=FLOAT)
        for name, impl in (("gemma3", "sdpa"), ("mistral", "eager"))
    )

    assert set(masks) == {"full_attention", "sliding_attention"}
    assert masks["full_attention"].dtype == torch.bool
    assert mistral_mask.tolist() == [[[[0.0] * 4]]]


def test_unsupported_layers_and_attention_are_refused_by_name():
    with pytest.raises(UnsupportedModel, match=r"expected attn_implementation sdpa or eager"):
        check_implementation("flex_attention")
    config = zoo.build("qwen2").config
    config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(UnsupportedModel, match=r"with layers of linear_attention"):
        MaskRule.of(config)
