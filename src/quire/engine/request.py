"""A request: what was asked, what has been answered, where it stands. Ids only, no text."""

import enum
from dataclasses import dataclass, field

from quire.engine.sampling_params import SamplingParams


class RequestState(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to be continued. Changed by the scheduler and the engine only.

    Attributes:
        request_id: unique among the engine's requests.
        prompt_token_ids: at least one.
        params: resolved sampling options.
        sampling_seed: what its draws are made from; `params.seed` or drawn once at submit.
        priority: lower goes first.
        arrival: order of submission.
        rope_regime: which rotary frequencies it uses, for all its life.
        tenant: on whose account it runs.
        cache_salt: what its caller adds to the identity of its cached prefixes.
        group: the sequences it was forked with; None for one alone.
        output_token_ids: the answer so far.
        row: its row of the KV memory while it runs.
        num_computed: tokens whose KV has been computed in this run (logical).
        cached_tokens: tokens of its prompt whose KV was there when it first entered.
        exact: whether no token of its KV has been evicted in this run.
        swapped: its KV outside the arena, while it waits with it.
        preemptions: times it was thrown out and begun again.
        kv_peak_bytes: most KV bytes it referred to, over all its runs.
        arrival_s, first_token_s, finish_s: clock readings, seconds.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    sampling_seed: int = 0
    priority: int = 0
    arrival: int = 0
    rope_regime: int = 0
    tenant: str = "default"
    cache_salt: str = ""
    group: object | None = None
    output_token_ids: list[int] = field(default_factory=list)
    state: RequestState = RequestState.WAITING
    row: int = -1
    num_computed: int = 0
    cached_tokens: int = 0
    exact: bool = True
    swapped: object | None = None
    preemptions: int = 0
    kv_peak_bytes: int = 0
    arrival_s: float = 0.0
    first_token_s: float = 0.0
    finish_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and answer so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose KV is missing; 1 while decoding."""
        return self.num_tokens - self.num_computed

    @property
    def scores_prompt(self) -> bool:
        """Whether it wants its prompt scored and has not read all of it."""
        wanted = self.params.prompt_logprobs is not None
        return wanted and self.num_computed < len(self.prompt_token_ids)

    @property
    def final_tokens(self) -> int:
        """Tokens whose KV it can come to need: the last one generated is never processed."""
        return len(self.prompt_token_ids) + max(0, self.params.max_tokens - 1)

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: priority, then arrival."""
        return self.priority, self.arrival

    def token_ids(self, start: int, end: int) -> list[int]:
        """Known tokens by logical position."""
        prompt = len(self.prompt_token_ids)
        if start >= prompt:
            return self.output_token_ids[start - prompt : end - prompt]
        ids = self.prompt_token_ids[start:end]
        return ids + self.output_token_ids[: end - prompt] if end > prompt else ids
