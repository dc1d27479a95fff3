"""Checks of the options for several sequences per prompt: n, best_of and beam search."""

from collections.abc import Iterator
from typing import Literal, Protocol, runtime_checkable

from quire.config.structured_outputs import StructuredOutputs
from quire.errors import RequestError

_NARROWS = {"temperature": 1e-5, "top_k": 1, "min_p": 1e-300}
"""Options of random sampling, with the lowest value that has an effect."""


@runtime_checkable
class DrawOptions(Protocol):
    """Options of random sampling; None if unset."""

    @property
    def temperature(self) -> float | None: ...  # noqa: D102
    @property
    def top_k(self) -> int | None: ...  # noqa: D102
    @property
    def top_p(self) -> float | None: ...  # noqa: D102
    @property
    def min_p(self) -> float | None: ...  # noqa: D102


@runtime_checkable
class BranchOptions(DrawOptions, Protocol):
    """The options checked here; `quire.config.sampling_params.SamplingParams` implements it."""

    @property
    def n(self) -> int: ...  # noqa: D102
    @property
    def best_of(self) -> int | None: ...  # noqa: D102
    @property
    def use_beam_search(self) -> bool: ...  # noqa: D102
    @property
    def beam_width(self) -> int | None: ...  # noqa: D102
    @property
    def length_penalty(self) -> float: ...  # noqa: D102
    @property
    def early_stopping(self) -> bool | Literal["never"]: ...  # noqa: D102
    @property
    def max_tokens(self) -> int: ...  # noqa: D102
    @property
    def stop(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def ignore_eos(self) -> bool: ...  # noqa: D102
    @property
    def structured_outputs(self) -> StructuredOutputs | None: ...  # noqa: D102


def check_branches(options: BranchOptions) -> None:
    """Refuse invalid combinations.

    Raises:
        RequestError: states the conflicting options and what to change.
    """
    problems = _beam_problems if options.use_beam_search else _draw_problems
    for param, problem in problems(options):
        raise RequestError(problem, param=param)


_Problem = tuple[str, str]  # the field and the error message


def _draw_problems(options: BranchOptions) -> Iterator[_Problem]:
    if options.best_of is not None and options.best_of < options.n:
        yield (
            "best_of",
            f"best_of={options.best_of} is less than n={options.n}: the n returned completions are "
            "chosen among best_of; raise best_of or lower n",
        )
    for name, neutral in (("beam_width", None), ("length_penalty", 1.0), ("early_stopping", False)):
        if getattr(options, name) != neutral:
            yield (
                name,
                f"{name}={getattr(options, name)!r} is an option of beam search: set "
                "use_beam_search=true or leave it out",
            )


def _beam_problems(options: BranchOptions) -> Iterator[_Problem]:
    for name in ("best_of", "beam_width"):
        width = getattr(options, name)
        if width is not None and width < options.n:
            yield (
                name,
                f"{name}={width} is less than n={options.n}: raise {name} or lower n",
            )
    if None not in (options.best_of, options.beam_width) and options.best_of != options.beam_width:
        yield (
            "beam_width",
            f"best_of={options.best_of} and beam_width={options.beam_width} both set the number of "
            "beams: leave one out",
        )
    if not options.max_tokens:
        yield "max_tokens", "expected max_tokens >= 1 with beam search, got 0: raise max_tokens"
    if options.stop:
        yield (
            "stop",
            "stop is not supported with beam search, because beams have no text before the search "
            "ends: leave out stop, or use stop_token_ids",
        )
    if options.structured_outputs is not None and options.ignore_eos:
        yield (
            "ignore_eos",
            "ignore_eos is not supported with structured_outputs and beam search, because a beam "
            "ends with the end-of-sequence token: leave out ignore_eos",
        )
    for name, least in _NARROWS.items():
        if (getattr(options, name) or 0) >= least:
            yield (
                name,
                f"{name}={getattr(options, name)} is an option of random sampling, which beam "
                "search does not use: leave it out",
            )
    if options.top_p not in (None, 1.0):
        yield (
            "top_p",
            f"top_p={options.top_p} is an option of random sampling, which beam search does not "
            "use: leave it out",
        )
