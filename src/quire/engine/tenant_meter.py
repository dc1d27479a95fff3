"""What each tenant has had so far: requests, tokens, time in the queue, bytes, preemptions."""

from dataclasses import dataclass, replace

from quire.engine.tenant_book import TenantBook


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantStats:
    """Numbers of one tenant since the engine's start, and what it holds now.

    Attributes:
        tenant: whose.
        num_requests: submitted.
        num_entered: times a request was let into the KV memory, after a preemption again.
        prompt_tokens: read, each token of a prompt once.
        cached_tokens: of prompts, whose KV was there.
        output_tokens: generated.
        queue_s: seconds its requests have waited, of those that were let in.
        num_preemptions: times one of its requests was thrown out.
        held_bytes, guaranteed_bytes, share_bytes: KV bytes it holds, is sure of, and would be given
            now. 0 where nobody keeps its account.
    """

    tenant: str
    num_requests: int = 0
    num_entered: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    queue_s: float = 0.0
    num_preemptions: int = 0
    held_bytes: int = 0
    guaranteed_bytes: int = 0
    share_bytes: int = 0


class _Counts:
    """The same, while it changes."""

    def __init__(self) -> None:
        self.num_requests = self.num_entered = self.num_preemptions = 0
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.queue_s = 0.0


class TenantMeter:
    """Counts what tenants are served."""

    def __init__(self) -> None:
        self._counts: dict[str, _Counts] = {}

    def submitted(self, tenant: str) -> None:
        """A request has been queued."""
        self._of(tenant).num_requests += 1

    def entered(self, tenant: str, waited_s: float, *, cached_tokens: int = 0) -> None:
        """A request has been let in.

        Args:
            tenant: whose.
            waited_s: seconds since it was submitted, or thrown out.
            cached_tokens: of its prompt, whose KV was there.
        """
        counts = self._of(tenant)
        counts.num_entered += 1
        counts.queue_s += waited_s
        counts.cached_tokens += cached_tokens

    def served(self, tenant: str, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Tokens have been read for the first time, or generated."""
        counts = self._of(tenant)
        counts.prompt_tokens += prompt_tokens
        counts.output_tokens += output_tokens

    def preempted(self, tenant: str) -> None:
        """A request has been thrown out."""
        self._of(tenant).num_preemptions += 1

    def report(self, book: TenantBook | None = None) -> tuple[TenantStats, ...]:
        """The numbers of all who asked for anything, by name.

        Args:
            book: the accounts of bytes; its tenants are reported too, whether they asked or not.
        """
        names = self._counts.keys() | (set() if book is None else set(book.tenants))
        counted = (
            TenantStats(tenant=name, **vars(self._counts.get(name, _Counts())))
            for name in sorted(names)
        )
        if book is None:
            return tuple(counted)
        return tuple(
            replace(
                stats,
                held_bytes=book.held_bytes(stats.tenant),
                guaranteed_bytes=book.spec(stats.tenant).guaranteed_bytes,
                share_bytes=book.share_bytes(stats.tenant),
            )
            for stats in counted
        )

    def _of(self, tenant: str) -> _Counts:
        return self._counts.setdefault(tenant, _Counts())
