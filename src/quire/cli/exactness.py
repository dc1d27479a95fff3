"""Compares answers with plain Transformers: the same tokens, or a tie between two likeliest ones.

Two programs that add the same numbers in another order may choose differently where two logits are
equal up to rounding. Such a place is a tie, and the comparison of that answer ends there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import InvariantError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quire.sampling.outputs import RequestOutput

TIE_LOGITS = 1e-4
"""Two logits nearer than this may change places by rounding alone, in float32."""


@dataclass(frozen=True, slots=True)
class Exactness:
    """How answers compare.

    Attributes:
        checked: answers compared.
        equal: token for token the same.
        ties: different only from a tie on.
    """

    checked: int
    equal: int
    ties: int

    @property
    def passed(self) -> bool:
        """Whether nothing but ties differs."""
        return self.equal + self.ties == self.checked


def compare_with_generate(model_path: str, answers: "Sequence[RequestOutput]") -> Exactness:
    """Generate greedily with Transformers in float32 on the CPU, one prompt at a time.

    Args:
        model_path: what the engine was given as its model.
        answers: greedy ones, computed in float32.
    """
    import torch
    from transformers import AutoConfig

    from quire.models.source import find_model
    from quire.models.stored import read_headers
    from quire.models.weights import read_model

    folder, _ = find_model(model_path)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    model = read_model(folder, config, read_headers(folder), dtype=torch.float32)  # in eval mode
    verdicts = [_verdict(model, folder, answer) for answer in answers]
    return Exactness(
        checked=len(verdicts), equal=verdicts.count("equal"), ties=verdicts.count("tie")
    )


def _verdict(model: "PreTrainedModel", folder: Path, answer: "RequestOutput") -> str:
    import torch

    prompt = torch.tensor([answer.prompt_token_ids])
    with torch.inference_mode():
        whole = model.generate(  # type: ignore[operator]
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=len(answer.token_ids),
            do_sample=False,
        )
    theirs = whole[0, prompt.shape[1] :].tolist()
    ours = list(answer.token_ids)
    if theirs == ours:
        return "equal"
    place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if place is None:
        raise InvariantError(
            f"{folder}: one answer is the beginning of the other: {ours}, {theirs}"
        )
    with torch.inference_mode():
        logits = model(whole[:, : prompt.shape[1] + place]).logits[0, -1]
    gap = float(logits[theirs[place]] - logits[ours[place]])
    return "tie" if abs(gap) <= TIE_LOGITS else "different"
