"""Quality of greedy outputs by regret, for models whose outputs cannot be compared for equality.

With random weights many logits are nearly equal, and bfloat16 rounding decides between them: two
correct programs diverge after a few tokens. The same weights in float32 therefore judge each output
separately. The regret of a token is the best logit minus the token's logit.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel


class RegretJudge:
    """Judges outputs with plain Transformers in float32.

    Args:
        model: float32 model with the weights that generated the outputs.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def mean_regret(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
    ) -> float:
        """Mean over all tokens of the best logit minus the logit of the generated token.

        Args:
            prompts: token ids of each prompt; each non-empty.
            answers: output of each prompt; outputs beyond the number of prompts are ignored.
        """
        regrets = [
            self._regrets(prompt, answer) for prompt, answer in zip(prompts, answers, strict=False)
        ]
        return float(torch.cat(regrets).mean())

    @torch.inference_mode()
    def _regrets(self, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
        ids = torch.tensor([[*prompt, *answer]])
        # the logits of a position predict the token after it
        output = self._model(ids[:, :-1], use_cache=False, logits_to_keep=len(answer))
        logits: Tensor = output.logits[0]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        return logits.max(dim=1).values - chosen
