"""The scheduling options: sizes of steps, admission, preemption, batching, tenants."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, no_type_check

from quire.errors import ConfigError
from quire.layout.options import check_options, option
from quire.tenancy.tenants import parse_tenants

if TYPE_CHECKING:
    from quire.scheduler.batchers.base import PagedRule

CONTINUOUS = "continuous"
Objective = Literal["auto", "latency", "throughput"]
Admission = Literal["auto", "optimistic", "reserved", "estimated"]
Preemption = Literal["auto", "swap", "recompute", "hybrid"]
INVARIANT_ROWS = 32
"""Rows of every forward with `batch_invariant`: few enough that weight reads hide the padding."""


@no_type_check  # type checks in tests must not replace the errors of `__post_init__`
@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """Scheduling options of an engine.

    Attributes are options; see their help.
    """

    max_num_seqs: int = option(
        256, help="maximum number of sequences that run at the same time", common=True
    )
    max_num_batched_tokens: int = option(
        2048,
        help="maximum number of tokens in a step; decoding rows are scheduled first",
        unit="tokens",
        common=True,
    )
    chunk_tokens: int = option(
        2048,
        help="maximum number of tokens of one prompt that a step prefills (chunked prefill)",
        unit="tokens",
    )
    objective: Objective = option(
        "auto",
        help="step size while --weights-memory offloads weights: latency (a step is one batch), "
        "throughput (several batches of a step share each transferred layer), auto (enough "
        "batches to hide the transfers)",
    )
    admission: Admission = option(
        "auto",
        help="when a waiting request may start: optimistic (its known tokens fit), reserved "
        "(prompt and max_tokens fit), estimated (the peak estimated from past outputs fits), auto "
        "(optimistic if preempted requests can be swapped out, else estimated)",
    )
    low_watermark: float = option(
        0.99, help="admit no request while KV memory use exceeds this fraction (0 to 1)"
    )
    high_watermark: float = option(
        1.0, help="preempt a request when KV memory use exceeds this fraction (0 to 1)"
    )
    scale_down_at: float | None = option(
        None,
        help="swap requests out to --swap-space while KV memory use exceeds this fraction (0 to "
        "1), and in again when pages are free; unset: requests are preempted only if no page is "
        "free",
    )
    preempt: Preemption = option(
        "auto",
        help="what happens to the KV of a preempted request: swap (to --swap-space), recompute, "
        "hybrid (swap what fits, recompute the rest), auto (by measured cost)",
    )
    batcher: str = option(
        CONTINUOUS,
        help="batching rule for the --max-num-seqs rows: continuous, static, pd, orca, baton_pd or "
        "baton_pd_best_fit, with options as in baton_pd:queue=8,hold=host",
    )
    urgent: int | None = option(
        None,
        help="largest priority value of urgent requests, which preempt requests with larger values "
        "before the next step; unset: requests with lower values are only admitted first",
    )
    batch_invariant: bool = option(
        False,
        help="compute logits that do not depend on the rest of the batch, on prompt chunks or on "
        "preemptions, by fixed shapes of matrix products and attention; on CPUs only, slower for "
        "small batches and long prompts",
    )
    cuda_graphs: bool | None = option(
        None,
        help="run decode steps as CUDA graphs for padded batch sizes (1, 2, 4 and so on); unset: "
        "if the model is on a CUDA device and the attention backend supports it",
    )
    async_scheduling: bool | None = option(
        None,
        help="plan and launch a step before the tokens of the last step are read; unset: if the "
        "model is on a CUDA device and the other options support it",
    )
    speculative: str = option(
        "off",
        help="speculative decoding: proposed tokens that a step verifies together, such as "
        "ngram:tokens=8,min=2 (what followed the last tokens before), suffix:tokens=16 (what "
        "followed most often, also in earlier outputs), draft:model=NAME,tokens=5 (the tokens of a "
        "smaller model), or vLLM's JSON; outputs are the same as without",
    )
    tenants: str = option(
        "",
        help="tenants that share the KV memory and the steps, such as "
        "'a:weight=2; b:guaranteed=64MiB'; unset: every tenant has the same weight",
    )

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("max_num_seqs", "max_num_batched_tokens", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"expected {name} >= 1, got {getattr(self, name)}")
        parse_tenants(self.tenants)
        from quire.scheduler.speculation import parse_speculative

        parse_speculative(self.speculative)
        if self.batcher != CONTINUOUS:  # the default needs no check: --help runs without NumPy
            _ = self.num_rows  # raises for an unknown batcher
        if self.urgent is not None and self.max_num_batched_tokens <= self.max_num_seqs:
            raise ConfigError(
                "urgent requests are prefilled in the same step as a full batch: expected "
                "max_num_batched_tokens > max_num_seqs, "
                f"got {self.max_num_batched_tokens} and {self.max_num_seqs}"
            )
        if not 0 < self.low_watermark <= self.high_watermark <= 1:
            raise ConfigError(
                "expected 0 < low_watermark <= high_watermark <= 1, got "
                f"{self.low_watermark} and {self.high_watermark}"
            )
        if self.scale_down_at is not None and not 0 < self.scale_down_at <= 1:
            raise ConfigError(
                f"expected scale_down_at above 0 and up to 1, got {self.scale_down_at}"
            )

    @property
    def batching(self) -> "PagedRule":
        """The batching rule.

        Raises:
            ConfigError: see `parse_batcher`.
        """
        from quire.scheduler.batchers import parse_batcher  # imports NumPy; --help doesn't

        return parse_batcher(self.batcher)

    @property
    def num_rows(self) -> int:
        """Rows of the KV memory: those of the batch plus the batcher's queue."""
        return self.batching.num_rows(self.max_num_seqs)

    @property
    def rows_with_forks(self) -> int:
        """Rows of page tables: with speculative decoding also those before proposed tokens."""
        from quire.scheduler.speculation import parse_speculative

        return self.num_rows * (1 if parse_speculative(self.speculative) is None else 2)

    @property
    def full_at(self) -> float:
        """Fraction (0 to 1) of KV memory use above which no request is admitted."""
        return min(self.low_watermark, self.scale_down_at or 1.0)

    @property
    def forward_tokens(self) -> int:
        """Maximum number of tokens in a forward."""
        return (
            min(self.max_num_batched_tokens, INVARIANT_ROWS)
            if self.batch_invariant
            else self.max_num_batched_tokens
        )

    @property
    def longest_chunk(self) -> int:
        """Maximum number of tokens of one prompt in a step."""
        return min(self.max_num_batched_tokens, self.chunk_tokens)
