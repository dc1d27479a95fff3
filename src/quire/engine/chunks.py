"""How many tokens of a prompt a step reads."""

from quire.engine.group import readable_tokens
from quire.engine.request import Request
from quire.engine.schedule_config import ScheduleConfig
from quire.engine.step_plan import StepPlan
from quire.spec.eviction import EvictionSpec

SCORED_TOKENS = 256  # bounds a step's logits of prompts whose every token is scored


class ChunkSizes:
    """Sizes of prefill chunks.

    Args:
        config: step and chunk sizes.
        eviction: how many tokens a lane may hold, and how many leave at a time.
    """

    def __init__(self, config: ScheduleConfig, eviction: EvictionSpec) -> None:
        self._config, self._eviction = config, eviction

    @property
    def longest(self) -> int:
        """Tokens one prompt can add in a step."""
        # over its cap a prompt is read `every` tokens at once, however short chunks are else
        whole_chunk = 0 if self._eviction.cap is None else self._eviction.every
        return max(self._config.longest_chunk, whole_chunk)

    def is_atomic(self, request: Request) -> bool:
        """Whether the next chunk is read whole or not at all, after an eviction."""
        cap = self._eviction.cap
        return cap is not None and request.num_computed >= cap

    def tokens(self, plan: StepPlan, request: Request, budget: int) -> int:
        """Tokens of the next chunk within the budget.

        Where lanes have a cap: up to it while there is room, then one eviction, then `every` tokens
        (or the rest) at once or none, so that who else is in the batch changes nothing.
        """
        if self.is_atomic(request):
            tokens = min(readable_tokens(request), self._eviction.every)
            return tokens if tokens <= budget else 0
        budget = min(budget, self._config.chunk_tokens)
        if request.params.prompt_logprobs is not None:
            budget = min(budget, max(0, SCORED_TOKENS - plan.num_scored))
        if self._eviction.cap is not None:
            budget = min(budget, self._eviction.cap - request.num_computed)
        return min(readable_tokens(request), budget)
