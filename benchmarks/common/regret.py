"""How good greedy answers are where exact equality means nothing.

With random weights many logits are nearly equal, and bfloat16 arithmetic decides between them: two
right programs part after a few tokens. So each answer is judged on its own: the same weights in
float32 read it, and the regret of a token is how far its logit lies below the best one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel


class RegretJudge:
    """Reads answers with plain Transformers in float32.

    Args:
        model: float32, of the weights that answered.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def mean_regret(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
    ) -> float:
        """Mean over all tokens of best logit minus the logit of the token that was chosen.

        Args:
            prompts: token ids; each non-empty.
            answers: one for each prompt; only as many as there are prompts are read.
        """
        regrets = [
            self._regrets(prompt, answer) for prompt, answer in zip(prompts, answers, strict=False)
        ]
        return float(torch.cat(regrets).mean())

    @torch.inference_mode()
    def _regrets(self, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
        ids = torch.tensor([[*prompt, *answer]])
        # the logits of a position choose the token after it
        output = self._model(ids[:, :-1], use_cache=False, logits_to_keep=len(answer))
        logits: Tensor = output.logits[0]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        return logits.max(dim=1).values - chosen
