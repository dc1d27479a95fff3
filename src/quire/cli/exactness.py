"""Compares outputs with Transformers: equal tokens, or a tie between the two top logits.

Two programs that sum the same numbers in a different order may select different tokens if two
logits are equal up to rounding. Such a position is a tie; the comparison of that output ends there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.errors import InvariantError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quire.sampling.outputs import RequestOutput

TIE_LOGITS = 1e-4
"""Largest difference of two float32 logits that counts as a tie: rounding can swap them."""


@dataclass(frozen=True, slots=True)
class Exactness:
    """Result of the comparison."""

    checked: int
    equal: int
    ties: int  # equal up to a tie

    @property
    def passed(self) -> bool:
        return self.equal + self.ties == self.checked


def compare_with_generate(model_path: str, outputs: "Sequence[RequestOutput]") -> Exactness:
    """Compare with `generate` of Transformers: greedy, float32, on the CPU, prompt by prompt."""
    import torch

    from quire.models.checkpoint import open_checkpoint
    from quire.models.tokenizer import undecodable_ids

    checkpoint = open_checkpoint(model_path)
    model = checkpoint.read_model(torch.float32)  # in eval mode
    unsampled = undecodable_ids(checkpoint.load_tokenizer(), model.config.vocab_size)
    verdicts = [_verdict(model, output, unsampled) for output in outputs]
    return Exactness(
        checked=len(verdicts), equal=verdicts.count("equal"), ties=verdicts.count("tie")
    )


def _verdict(model: "PreTrainedModel", output: "RequestOutput", unsampled: list[int]) -> str:
    import torch

    prompt = torch.tensor([output.prompt_token_ids])
    with torch.inference_mode():
        whole = model.generate(  # type: ignore[operator]
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=len(output.token_ids),
            do_sample=False,
            suppress_tokens=unsampled or None,
        )
    theirs = whole[0, prompt.shape[1] :].tolist()
    ours = list(output.token_ids)
    if theirs == ours:
        return "equal"
    index = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if index is None:
        raise InvariantError(f"one output is a prefix of the other: {ours}, {theirs}")
    with torch.inference_mode():
        logits = model(whole[:, : prompt.shape[1] + index]).logits[0, -1]
    gap = float(logits[theirs[index]] - logits[ours[index]])
    return "tie" if abs(gap) <= TIE_LOGITS else "different"
