"""Drives a decoder over several sequences at once, in flat batches cut into chunks."""

from collections.abc import Iterator, Sequence
from itertools import chain, repeat

import torch
from torch import Tensor, nn

from quire.models.base import AttentionCall, Decoder
from quire.models.verify import DenseAttention


def sequences(*lengths: int, vocab_size: int, seed: int = 1) -> list[Tensor]:
    """Random token ids, one tensor for each length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator) for length in lengths]


def plain_logits(model: nn.Module, *prompts: Tensor) -> list[Tensor]:
    """Transformers' own logits of every position of each prompt, in float32."""
    with torch.inference_mode():
        return [model(prompt[None]).logits[0].float() for prompt in prompts]


def distance(found: Tensor, expected: Tensor) -> float:
    """Length of the difference, as a fraction of the expected length."""
    return float((found.float() - expected).norm() / expected.norm())


class Recorder:
    """Dense attention of one sequence that records, by layer, what a decoder passes to it.

    Inputs of a layer must be noted before it attends.
    """

    def __init__(self, positions: Sequence[int], *, wants: bool = True) -> None:
        self._batch = DenseAttention().batch([0] * len(positions), positions)
        self.wants_inputs = self.wants_residual_similarity = wants
        self.calls: dict[int, AttentionCall] = {}
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}
        self.inputs: dict[int, Tensor] = {}
        self.cosines: dict[int, Tensor] = {}

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.calls[call.layer], self.stored[call.layer] = call, (key.clone(), value.clone())
        return self._batch.attend(call, query, key, value)

    def note_input(self, layer: int, inputs: Tensor) -> None:
        assert layer not in self.stored
        self.inputs[layer] = inputs.clone()

    def note_residual_similarity(self, layer: int, cosines: Tensor) -> None:
        self.cosines[layer] = cosines


def flat_logits(
    decoder: Decoder, prompts: list[Tensor], *, chunk_tokens: Sequence[int], rope_variant: int = 0
) -> list[Tensor]:
    """Logits of every position of every prompt, [tokens, vocab] each.

    Each forward takes the next chunk of every prompt that has some left, so the batches are ragged;
    the last of `chunk_tokens` repeats. Sampled rows are requested in reverse: their order matters.
    """
    dense = DenseAttention()
    rows: list[dict[int, Tensor]] = [{} for _ in prompts]
    for begin, end in _chunks(max(map(len, prompts)), chunk_tokens):
        places = [
            (number, position)
            for number, prompt in enumerate(prompts)
            for position in range(begin, min(end, len(prompt)))
        ]
        sampled = list(reversed(range(len(places))))
        logits = decoder.forward(
            torch.stack([prompts[number][position] for number, position in places]),
            torch.tensor([position for _, position in places]),
            torch.tensor(sampled),
            dense.batch(*zip(*places, strict=True), decoder.spec),
            rope_variant=rope_variant,
        )
        for row, values in zip(sampled, logits, strict=True):
            number, position = places[row]
            rows[number][position] = values
    return [torch.stack([row[position] for position in sorted(row)]) for row in rows]


def _chunks(num_tokens: int, chunk_tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
    begin = 0
    for size in chain(chunk_tokens, repeat(chunk_tokens[-1])):
        if begin >= num_tokens:
            return
        yield begin, begin + size
        begin += size
