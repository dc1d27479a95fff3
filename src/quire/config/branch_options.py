"""Which options for several sequences a prompt go together: n, best_of and beam search."""

from collections.abc import Iterator
from typing import Literal, Protocol, runtime_checkable

from quire.errors import RequestError

_NARROWS = {"temperature": 1e-5, "top_k": 1, "min_p": 1e-300}
"""Options for drawing, and the least value with which each does something."""


@runtime_checkable
class DrawOptions(Protocol):
    """How a token is drawn; None where nothing is said."""

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
    """The options that matter here; `quire.config.sampling_params.SamplingParams` has them."""

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


def check_branches(options: BranchOptions) -> None:
    """Refuse combinations that cannot be.

    Raises:
        RequestError: with what does not go together, and what to change.
    """
    problems = _beam_problems if options.use_beam_search else _draw_problems
    for param, problem in problems(options):
        raise RequestError(problem, param=param)


_Problem = tuple[str, str]  # the field, and what is wrong with it


def _draw_problems(options: BranchOptions) -> Iterator[_Problem]:
    if options.best_of is not None and options.best_of < options.n:
        yield (
            "best_of",
            f"best_of={options.best_of} is less than n={options.n}: the n answers returned are "
            "chosen among best_of; raise it or lower n",
        )
    for name, neutral in (("beam_width", None), ("length_penalty", 1.0), ("early_stopping", False)):
        if getattr(options, name) != neutral:
            yield (
                name,
                f"{name}={getattr(options, name)!r} belongs to a beam search: set "
                "use_beam_search=true or leave it out",
            )


def _beam_problems(options: BranchOptions) -> Iterator[_Problem]:
    for name in ("best_of", "beam_width"):
        width = getattr(options, name)
        if width is not None and width < options.n:
            yield (
                name,
                f"{name}={width} beams cannot give n={options.n} answers: raise it or lower n",
            )
    if None not in (options.best_of, options.beam_width) and options.best_of != options.beam_width:
        yield (
            "beam_width",
            f"best_of={options.best_of} and beam_width={options.beam_width} both say how many "
            "beams there are: leave one out",
        )
    if not options.max_tokens:
        yield "max_tokens", "max_tokens=0 leaves a beam search nothing to search: raise it"
    if options.stop:
        yield (
            "stop",
            "a beam search does not look for stop texts, because its beams are tokens and have no "
            "text before it ends: leave out stop, or give stop_token_ids",
        )
    for name, least in _NARROWS.items():
        if (getattr(options, name) or 0) >= least:
            yield (
                name,
                f"{name}={getattr(options, name)} is for drawing, and a beam search draws nothing: "
                "leave it out",
            )
    if options.top_p not in (None, 1.0):
        yield (
            "top_p",
            f"top_p={options.top_p} is for drawing, and a beam search draws nothing: leave it out",
        )
