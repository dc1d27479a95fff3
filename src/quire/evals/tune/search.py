"""Successive halving (Jamieson and Talwalkar 2016) over candidates.

A first round of few prompts removes each candidate whose quality is below the wanted one on all of
them, and the candidates with its codec or its rule: errors of codec and rule add up. In each round
the remaining candidates are measured on more prompts. A candidate is removed if the upper end of
its interval is below the wanted quality. Of the others, those that hold the most requests remain,
and those that no other candidate beats in both quality and requests.

Differs from the paper: the order is that of the requests, which are known without a run; the
quality only has to be reached.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from quire.evals.intervals import Mean
from quire.evals.tune.space import SearchCandidate

Measure = Callable[[SearchCandidate, int], Mean]
"""Maps a candidate and a number of prompts to its quality on the first prompts."""

Parts = Callable[[SearchCandidate], Sequence[SearchCandidate]]
"""Returns the candidates that have only the codec, or only the rule, of a candidate."""

Note = Callable[[str, int], None]
"""Takes the place of the search before each candidate, and about how many prompts follow it."""

DIVISOR = 3
"""A round keeps a third of the candidates, and the next one has three times as many prompts."""

FIRST_PROMPTS = 4
"""Prompts of the first round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round."""

    prompts: int
    quality: Mapping[SearchCandidate, Mean]
    kept: tuple[SearchCandidate, ...]  # candidates of the next round


def round_sizes(prompts: int, *, least: int = 6) -> list[int]:
    """Number of prompts of each round, ascending; the last one has all prompts."""
    sizes = [prompts]
    while sizes[0] // DIVISOR >= least:
        sizes.insert(0, sizes[0] // DIVISOR)
    return sizes


def halve(
    candidates: Sequence[SearchCandidate],
    rows: Mapping[SearchCandidate, int],
    measure: Measure,
    *,
    parts: Parts,
    prompts: int,
    wanted: float,
    note: Note = lambda place, prompts: None,
) -> list[Round]:
    """Run all rounds; the order of candidates breaks ties, `parts` are a codec or rule alone."""
    remaining, rounds = list(candidates), list[Round]()
    sizes = round_sizes(prompts)
    first = [FIRST_PROMPTS] * (sizes[0] > FIRST_PROMPTS)
    if first:
        noted = _noted(remaining, first + sizes, 0, note)
        rounds.append(first_round(noted, measure, parts, wanted))
        remaining = list(rounds[-1].kept)
    for number, size in enumerate(sizes, len(first)):
        noted = _noted(remaining, first + sizes, number, note)
        quality = {one: measure(one, size) for one in noted}
        kept = _kept(quality, rows, wanted, is_last=size == prompts)
        rounds.append(Round(prompts=size, quality=quality, kept=tuple(kept)))
        remaining = kept
    return rounds


def _noted(
    candidates: Sequence[SearchCandidate], sizes: Sequence[int], number: int, note: Note
) -> Iterator[SearchCandidate]:
    """The candidates of a round, each after its note. A round runs its new prompts only."""
    new = [size - before for before, size in pairwise([0, *sizes])]
    later = sum(
        -(-len(candidates) // DIVISOR**rounds) * prompts
        for rounds, prompts in enumerate(new[number + 1 :], 1)
    )
    for index, one in enumerate(candidates):
        place = f"round {number + 1}/{len(sizes)}, {index + 1}/{len(candidates)}"
        note(place, new[number] * (len(candidates) - index - 1) + later)
        yield one


def first_round(
    candidates: Iterable[SearchCandidate], measure: Measure, parts: Parts, wanted: float
) -> Round:
    """Remove what is below the wanted quality on all of the first prompts; parts run first."""
    quality: dict[SearchCandidate, Mean] = {}

    def is_possible(one: SearchCandidate) -> bool:
        if one not in quality:
            quality[one] = measure(one, FIRST_PROMPTS)
        return quality[one].most >= wanted

    kept = [one for one in candidates if all(map(is_possible, (*parts(one), one)))]
    return Round(prompts=FIRST_PROMPTS, quality=quality, kept=tuple(kept))


def _kept(
    quality: Mapping[SearchCandidate, Mean],
    rows: Mapping[SearchCandidate, int],
    wanted: float,
    *,
    is_last: bool,
) -> list[SearchCandidate]:
    if is_last:
        good = [one for one, found in quality.items() if found.mean >= wanted]
        return sorted(good, key=lambda one: (-rows[one], -quality[one].mean))
    possible = [one for one, found in quality.items() if found.high >= wanted]
    best = sorted(possible, key=lambda one: (-rows[one], -quality[one].mean))
    chosen = {*best[: -(-len(quality) // DIVISOR)], *pareto(possible, quality, rows)}
    return [one for one in quality if one in chosen]


def pareto(
    candidates: Sequence[SearchCandidate],
    quality: Mapping[SearchCandidate, Mean],
    rows: Mapping[SearchCandidate, int],
) -> list[SearchCandidate]:
    """Candidates that no other one beats in quality and requests, by descending requests."""
    found, best = list[SearchCandidate](), float("-inf")
    for one in sorted(candidates, key=lambda c: (-rows[c], -quality[c].mean)):
        if quality[one].mean > best:
            found.append(one)
            best = quality[one].mean
    return found
