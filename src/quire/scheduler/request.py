"""A request: what was asked, what has been answered, where it stands. Ids only, no text."""

from dataclasses import dataclass, field

from quire.config.sampling_params import SamplingParams
from quire.scheduler.request_parts import (
    RequestEviction,
    RequestMemory,
    RequestProgress,
    RequestSpec,
    RequestState,
)
from quire.tenancy.fair_queue import Order


@dataclass(frozen=True, slots=True)
class PlannedFork:
    """A member without KV that will begin as a copy of another one.

    Attributes:
        child, parent: of one group.
        tokens: tokens both have in common; the parent stops there until it has been copied.
    """

    child: "Request"
    parent: "Request"
    tokens: int


@dataclass(slots=True, eq=False)
class RequestGroup:
    """Sequences that answer one prompt and share what they have in common.

    It waits, enters and gives way as one; `quire.scheduler.group` has the rules.

    Attributes:
        request_id: what the whole was submitted as.
        atomic: whether its members decode in the same step or not at all, as beams must.
        members: the sequences that go on, in the order of their choices.
        spare: sequences that do not, or not yet, and have a place kept: beams to come.
        forks: members that have no KV yet while others are being read.
        kv_peak_bytes: most bytes of distinct pages its members referred to.
    """

    request_id: str
    atomic: bool = False
    members: "list[Request]" = field(default_factory=list)
    spare: "list[Request]" = field(default_factory=list)
    forks: list[PlannedFork] = field(default_factory=list)
    kv_peak_bytes: int = 0

    @property
    def num_rows(self) -> int:
        """Rows it holds at most."""
        return len(self.members) + len(self.spare)


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to be continued. Changed by the scheduler and the engine only.

    Attributes:
        spec: what was requested. Its fields that others ask for often can be read from the request.
        progress: how far it has come.
        memory: where its KV is.
        eviction: which tokens are evicted.
        group: the sequences it was forked with; None for one alone.
        split_from: the sequences that answer the same prompt, where each runs alone; only the most
            bytes of all are kept there.
    """

    spec: RequestSpec
    progress: RequestProgress = field(default_factory=RequestProgress)
    memory: RequestMemory = field(default_factory=RequestMemory)
    eviction: RequestEviction = field(default_factory=RequestEviction)
    group: RequestGroup | None = None
    split_from: RequestGroup | None = None

    # ---- specification -------------------------------------------------------------------------

    @property
    def request_id(self) -> str:
        """See `RequestSpec`."""
        return self.spec.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        """See `RequestSpec`."""
        return self.spec.prompt_token_ids

    @property
    def params(self) -> SamplingParams:
        """See `RequestSpec`."""
        return self.spec.params

    @property
    def priority(self) -> int:
        """See `RequestSpec`."""
        return self.spec.priority

    @property
    def deadline_s(self) -> float:
        """See `RequestSpec`."""
        return self.spec.deadline_s

    @property
    def tenant(self) -> str:
        """See `RequestSpec`."""
        return self.spec.tenant

    @property
    def sampling_seed(self) -> int:
        """See `RequestSpec`."""
        return self.spec.sampling_seed

    @property
    def order(self) -> Order:
        """Sort key of the queue: priority, then the earliest deadline, then arrival."""
        return self.spec.priority, self.spec.deadline_s, self.spec.arrival

    @property
    def is_running(self) -> bool:
        """Whether it holds KV and is scheduled."""
        return self.progress.state is RequestState.RUNNING

    # ---- tokens --------------------------------------------------------------------------------

    @property
    def output_token_ids(self) -> list[int]:
        """See `RequestProgress`."""
        return self.progress.output_token_ids

    def count_cached(self, first: int, end: int) -> None:
        """Count tokens from `first` up to `end`, whose KV has come from a prefix cache.

        Tokens of earlier runs do not count: the request has computed or counted them already.
        """
        end = min(end, len(self.prompt_token_ids))
        self.progress.cached_tokens += max(0, end - max(first, self.progress.furthest_tokens))

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and answer so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose KV is missing; 1 while decoding."""
        return self.num_tokens - self.progress.num_computed

    @property
    def scores_prompt(self) -> bool:
        """Whether it wants its prompt scored and has not read all of it."""
        wanted = self.params.prompt_logprobs is not None
        return wanted and self.progress.num_computed < len(self.prompt_token_ids)

    @property
    def final_tokens(self) -> int:
        """Tokens whose KV it can come to need: the last one generated is never processed."""
        return len(self.prompt_token_ids) + max(0, self.params.max_tokens - 1)

    @property
    def exact_tokens(self) -> int:
        """Tokens it holds before the first of them leaves: so far it can be as any other is."""
        exact = self.eviction.spec.exact_tokens(len(self.prompt_token_ids))
        if self.eviction.pending:
            exact = min(exact, len(self.prompt_token_ids))
        return min(exact, self.eviction.trace[0].num_computed) if self.eviction.trace else exact

    def token_ids(self, start: int, end: int) -> list[int]:
        """Known tokens by logical position."""
        prompt = len(self.prompt_token_ids)
        if start >= prompt:
            return self.output_token_ids[start - prompt : end - prompt]
        ids = self.prompt_token_ids[start:end]
        return ids + self.output_token_ids[: end - prompt] if end > prompt else ids
