"""Rate limits of tenants: requests and tokens per minute, with OpenAI's response headers.

Each limit is a token bucket: it holds one minute of the limit, and refills continuously. A request
is charged its prompt and the most tokens that it may generate; tokens that were not generated are
returned when it ends. A chat without `max_tokens` is charged an estimate: tokens beyond it are
charged when it ends, and the bucket's level may then be negative.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from quire.errors import ConfigError, QuireError, RequestError

MAX_PER_MINUTE = 10**12
MAX_TENANTS = 4096
"""Tenants whose buckets are stored. The least recently used bucket is removed, so that clients
that send many tenant names cannot fill the memory."""

_MINUTE_S = 60.0


class RateLimited(QuireError):
    """A tenant has used up its requests or tokens of this minute.

    Attributes:
        retry_after_s: seconds until the request would be accepted.
    """

    def __init__(self, message: str, retry_after_s: float, headers: Mapping[str, str]) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.headers = {**headers, "Retry-After": str(max(1, math.ceil(retry_after_s)))}


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimit:
    """Limits of one tenant.

    Attributes:
        requests_per_minute: prompts per minute; None: no limit.
        tokens_per_minute: prompt and output tokens per minute; None: no limit.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    def __post_init__(self) -> None:
        for name in ("requests_per_minute", "tokens_per_minute"):
            value: object = getattr(self, name)
            is_number = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (is_number and 1 <= value <= MAX_PER_MINUTE):  # type: ignore[operator]
                raise ConfigError(
                    f"expected {name} to be a whole number from 1 to {MAX_PER_MINUTE:,}, got "
                    f"{value!r}: leave it out for no limit"
                )


@dataclass(slots=True)
class _Bucket:
    limit: int
    level: float
    updated_s: float

    def refill(self, now_s: float) -> None:
        elapsed_s = now_s - self.updated_s
        self.level = min(float(self.limit), self.level + elapsed_s * self.limit / _MINUTE_S)
        self.updated_s = now_s

    def wait_s(self, amount: int) -> float:
        return max(0.0, (amount - self.level) * _MINUTE_S / self.limit)

    def put_back(self, amount: int) -> None:
        self.level = min(float(self.limit), self.level + amount)


@dataclass(slots=True)
class Charge:
    """What a request was charged; `settle` returns unused tokens when it ends.

    After `settle` or `refund`, further calls have no effect.
    """

    headers: Mapping[str, str]
    _amounts: Mapping[str, tuple[_Bucket, int]] = field(default_factory=dict, repr=False)

    def settle(self, used_tokens: int) -> None:
        """Return the charged tokens that were not used, or charge those beyond an estimate."""
        amounts, self._amounts = self._amounts, {}
        if "tokens" in amounts:
            bucket, amount = amounts["tokens"]
            bucket.put_back(amount - used_tokens)

    def refund(self) -> None:
        amounts, self._amounts = self._amounts, {}
        for bucket, amount in amounts.values():
            bucket.put_back(amount)


class RateLimits:
    """Rate limits of all tenants. Used in the event loop only.

    Args:
        default: limits of a tenant without its own.
        clock: time in seconds.
    """

    def __init__(
        self,
        default: RateLimit | None = None,
        own: Mapping[str, RateLimit] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._default, self._own, self._clock = default or RateLimit(), dict(own or {}), clock
        self._buckets: OrderedDict[tuple[str, str], _Bucket] = OrderedDict()

    def charge(
        self, tenant: str, *, requests: int, tokens: int, min_tokens: int | None = None
    ) -> Charge:
        """Charge a tenant, or refuse without a charge.

        Args:
            tenant: tenant of the HTTP request.
            requests: prompts of the HTTP request.
            tokens: prompt tokens, and the most tokens that may be generated.
            min_tokens: least tokens that the request uses, if `tokens` is an estimate: a lower
                limit lowers the estimate. None: `tokens` is exact.

        Raises:
            RequestError: more than the limit of a whole minute.
            RateLimited: the limit of this minute is used up; states when to try again.
        """
        limit = self._own.get(tenant, self._default)
        if min_tokens is not None and limit.tokens_per_minute is not None:
            tokens = max(min_tokens, min(tokens, limit.tokens_per_minute))
        wanted = {
            "requests": (requests, limit.requests_per_minute),
            "tokens": (tokens, limit.tokens_per_minute),
        }
        buckets: dict[str, tuple[_Bucket, int]] = {}
        for kind, (amount, per_minute) in wanted.items():
            if per_minute is not None:
                _refuse_more_than_limit(kind, amount, per_minute)
                buckets[kind] = self._bucket(tenant, kind, per_minute), amount
        waits = {kind: bucket.wait_s(amount) for kind, (bucket, amount) in buckets.items()}
        longest = max(waits, key=lambda kind: waits[kind], default="")
        if longest and waits[longest] > 0:
            raise self._refusal(tenant, longest, waits[longest], buckets)
        for bucket, amount in buckets.values():
            bucket.level -= amount
        return Charge(_headers(buckets), buckets)

    def _refusal(
        self, tenant: str, kind: str, wait_s: float, buckets: Mapping[str, tuple[_Bucket, int]]
    ) -> RateLimited:
        bucket, amount = buckets[kind]
        return RateLimited(
            f"rate limit of tenant {tenant!r}: {bucket.limit:,} {kind} per minute, of which "
            f"{max(0, int(bucket.level)):,} are left; the request needs {amount:,}: try again in "
            f"{_duration(wait_s)}",
            wait_s,
            _headers(buckets),
        )

    def _bucket(self, tenant: str, kind: str, limit: int) -> _Bucket:
        now_s = self._clock()
        bucket = self._buckets.setdefault((tenant, kind), _Bucket(limit, float(limit), now_s))
        self._buckets.move_to_end((tenant, kind))
        if len(self._buckets) > 2 * MAX_TENANTS:
            self._buckets.popitem(last=False)
        bucket.refill(now_s)
        return bucket


def _refuse_more_than_limit(kind: str, amount: int, per_minute: int) -> None:
    if amount <= per_minute:
        return
    tokens = kind == "tokens"
    raise RequestError(
        f"the request needs {amount:,} {kind}, the rate limit is {per_minute:,} {kind} per minute: "
        + ("lower max_tokens or shorten the prompt" if tokens else "send fewer prompts"),
        param="max_tokens" if tokens else "prompt",
    )


def _headers(buckets: Mapping[str, tuple[_Bucket, int]]) -> dict[str, str]:
    """OpenAI's headers: the limit, what is left, and the time until all of it is available."""
    headers = {}
    for kind, (bucket, _) in buckets.items():
        headers[f"x-ratelimit-limit-{kind}"] = str(bucket.limit)
        headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, int(bucket.level)))
        headers[f"x-ratelimit-reset-{kind}"] = _duration(bucket.wait_s(bucket.limit))
    return headers


def _duration(seconds: float) -> str:
    """A duration in OpenAI's format: 12ms, 7.5s, 1m30s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds * 10) / 10, 60)
    return f"{int(minutes)}m{rest:g}s" if minutes else f"{rest:g}s"
