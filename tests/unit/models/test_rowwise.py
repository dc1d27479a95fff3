"""Activations that treat rows alike, and the check that finds a model in which places matter."""

import pytest
import torch
from torch import nn

from quire.models.adapter import TransformersDecoder
from quire.models.rowwise import (
    ONE_THREAD_NUMBERS,
    RowwiseActivation,
    make_activations_rowwise,
    rows_depend,
)
from support import zoo


class Watched(nn.Module):
    """An activation that says how large its arguments were."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def forward(self, numbers):
        self.shapes.append(tuple(numbers.shape))
        return numbers.exp()


@pytest.mark.parametrize(
    ("width", "together"), [(48, 1), (64, 256), (2816, 5), (ONE_THREAD_NUMBERS, 1), (50_000, 1)]
)
def test_so_many_whole_rows_go_together_as_one_thread_computes(width, together):
    watched, numbers = Watched(), torch.randn(1, 24, width)

    found = RowwiseActivation(watched)(numbers)

    assert found.shape == numbers.shape
    assert torch.allclose(found, numbers.exp())
    assert watched.shapes[0] == (min(24, together), width)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [48, 700, 2816])
def test_a_row_is_the_same_in_every_place_with_any_number_of_threads(width, dtype):
    numbers = (3 * torch.randn(1, 32, width)).to(dtype)
    before = torch.get_num_threads()
    for activation in (nn.SiLU(), nn.GELU(approximate="tanh")):
        rowwise = RowwiseActivation(activation)
        try:
            for threads in (1, 3):
                torch.set_num_threads(threads)
                expected = rowwise(numbers)
                for _ in range(3):
                    order = torch.randperm(32)
                    assert torch.equal(rowwise(numbers[:, order]), expected[:, order])
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "phi3", "opt", "gpt_neox"])
def test_every_activation_of_a_model_is_wrapped_once(architecture):
    model = zoo.build(architecture)
    make_activations_rowwise(model)
    make_activations_rowwise(model)

    wrapped = [module for module in model.modules() if isinstance(module, RowwiseActivation)]
    assert wrapped
    assert not any(isinstance(module.activation, RowwiseActivation) for module in wrapped)


def test_a_model_whose_rows_are_alone_passes():
    decoder = TransformersDecoder(zoo.build("llama"))

    assert decoder.prepare_fixed_shapes(32) is None


def test_a_model_in_which_places_matter_is_found():
    model = zoo.build("llama")
    decoder = TransformersDecoder(model)

    def shifted(module, arguments, out):
        return out + 1e-3 * torch.arange(out.shape[1])[:, None]  # by the place in the forward

    model.model.norm.register_forward_hook(shifted)

    assert "the logits of a token depend on its index among the 32 rows" in rows_depend(decoder, 32)
