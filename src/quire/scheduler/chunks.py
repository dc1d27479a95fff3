"""How many tokens of a prompt a step reads."""

from quire.kv.memory import KVMemory
from quire.scheduler.group import readable_tokens
from quire.scheduler.lane_slots import evicting_table, in_blocks, room_tokens
from quire.scheduler.request import Request
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.step_plan import StepPlan

SCORED_TOKENS = 256  # bounds a step's logits of prompts whose every token is scored


class ChunkSizes:
    """Sizes of prefill chunks.

    Args:
        config: step and chunk sizes.
        memory: the pool, whose lanes may have caps.
    """

    def __init__(self, config: ScheduleConfig, memory: KVMemory) -> None:
        self._config, self._table = config, evicting_table(memory)

    def is_atomic(self, request: Request) -> bool:
        """Whether the next chunk is read whole or not at all, after an eviction."""
        return self._table is not None and in_blocks(request)

    def tokens(self, plan: StepPlan, request: Request, budget: int) -> int:
        """Tokens of the next chunk within the budget.

        Where lanes have a cap: up to it while there is room, then one eviction, then `every` tokens
        (or the rest) at once or none, so that who else is in the batch changes nothing.
        """
        most = min(readable_tokens(request), room_tokens(request, self._table))
        if self.is_atomic(request):
            return most if most <= budget else 0
        budget = min(budget, self._config.longest_chunk)
        if request.params.prompt_logprobs is not None:
            budget = min(budget, max(0, SCORED_TOKENS - plan.num_scored))
        return min(most, budget, _to_snapshot(request))


def _to_snapshot(request: Request) -> int:
    """Tokens up to where what is remembered of a prompt is kept for others; 1 at least."""
    ahead = [end - request.num_computed for end in request.snapshot_ends]
    return min((tokens for tokens in ahead if tokens > 0), default=request.num_uncomputed)
