"""Row-wise activations, and the check for models whose outputs depend on the row index."""

import pytest
import torch
from torch import nn

from quire.models.adapter import (
    ONE_THREAD_NUMBERS,
    RowwiseActivation,
    TransformersDecoder,
    make_activations_rowwise,
    rows_depend,
)
from support import zoo


class RecordingActivation(nn.Module):
    """An activation that records the shapes of its inputs."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def forward(self, values):
        self.shapes.append(tuple(values.shape))
        return values.exp()


@pytest.mark.parametrize(
    ("width", "chunk_rows"), [(48, 1), (64, 256), (2816, 5), (ONE_THREAD_NUMBERS, 1), (50_000, 1)]
)
def test_rows_are_chunked_to_the_size_one_thread_computes(width, chunk_rows):
    recording, values = RecordingActivation(), torch.randn(1, 24, width)

    found = RowwiseActivation(recording)(values)

    assert found.shape == values.shape
    assert torch.allclose(found, values.exp())
    assert recording.shapes[0] == (min(24, chunk_rows), width)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [48, 700, 2816])
def test_row_is_bitwise_equal_at_any_index_and_thread_count(width, dtype):
    values = (3 * torch.randn(1, 32, width)).to(dtype)
    before = torch.get_num_threads()
    for activation in (nn.SiLU(), nn.GELU(approximate="tanh")):
        rowwise = RowwiseActivation(activation)
        try:
            for threads in (1, 3):
                torch.set_num_threads(threads)
                expected = rowwise(values)
                for _ in range(3):
                    order = torch.randperm(32)
                    assert torch.equal(rowwise(values[:, order]), expected[:, order])
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


def test_batch_invariant_model_passes():
    decoder = TransformersDecoder(zoo.build("llama"))

    assert decoder.prepare_fixed_shapes(32) is None


def test_model_that_depends_on_the_row_index_is_detected():
    model = zoo.build("llama")
    decoder = TransformersDecoder(model)

    def shifted(module, arguments, out):
        return out + 1e-3 * torch.arange(out.shape[1])[:, None]  # depends on the row index

    model.model.norm.register_forward_hook(shifted)

    assert "the logits of a token depend on its index among the 32 rows" in rows_depend(decoder, 32)
