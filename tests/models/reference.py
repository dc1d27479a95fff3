"""What Transformers computes: the prompt in one call, then single tokens, with its own cache."""

import inspect
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

SHIFTED_BY = 7  # positions of output tokens, in the negative control


@dataclass(frozen=True)
class Expected:
    """The greedy output of Transformers.

    Attributes:
        prompt, tokens: token ids.
        logits: [len(tokens), vocab], float32.
    """

    prompt: list[int]
    tokens: list[int]
    logits: Tensor


@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    shifted_by: int = 0,
    given: Sequence[int] = (),
) -> Expected:
    """Decode greedily.

    Args:
        model: with Transformers' own attention.
        prompt: token ids.
        num_tokens: length of the output.
        shifted_by: added to the positions of output tokens: wrong unless 0.
        given: the first output tokens, in place of the most likely ones.
    """
    tokens, positions, rows = list(prompt), list(range(len(prompt))), []
    out = _forward(model, tokens, positions)
    while len(rows) < num_tokens:
        rows.append(out.logits[0, -1].float())
        found = given[len(rows) - 1] if len(rows) <= len(given) else int(rows[-1].argmax())
        tokens.append(found)
        positions.append(len(tokens) - 1 + shifted_by)
        cache = getattr(out, "cache", None)  # OpenAI's GPT has none
        begin = 0 if cache is None else -1
        out = _forward(model, tokens[begin:], positions[begin:], cache)
    return Expected(list(prompt), tokens[len(prompt) :], torch.stack(rows))


@torch.inference_mode()
def scan(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Logits of given tokens after a prompt, from one call without a cache: [tokens, vocab]."""
    ids = torch.tensor([[*prompt, *tokens[:-1]]])
    logits: Tensor = model(ids, use_cache=False, return_dict=True).logits
    return logits[0, len(prompt) - 1 :].float()


@torch.inference_mode()
def beam_scores(
    model: PreTrainedModel, prompt: Sequence[int], width: int, num_tokens: int
) -> Tensor:
    """Scores of a beam search without a cache, best first: mean log-probabilities [width]."""
    tokens, scores = torch.tensor([list(prompt)]), torch.zeros(1)
    for _ in range(num_tokens):
        logits = model(tokens, use_cache=False, return_dict=True).logits[:, -1].float()
        sums = scores[:, None] + logits.log_softmax(dim=-1)
        scores, best = sums.flatten().topk(width)
        beam, token = best // sums.shape[1], best % sums.shape[1]
        tokens = torch.cat([tokens[beam], token[:, None]], dim=1)
    return scores / num_tokens


def _forward(model: PreTrainedModel, tokens: Sequence[int], positions: Sequence[int], cache=None):
    takes = inspect.signature(model.forward).parameters
    at = {"position_ids": torch.tensor([list(positions)])} if "position_ids" in takes else {}
    held = {} if cache is None else {"cache": cache}
    return model(torch.tensor([tokens]), use_cache=True, return_dict=True, **at, **held)


def with_other_order(prompt: Sequence[int]) -> list[int]:
    """The prompt with its first half reversed: the control of types without positions."""
    half = len(prompt) // 2
    return [*reversed(prompt[:half]), *prompt[half:]]


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of logits [rows, vocab], relative to the largest of its row."""
    if ours.shape != theirs.shape:
        return float("inf")
    relative = (ours - theirs).abs().amax(dim=-1) / theirs.abs().amax(dim=-1)
    return float(relative.nan_to_num(float("inf")).max())


def random_tokens(count: int, vocab_size: int, seed: int) -> list[int]:
    """Token ids without the first two, which begin and end texts."""
    rng = random.Random(seed)
    return [rng.randrange(2, vocab_size) for _ in range(count)]
