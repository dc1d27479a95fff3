"""A request: its specification, progress, memory and evictions, in token ids."""

from dataclasses import dataclass, field

from quire.config.sampling_params import SamplingParams
from quire.scheduler.request_parts import (
    RequestEviction,
    RequestMemory,
    RequestProgress,
    RequestSpec,
    RequestState,
    TokenMatcher,
)
from quire.tenancy.fair_queue import Order


@dataclass(frozen=True, slots=True)
class PlannedFork:
    """A group member without KV that will be forked from another member.

    Attributes:
        child, parent: members of one group.
        tokens: number of their common tokens; the parent computes no further before the fork.
    """

    child: "Request"
    parent: "Request"
    tokens: int


@dataclass(slots=True, eq=False)
class RequestGroup:
    """Sequences of one prompt (parallel samples or beams), which share pages.

    A group is queued, admitted and preempted as a whole; see `quire.scheduler.group`.

    Attributes:
        request_id: id of the submitted request.
        atomic: whether all members must decode in the same step, as beams do.
        members: the active sequences, in the order of the choices.
        spare: inactive sequences for later beams; their rows are reserved.
        forks: forks that are planned for members without KV.
        kv_peak_bytes: most bytes of distinct pages that its members referred to.
    """

    request_id: str
    atomic: bool = False
    members: "list[Request]" = field(default_factory=list)
    spare: "list[Request]" = field(default_factory=list)
    forks: list[PlannedFork] = field(default_factory=list)
    kv_peak_bytes: int = 0

    @property
    def num_rows(self) -> int:
        """Maximum number of rows that it holds."""
        return len(self.members) + len(self.spare)


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. Only the scheduler and the engine change it.

    Attributes:
        spec: the specification; frequently used fields are also properties of the request.
        progress: state and token counts.
        memory: location of its KV.
        eviction: its evictions.
        group: its group; None for a single sequence.
        split_from: the group that it was split off; used only for the group's peak bytes.
        matcher: its state in the grammar of its structured outputs; None without one. Not used by
            the scheduler.
    """

    spec: RequestSpec
    progress: RequestProgress = field(default_factory=RequestProgress)
    memory: RequestMemory = field(default_factory=RequestMemory)
    eviction: RequestEviction = field(default_factory=RequestEviction)
    group: RequestGroup | None = None
    split_from: RequestGroup | None = None
    matcher: TokenMatcher | None = None

    # ---- specification -------------------------------------------------------------------------

    @property
    def request_id(self) -> str:
        return self.spec.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.spec.prompt_token_ids

    @property
    def params(self) -> SamplingParams:
        return self.spec.params

    @property
    def priority(self) -> int:
        return self.spec.priority

    @property
    def deadline_s(self) -> float:
        return self.spec.deadline_s

    @property
    def tenant(self) -> str:
        return self.spec.tenant

    @property
    def sampling_seed(self) -> int:
        return self.spec.sampling_seed

    @property
    def order(self) -> Order:
        """Sort key of the queue: priority, deadline, arrival; lowest first."""
        return self.spec.priority, self.spec.deadline_s, self.spec.arrival

    @property
    def is_running(self) -> bool:
        """Whether it is in state RUNNING, so that it holds KV."""
        return self.progress.state is RequestState.RUNNING

    # ---- tokens --------------------------------------------------------------------------------

    @property
    def output_token_ids(self) -> list[int]:
        return self.progress.output_token_ids

    def count_cached(self, first: int, end: int) -> None:
        """Count the tokens from `first` up to `end`, whose KV was found in a prefix cache.

        Tokens of earlier runs do not count again: they were computed or counted then.
        """
        end = min(end, len(self.prompt_token_ids))
        self.progress.cached_tokens += max(0, end - max(first, self.progress.furthest_tokens))

    @property
    def num_tokens(self) -> int:
        """Number of tokens: prompt and output so far, pending tokens included."""
        return len(self.prompt_token_ids) + self.num_output_tokens

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens so far, pending ones included."""
        return len(self.progress.output_token_ids) + self.progress.num_pending

    @property
    def num_uncomputed(self) -> int:
        """Number of tokens whose KV is not computed; 1 in decoding."""
        return self.num_tokens - self.progress.num_computed

    @property
    def scores_prompt(self) -> bool:
        """Whether prompt log-probabilities are requested and its prompt is not computed yet."""
        wanted = self.params.prompt_logprobs is not None
        return wanted and self.progress.num_computed < len(self.prompt_token_ids)

    @property
    def computes_whole_prompt(self) -> bool:
        """Whether every token of its prompt must be computed, so that no cached prefix is used."""
        return self.scores_prompt or self.params.pooling == "mean"

    @property
    def final_tokens(self) -> int:
        """Maximum number of tokens whose KV is computed: all but the last output token."""
        return len(self.prompt_token_ids) + max(0, self.params.max_tokens - 1)

    @property
    def exact_tokens(self) -> int:
        """Number of tokens computed before its first eviction; these it can share."""
        exact = self.eviction.spec.exact_tokens(len(self.prompt_token_ids))
        if self.eviction.pending:
            exact = min(exact, len(self.prompt_token_ids))
        return min(exact, self.eviction.trace[0].num_computed) if self.eviction.trace else exact

    def token_ids(self, start: int, end: int) -> list[int]:
        """Return the known tokens from position `start` up to `end`, without pending ones."""
        prompt = len(self.prompt_token_ids)
        if start >= prompt:
            return self.output_token_ids[start - prompt : end - prompt]
        ids = self.prompt_token_ids[start:end]
        return ids + self.output_token_ids[: end - prompt] if end > prompt else ids
